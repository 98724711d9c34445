// Scratch matrices of a forward pass.
#pragma once

#include "k3/kernels/exec.h"
#include "k3/tensor/view.h"

namespace k3 {

/// Uninitialised [rows, cols] in the pass's workspace.
inline Mat NewMat(Exec& exec, std::int64_t rows, std::int64_t cols) {
  return Mat(exec.ws.Alloc<float>(rows * cols), {rows, cols});
}

}  // namespace k3
