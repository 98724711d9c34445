// One table per instruction set. No standard library beyond fixed-width integers in any *.simd.cc:
// a helper compiled with AVX-512 flags must not become the program's only copy.
#include "k3/kernels/cpu/simd_functions.h"

namespace k3::cpu::K3_ISA {

#define K3_STRING_(x) #x
#define K3_STRING(x) K3_STRING_(x)

const SimdTable* Table() {
  static const SimdTable table{K3_STRING(K3_ISA),
                               Dot,
                               DotBlock,
                               DotBlockBf16,
                               DotBlockMxfp4,
                               DotBlockFp8,
                               DotBlockInt8,
                               Axpy,
                               WeightedRows,
                               WeightedRowsBf16,
                               DecodeBf16,
                               DecodeMxfp4,
                               DecodeInt8,
                               DecodeFp8,
                               ExpAll,
                               SigmoidAll,
                               SiluAll,
                               TanhAll,
                               MulSigmoid,
                               Scale,
                               ScaleMul,
                               ScaleMulSigmoid,
                               AddScaled,
                               GatedActAll,
                               KdaGateAll,
                               ExpSum,
                               MaxOf,
                               ShortConvRun,
                               KdaRecurrent,
                               KdaChunk,
                               MulAdd,
                               KdaBackward,
                               AmxProducts() != nullptr ? AmxProducts() : Bf16Products()};
  return &table;
}

}  // namespace k3::cpu::K3_ISA
