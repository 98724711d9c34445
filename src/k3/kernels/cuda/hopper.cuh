// sm_90a instructions as functions: mbarriers, bulk copies, wgmma, matrix fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace k3::cuda {

using bf16 = __nv_bfloat16;

// A bf16 pair in one register: the element with the lower address is the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float Exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float ReciprocalRoot(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void Store32(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void Store64(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void Store128(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void Store16(uint32_t address, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}
__device__ __forceinline__ void StoreF4(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ uint32_t Load32(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ uint2 Load64(uint32_t address) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ float4 LoadF4(uint32_t address) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ float2 LoadF2(uint32_t address) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
  return r;
}

// Barriers ---------------------------------------------------------------------------------------

__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void FenceAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void BarrierInit(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Two builds for compute-sanitizer (docs/kda-on-hopper.md). K3_KDA_SERIAL waits for every wgmma at
// once, for memcheck; K3_KDA_PLAIN_BARRIERS gives two kinds of handover that racecheck does not
// follow a plainer form.
#ifdef K3_KDA_SERIAL
constexpr bool kSerial = true;
#else
constexpr bool kSerial = false;
#endif
#ifdef K3_KDA_PLAIN_BARRIERS
constexpr bool kPlainBarriers = true;
#else
constexpr bool kPlainBarriers = false;
#endif

/// A whole warp arrives: its first lane does, for all of them.
constexpr int kWarpArrivals = kPlainBarriers ? 32 : 1;
__device__ __forceinline__ void BarrierArriveWarp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < kWarpArrivals) BarrierArrive(barrier);
}
__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nK3_WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1, 0x989680;\n"
      "@p bra K3_DONE;\nbra K3_WAIT;\nK3_DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Bulk copies: 16-byte aligned addresses and sizes ------------------------------------------------

__device__ __forceinline__ void BulkLoad(uint32_t to, const void* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void BulkWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// A 16-byte global store without a branch: no wgmma in flight may see divergence.
__device__ __forceinline__ void StoreIf(void* to, uint4 x, bool valid) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(static_cast<int>(valid))
      : "memory");
}

// Asynchronous copies by threads ------------------------------------------------------------------

/// 16 bytes; zeros are written, and nothing is read, unless `valid`.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Arrives on the barrier when this thread's copies so far have landed.
__device__ __forceinline__ void CopyArrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
template <int kPending>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ uint4 Load128(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// Fragments --------------------------------------------------------------------------------------

__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t* r, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void StoreMatrix4Transposed(uint32_t address, uint32_t a, uint32_t b,
                                                       uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
__device__ __forceinline__ uint32_t LoadMatrix1(uint32_t address) {
  uint32_t r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ uint32_t LoadMatrix1Transposed(uint32_t address) {
  uint32_t r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ void StoreMatrix1Transposed(uint32_t address, uint32_t a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a)
               : "memory");
}
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t a) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
/// d = a b, 8x8 each in fp16 (the lower half of a 16x8 product is left empty).
__device__ __forceinline__ float2 MmaHalf8(uint32_t a, uint32_t b) {
  float d[4];
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a), "r"(0), "r"(b), "f"(0.f));
  return make_float2(d[0], d[1]);
}
/// d += a b, a 16x16 and b 16x8 in fp16.
__device__ __forceinline__ void MmaHalf(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// d += a b, a 16x16 and b 16x8 in bf16.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// wgmma ------------------------------------------------------------------------------------------

/// Descriptor of a shared-memory operand whose rows span `kRowBytes` (128 or 64) and carry the
/// swizzle of that width. kStride: bytes between groups of eight rows; kLeading: bytes between row
/// spans of an operand stored along M or N (unused when it is stored along K). `address16` is the
/// address / 16: it is computed once, and tile offsets are added to it, because this arithmetic is
/// serial and lies between the products.
template <int kRowBytes, uint32_t kStride, uint32_t kLeading = 16>
__device__ __forceinline__ uint64_t Descriptor(uint32_t address16) {
  constexpr uint32_t kHigh = kStride >> 4 | (kRowBytes == 128 ? 1u : 2u) << 30;
  uint64_t r;
  asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(address16 | (kLeading >> 4) << 16), "r"(kHigh));
  return r;
}
__device__ __forceinline__ void WgmmaFence() {
  if constexpr (kSerial) __threadfence_block();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if constexpr (kSerial) {  // what the tool puts around an access saves registers that a product in
                            // flight is about to write
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __threadfence_block();
  }
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace k3::cuda

#include "k3/kernels/cuda/wgmma.cuh"
