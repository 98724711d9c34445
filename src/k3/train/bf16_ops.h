// Products as a processor with bf16 units makes them.
#pragma once

#include <memory>

#include "k3/kernels/backend.h"

namespace k3 {

/// In front of other ops: what enters a product with a weight matrix is rounded to bf16; the sums,
/// their results and every other op stay f32. Left alone are products with keep_f32 (the router)
/// and the keys that attention makes from its latents (Mla). Weights are taken as they are: whoever
/// owns them rounds them. The gradients that fit come from grad::Context::round_bf16.
std::unique_ptr<Backend> MakeBf16Ops(std::unique_ptr<Backend> inner);

}  // namespace k3
