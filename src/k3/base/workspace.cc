#include "k3/base/workspace.h"

#include <algorithm>
#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace k3 {
namespace {
constexpr std::size_t kAlign = 64;
constexpr std::size_t kMinBlock = std::size_t{1} << 20;
constexpr std::size_t kHugePage = std::size_t{1} << 21;

/// Rows of activations are pages apart: with small pages every step over tokens misses the TLB.
void AskForHugePages(std::byte* p, std::size_t size) {
#if defined(__linux__)
  const auto begin = (reinterpret_cast<std::uintptr_t>(p) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(p) + size) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

void Workspace::Free::operator()(std::byte* p) const {
  ::operator delete[](p, std::align_val_t{kAlign});
}

void Workspace::Reset() { block_ = used_ = before_ = peak_ = 0; }

void Workspace::Reserve(std::int64_t bytes) {
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  if (!blocks_.empty() && blocks_[0].size >= wanted) return;
  blocks_.clear();  // free first: the old block and the new one are never held together
  AddBlock((wanted + kAlign - 1) / kAlign * kAlign);
}

void Workspace::AddBlock(std::size_t size) {
  auto* raw = static_cast<std::byte*>(::operator new[](size, std::align_val_t{kAlign}));
  blocks_.push_back({std::unique_ptr<std::byte[], Free>(raw), size});
  AskForHugePages(raw, size);
}

std::size_t Workspace::reserved_bytes() const {
  std::size_t sum = 0;
  for (const Block& b : blocks_) sum += b.size;
  return sum;
}

void* Workspace::AllocBytes(std::size_t bytes) {
  bytes = (std::max<std::size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].size) {
    before_ += blocks_[block_].size;
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    const std::size_t last = blocks_.empty() ? kMinBlock : 2 * blocks_.back().size;
    AddBlock(std::max(bytes, last));
    used_ = 0;
  }
  void* out = blocks_[block_].data.get() + used_;
  used_ += bytes;
  peak_ = std::max(peak_, before_ + used_);
  return out;
}

}  // namespace k3
