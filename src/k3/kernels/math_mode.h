// The two arithmetics of a forward pass.
#pragma once

#include <cstdint>

namespace k3 {

/// docs/numerics.md states the contract of each.
enum class MathMode : std::uint8_t {
  kExact,  // f32, one fixed reduction order, token-recurrent KDA: rows do not depend on batch,
           // split or thread count
  kFast,   // products in bf16 where the processor has them, chunked KDA on a grid anchored at
           // absolute positions, plain MLA for long runs
};

}  // namespace k3
