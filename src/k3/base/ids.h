// Typed integers that must not be mixed up.
#pragma once

#include <cstdint>

namespace k3 {

using TokenId = std::int32_t;  // index into the vocabulary; JSON and tensors carry it as I32

}  // namespace k3
