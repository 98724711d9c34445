// The functions of one instruction set's table, by the file that defines them. Included by
// *.simd.cc files only.
#pragma once

#include "k3/kernels/cpu/simd_table.h"

namespace k3::cpu::K3_ISA {

// gemm.simd.cc
float Dot(const float* a, const float* b, std::int64_t n);
void DotBlock(const float* x, std::int64_t ldx, std::int64_t m, const float* w, std::int64_t ldw,
              std::int64_t rows, std::int64_t n, float* y, std::int64_t ldy);
void DotBlockBf16(const float* x, std::int64_t ldx, std::int64_t m, const void* w,
                  std::int64_t rows, std::int64_t n, float* y, std::int64_t ldy);
void DotBlockMxfp4(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                   const std::uint8_t* scales, std::int64_t rows, std::int64_t n, float* y,
                   std::int64_t ldy);
void DotBlockFp8(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                 const std::uint8_t* scales, std::int64_t scale_row, std::int64_t rows,
                 std::int64_t n, float* y, std::int64_t ldy);
void DotBlockInt8(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                  const std::uint8_t* scales, std::int64_t rows, std::int64_t n, float* y,
                  std::int64_t ldy);
void Axpy(float a, const float* x, float* y, std::int64_t n);
void WeightedRows(const float* p, std::int64_t ldp, std::int64_t m, const float* rows,
                  std::int64_t ld, std::int64_t n_rows, std::int64_t n, float* y, std::int64_t ldy);
void WeightedRowsBf16(const float* p, const void* rows, std::int64_t ld, std::int64_t n_rows,
                      std::int64_t n, float* y);
void DecodeBf16(const void* src, std::int64_t n, float* out);
void DecodeMxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n, float* out);
void DecodeInt8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n, float* out);
void DecodeFp8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t scale_row,
               std::int64_t rows, std::int64_t cols, float* out);

// pointwise.simd.cc
void ExpAll(const float* x, std::int64_t n, float* y);
void SigmoidAll(const float* x, std::int64_t n, float* y);
void SiluAll(const float* x, std::int64_t n, float* y);
void TanhAll(const float* x, std::int64_t n, float* y);
void MulSigmoid(const float* x, const float* gate, std::int64_t n, float* y);
void Scale(const float* x, float r, std::int64_t n, float* y);
void ScaleMul(const float* x, float r, const float* w, std::int64_t n, float* y);
void ScaleMulSigmoid(const float* x, float r, const float* w, const float* gate, std::int64_t n,
                     float* y);
void AddScaled(const float* x, float alpha, const float* y, std::int64_t n, float* out);
void GatedActAll(const float* gate, const float* up, std::int64_t n, const ActParams& act,
                 float* y);
void KdaGateAll(const float* f, const float* bias, float rate, bool bounded, float bound,
                std::int64_t n, float* g);
float ExpSum(const float* s, float top, std::int64_t n, float* p);
float MaxOf(const float* x, std::int64_t n);
void ShortConvRun(const ConvRun& run);

// kda.simd.cc
void KdaRecurrent(const KdaHead& head);
void KdaChunk(const KdaHead& head, bool bounded);

// backward.simd.cc
void MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, const float* a, std::int64_t row_a,
            std::int64_t col_a, const float* b, std::int64_t ldb, float* c, std::int64_t ldc);
void KdaBackward(const grad::KdaHead<float>& head);

// fast_*.simd.cc
const FastTable* Bf16Products();  // VDPBF16PS; null without it
const FastTable* AmxProducts();   // TDPBF16PS; null without it
void AmxKdaChunks(const KdaHead& head);

}  // namespace k3::cpu::K3_ISA
