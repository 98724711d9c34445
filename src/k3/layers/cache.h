// What each kind of layer remembers of one sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace k3 {

/// Rows of floats in fixed-size pages that copies share until one of them writes.
/// A row is written once, when it is appended. Pages never move, so their addresses stay valid.
class PagedRows {
 public:
  static constexpr std::int64_t kPageRows = 64;

  PagedRows() = default;
  explicit PagedRows(std::int64_t width) : width_(width) {}

  std::int64_t width() const { return width_; }
  std::int64_t size() const { return size_; }
  const float* row(std::int64_t i) const {
    return pages_[static_cast<std::size_t>(i / kPageRows)].get() + i % kPageRows * width_;
  }
  /// Adds n rows of unspecified content; they are written through MutableRow before being read.
  void Grow(std::int64_t n);
  /// Only for rows added by the latest Grow of this object.
  float* MutableRow(std::int64_t i) { return const_cast<float*>(row(i)); }
  /// Forgets the rows from n on.
  void Truncate(std::int64_t n);
  /// Page start addresses, for kernels.
  std::vector<const float*> PageTable() const;
  /// The same for writing, under the rule of MutableRow.
  std::vector<float*> MutablePageTable();
  std::int64_t bytes() const {
    return static_cast<std::int64_t>(pages_.size()) * kPageRows * width_ * 4;
  }

 private:
  std::int64_t width_ = 0;
  std::int64_t size_ = 0;
  std::vector<std::shared_ptr<float[]>> pages_;
};

/// KDA: state [n_heads, key, value] and the last (kernel - 1) pre-convolution rows of the q, k and
/// v streams, oldest first: [3, kernel - 1, n_heads * head_dim].
struct KdaCache {
  std::vector<float> state;
  std::vector<float> conv;
};

/// MLA: one row [kv_lora_rank | qk_rope] a token. GQA: keys and values, each [n_kv_heads *
/// head_dim].
struct LayerCache {
  KdaCache kda;
  PagedRows rows;        // MLA rows, or GQA keys
  PagedRows value_rows;  // GQA values
};

}  // namespace k3
