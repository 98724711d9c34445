// Shared by the files of the tape.
#pragma once

#include <algorithm>
#include <vector>

#include "k3/train/tape.h"

namespace k3 {

/// Floats from the first element of v to one past its last.
inline std::int64_t Extent(CMat v) {
  return v.size() == 0 ? 0 : (v.dim(0) - 1) * v.strides[0] + v.dim(1);
}

inline bool Overlap(CMat a, CMat b) {
  return a.data < b.data + Extent(b) && b.data < a.data + Extent(a);
}

inline CMat Dense(const WeightRef& w) {
  return CMat(static_cast<const float*>(w.data), {w.rows, w.cols});
}

class TapeBackend::Taken {
 public:
  /// `in_place`: the op's inputs share memory with y, so the shadow is about to be added to.
  Taken(const TapeBackend& tape, CMat y, bool in_place) : dy_(tape.Shadow(y)), owner_(!in_place) {
    if (!in_place) return;
    copy_.resize(static_cast<std::size_t>(y.size()));
    for (std::int64_t t = 0; t < y.dim(0); ++t) {
      std::copy_n(dy_.row(t), y.dim(1), copy_.data() + t * y.dim(1));
    }
    Clear();
    dy_ = Mat(copy_.data(), y.shape);
  }
  ~Taken() {
    if (owner_) Clear();
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  operator CMat() const { return dy_; }  // NOLINT: stands for the gradient

 private:
  void Clear() {
    for (std::int64_t t = 0; t < dy_.dim(0); ++t) {
      std::fill(dy_.row(t), dy_.row(t) + dy_.dim(1), 0.f);
    }
  }
  Mat dy_;
  bool owner_;
  std::vector<float> copy_;
};

}  // namespace k3
