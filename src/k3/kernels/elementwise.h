// Pointwise ops.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "k3/tensor/view.h"

namespace k3 {

/// The activation of every feed-forward part. Spec section 8.
///   SiTU:   b1 tanh(g / b1) sigmoid(g) * (b2 tanh(u / b2), or u when b2 is absent)
///   SwiGLU: g sigmoid(g) * u
struct GatedActivation {
  bool situ = false;
  float b1 = 0.f;
  std::optional<float> b2;
};

/// y = act(gate, up). Shapes: gate, up, y [T, D]; y may be gate or up. SiTU is finite for every
/// finite input. Golden: situ.
struct GatedActArgs {
  CMat gate;
  CMat up;
  GatedActivation act;
  Mat y;
};

/// out = x + alpha * y, or x + alpha * sigmoid(gate) * y.
/// Shapes: x, y, out [T, D]; gate [T, D], or [T, 1] for one number a token, or none (null data).
/// out may be x or y. How a sublayer joins the stream (spec sections 4 and 15.5).
struct ResidualArgs {
  CMat x;
  CMat y;
  float alpha = 1.f;
  CMat gate;
  Mat out;
  const float* alpha_home = nullptr;  // where a learned alpha lives; not read, a tape needs it
};

/// y = act(x) of a router encoder (spec section 15.5). Shapes [T, D]; y may be x.
enum class PointwiseFn : std::uint8_t { kSilu, kTanh, kRelu };
struct PointwiseArgs {
  CMat x;
  PointwiseFn fn = PointwiseFn::kSilu;
  Mat y;
};

/// y = sigmoid(x). Shapes [T, D]; y may be x.
struct SigmoidArgs {
  CMat x;
  Mat y;
};

/// y = x * sigmoid(gate). Shapes [T, D]; y may be x. The MLA output gate (spec section 7, step 5).
struct SigmoidGateArgs {
  CMat x;
  CMat gate;
  Mat y;
};

/// y = x + bias. Shapes: x, y [T, D]; bias [D]. y may be x.
struct AddBiasArgs {
  CMat x;
  CVec bias;
  Mat y;
};

/// y[i] = x[rows[i]], or x[i] when `rows` is empty. Shapes: x [T, D], y [n, D], not overlapping.
struct CopyRowsArgs {
  CMat x;
  std::span<const std::int64_t> rows;
  Mat y;
};

/// Where the rows [begin, begin + count) of a batch go: rows [first, first + count) of a cache.
struct StoreRun {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t first = 0;
  std::span<float* const> pages;  // of page_rows rows each
};

/// Copies rows of x [T, D] into the pages of caches whose rows have D values.
struct StoreRowsArgs {
  CMat x;
  std::int64_t page_rows = 0;
  std::span<const StoreRun> runs;
};

}  // namespace k3
