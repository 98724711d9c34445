// Gradients of the ops. One function an op, for float and for double; the op's own header states
// the forward equation, the functions here its transpose.
//
// Every d* output is ADDED to. A d* view without data is not wanted and not computed; dy and the
// inputs must be set. No d* may overlap dy or an input. Tolerance in double: 1e-6 of a central
// difference; in float: the error of the forward op. Golden: the d* tensors of modules*.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "k3/base/ids.h"
#include "k3/kernels/backward/context.h"
#include "k3/kernels/elementwise.h"
#include "k3/kernels/short_conv.h"
#include "k3/tensor/view.h"

namespace k3::grad {

template <class S>
struct RmsNormArgs {
  View<const S, 2> x;
  View<const S, 1> w;
  S eps = 0;
  View<const S, 2> dy;
  View<S, 2> dx;
  View<S, 1> dw;
};

template <class S>
struct GatedRmsNormArgs {
  View<const S, 2> x, gate;
  View<const S, 1> w;
  S eps = 0;
  View<const S, 2> dy;
  View<S, 2> dx, dgate;
  View<S, 1> dw;
};

template <class S>
struct L2NormArgs {
  View<const S, 2> x;
  std::int64_t head_dim = 0;
  S eps = 0;
  View<const S, 2> dy;
  View<S, 2> dx;
};

/// dx += dy w, dw += dy^T x, for w [N, K] dense. keep_f32: never rounded, as forward.
template <class S>
struct GemmArgs {
  View<const S, 2> x, w, dy;
  View<S, 2> dx, dw;
  bool keep_f32 = false;
};

template <class S>
struct EmbedArgs {
  std::span<const TokenId> ids;
  View<const S, 2> dy;
  View<S, 2> dtable;
};

template <class S>
struct GatedActArgs {
  View<const S, 2> gate, up;
  GatedActivation act;
  View<const S, 2> dy;
  View<S, 2> dgate, dup;
};

/// out = x + alpha y [sigmoid(gate)]. dalpha points to one number, or is null.
template <class S>
struct ResidualArgs {
  View<const S, 2> y, gate;
  S alpha = 1;
  View<const S, 2> dout;
  View<S, 2> dx, dy, dgate;
  S* dalpha = nullptr;
};

template <class S>
struct PointwiseArgs {
  View<const S, 2> x;
  PointwiseFn fn = PointwiseFn::kSilu;
  View<const S, 2> dy;
  View<S, 2> dx;
};

/// Takes the sigmoid's result y, which an in-place op leaves behind.
template <class S>
struct SigmoidArgs {
  View<const S, 2> y, dy;
  View<S, 2> dx;
};

template <class S>
struct SigmoidGateArgs {
  View<const S, 2> x, gate, dy;
  View<S, 2> dx, dgate;
};

template <class S>
struct AddBiasArgs {
  View<const S, 2> dy;
  View<S, 2> dx;
  View<S, 1> dbias;
};

/// y[i] = x[rows[i]], or x[i] without rows.
template <class S>
struct CopyRowsArgs {
  std::span<const std::int64_t> rows;
  View<const S, 2> dy;
  View<S, 2> dx;
};

/// histories: the rows before each sequence as they were. dhistories: in, the gradient of the rows
/// the op left there; out (replaced, not added to), that of the rows it found. May be empty.
template <class S>
struct ShortConvArgs {
  View<const S, 2> x, w;
  std::span<const SequenceRange> sequences;
  std::span<const S* const> histories;
  View<const S, 2> dy;
  View<S, 2> dx, dw;
  std::span<S* const> dhistories;
};

template <class S>
struct KdaGateArgs {
  View<const S, 2> f;
  View<const S, 1> dt_bias, a_log;
  std::optional<S> lower_bound;
  View<const S, 2> dg;
  View<S, 2> df;
  View<S, 1> ddt_bias, da_log;
};

/// states: the initial ones. dstates: in, the gradient of the final states; out (replaced), of the
/// initial ones. Only states at every kBorder-th token are kept; those between are recomputed.
template <class S>
struct KdaArgs {
  static constexpr std::int64_t kBorder = 16;
  View<const S, 2> q, k, v, g, beta;
  std::int64_t n_heads = 0;
  S scale = 1;
  std::span<const SequenceRange> sequences;
  std::span<const S* const> states;
  View<const S, 2> dout;
  View<S, 2> dq, dk, dv, dg, dbeta;
  std::span<S* const> dstates;
};

/// Rows of one sequence in pages, and the pages of their gradients.
template <class S>
struct PagedSequence {
  std::int64_t begin = 0, count = 0, n_rows = 0;
  std::span<const S* const> pages, value_pages;  // MLA uses pages alone
  std::span<S* const> dpages, dvalue_pages;
};

template <class S>
struct MlaArgs {
  View<const S, 2> q, kv_b;
  std::int64_t n_heads = 0, nope_dim = 0, rope_dim = 0, v_dim = 0, page_rows = 0;
  S scale = 1;
  std::span<const PagedSequence<S>> sequences;
  View<const S, 2> dout;
  View<S, 2> dq, dkv_b;
};

template <class S>
struct GqaArgs {
  View<const S, 2> q;
  std::int64_t n_heads = 0, n_kv_heads = 0, page_rows = 0;
  std::span<const PagedSequence<S>> sequences;
  View<const S, 2> dout;
  View<S, 2> dq;
};

/// The forward op works in place, and so does this: d is rotated back.
template <class S>
struct RopeArgs {
  View<S, 2> d;
  std::int64_t head_dim = 0;
  double theta = 10000.0;
  std::span<const std::int64_t> positions;
};

/// drows[e] is [T, H] like rows[e]; entries may be null.
template <class S>
struct AttnResArgs {
  std::span<const S* const> rows;
  View<const S, 1> w;
  S eps = 0;
  std::optional<S> gamma;
  View<const S, 2> dy;
  std::span<S* const> drows;
  View<S, 1> dw;
  S* dgamma = nullptr;
};

/// Selection is a constant; the bias has no gradient.
template <class S>
struct RouteArgs {
  View<const S, 2> logits;
  View<const std::int32_t, 2> experts;
  bool softmax = false;
  bool renormalize = true;
  S scale = 1;
  View<const S, 2> dweights;
  View<S, 2> dlogits;
};

template <class S>
struct ExpertOf {
  View<const S, 2> w1, w3, w2;
  View<S, 2> dw1, dw3, dw2;
};

template <class S>
struct ExpertMlpArgs {
  View<const S, 2> x;
  View<const std::int32_t, 2> experts;
  View<const S, 2> weights;
  std::span<const ExpertOf<S>> table;
  GatedActivation act;
  View<const S, 2> dy;
  View<S, 2> dx, dweights;
};

/// Loss and gradients of scale * sum_t -log softmax(head hidden_t)[targets[t]] in one pass over
/// chunks of tokens, so that all scores never exist at once. A negative target is left out.
///
/// With a teacher (the same number of rows; heads of the same number of rows) a token's loss is
///   (1 - weight) CE + weight T^2 KL(softmax(teacher / T) || softmax(own / T)).
template <class S>
struct CrossEntropyArgs {
  View<const S, 2> hidden, head;
  std::span<const TokenId> targets;
  S scale = 1;
  View<S, 2> dhidden, dhead;
  std::span<double> losses;  // when set: the unscaled CE of every token, 0 where left out

