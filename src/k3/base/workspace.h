// Scratch memory for one forward pass: a bump allocator that is reset, never freed piecewise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace k3 {

/// Bump arena, 64-byte aligned. Grows by whole blocks when a pass needs more than any before it, so
/// a warm pass allocates nothing. Not thread-safe: one per running forward pass.
class Workspace {
 public:
  /// Uninitialised array of n elements, valid until the enclosing Mark is released or Reset.
  template <class T>
  T* Alloc(std::int64_t n) {
    return static_cast<T*>(AllocBytes(static_cast<std::size_t>(n) * sizeof(T)));
  }
  void Reset();
  /// Makes the next `bytes` of allocations after a Reset come from one block of exactly that size
  /// (or the larger one that is there already). Only right after a Reset.
  void Reserve(std::int64_t bytes);

  /// Frees everything allocated since its construction when it goes out of scope.
  class Mark {
   public:
    explicit Mark(Workspace& ws)
        : ws_(ws), block_(ws.block_), used_(ws.used_), before_(ws.before_) {}
    ~Mark() { ws_.block_ = block_, ws_.used_ = used_, ws_.before_ = before_; }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

   private:
    Workspace& ws_;
    std::size_t block_, used_, before_;
  };

  /// Bytes held from the system.
  std::size_t reserved_bytes() const;
  /// Most bytes in use at once since the last Reset, space lost between blocks included.
  std::size_t peak_bytes() const { return peak_; }
  /// fn(start, bytes) for every block; only Reserve gives blocks back.
  template <class F>
  void ForEachBlock(F&& fn) const {
    for (const Block& b : blocks_) fn(static_cast<const void*>(b.data.get()), b.size);
  }

 private:
  void* AllocBytes(std::size_t bytes);
  void AddBlock(std::size_t size);

  struct Free {
    void operator()(std::byte* p) const;
  };
  struct Block {
    std::unique_ptr<std::byte[], Free> data;
    std::size_t size;
  };
  std::vector<Block> blocks_;
  std::size_t block_ = 0;   // index of the block in use
  std::size_t used_ = 0;    // bytes used in it
  std::size_t before_ = 0;  // bytes of the blocks before it
  std::size_t peak_ = 0;
};

}  // namespace k3
