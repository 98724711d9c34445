#include "k3/layers/cache.h"

#include <algorithm>

namespace k3 {

void PagedRows::Grow(std::int64_t n) {
  const std::int64_t old_size = size_;
  size_ += n;
  if (n > 0 && old_size % kPageRows != 0) {
    // The last page is about to be written: take a private copy if another state shares it.
    auto& page = pages_[static_cast<std::size_t>(old_size / kPageRows)];
    if (page.use_count() > 1) {
      std::shared_ptr<float[]> copy(new float[static_cast<std::size_t>(kPageRows * width_)]);
      std::copy_n(page.get(), old_size % kPageRows * width_, copy.get());
      page = std::move(copy);
    }
  }
  while (static_cast<std::int64_t>(pages_.size()) * kPageRows < size_) {
    pages_.emplace_back(new float[static_cast<std::size_t>(kPageRows * width_)]);
  }
}

void PagedRows::Truncate(std::int64_t n) {
  size_ = n;
  pages_.resize(static_cast<std::size_t>((n + kPageRows - 1) / kPageRows));
}

std::vector<const float*> PagedRows::PageTable() const {
  std::vector<const float*> table;
  table.reserve(pages_.size());
  for (const auto& p : pages_) table.push_back(p.get());
  return table;
}

std::vector<float*> PagedRows::MutablePageTable() {
  std::vector<float*> table;
  table.reserve(pages_.size());
  for (auto& p : pages_) table.push_back(p.get());
  return table;
}

}  // namespace k3