  View<const S, 2> teacher_hidden{}, teacher_head{};
  double teacher_weight = 0, temperature = 1;
  double* divergence = nullptr;  // when set: the unscaled sum of T^2 KL
};

#define K3_FOR_EACH_BACKWARD(X) \
  X(RmsNorm)                    \
  X(GatedRmsNorm)               \
  X(L2Norm)                     \
  X(Gemm)                       \
  X(Embed)                      \
  X(GatedAct)                   \
  X(Residual)                   \
  X(Pointwise)                  \
  X(Sigmoid)                    \
  X(SigmoidGate)                \
  X(AddBias)                    \
  X(CopyRows)                   \
  X(ShortConv)                  \
  X(KdaGate)                    \
  X(Kda)                        \
  X(Mla)                        \
  X(Gqa)                        \
  X(Rope)                       \
  X(AttnRes)                    \
  X(Route)                      \
  X(ExpertMlp)

#define K3_DECLARE_BACKWARD(name) \
  template <class S>              \
  void name(const Context& ctx, const name##Args<S>& args);
K3_FOR_EACH_BACKWARD(K3_DECLARE_BACKWARD)
#undef K3_DECLARE_BACKWARD

/// Returns the unscaled sum of CE.
template <class S>
double CrossEntropy(const Context& ctx, const CrossEntropyArgs<S>& args);

}  // namespace k3::grad
