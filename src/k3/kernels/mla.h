// Softmax attention over compressed key-value rows (multi-head latent attention). Spec section 7.
#pragma once

#include <span>

#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// One sequence's share: queries are rows [begin, begin + count) of the batch; they attend causally
/// to the cached rows, the last `count` of which are their own.
struct MlaSequence {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::span<const float* const> pages;  // of page_rows rows each
  std::int64_t n_rows = 0;
};

enum class MlaForm : std::uint8_t {
  kAbsorbed,  // W_uk moved onto the query: per step O(rows * kv_rank), no expanded keys
  kPlain,     // keys and values expanded from the rows first: cheaper for long runs of queries
};

/// o = softmax((q_n . W_uk c + q_r . k_r) scale) W_uv c, causal; no rotation, no other positions.
/// Shapes: q [T, N * (nope + rope)], per head [q_n | q_r]; a cached row is [c | k_r] with kv_rank +
/// rope values; kv_b [N * (nope + v), kv_rank], per head W_uk then W_uv; o [T, N * v].
/// Both forms are equal in exact arithmetic; exact mode always uses kAbsorbed, because only then
/// does a query's result not depend on the queries beside it.
struct MlaArgs {
  CMat q;
  WeightRef kv_b;
  std::int64_t n_heads = 0;
  std::int64_t nope_dim = 0;
  std::int64_t rope_dim = 0;
  std::int64_t v_dim = 0;
  std::int64_t page_rows = 0;
  float scale = 1.f;
  std::span<const MlaSequence> sequences;
  MlaForm form = MlaForm::kAbsorbed;
  Mat o;

  std::int64_t kv_rank() const { return kv_b.cols; }
  std::int64_t q_dim() const { return nope_dim + rope_dim; }
  std::int64_t row_dim() const { return kv_rank() + rope_dim; }
};

}  // namespace k3
