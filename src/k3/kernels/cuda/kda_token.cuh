// One token of the recurrence: its inputs, plain or after a short convolution, its coefficients,
// and the gated norm of its output.
#pragma once

#include "k3/kernels/cuda/kda_common.cuh"

namespace k3::cuda {

constexpr int kTaps = 4;  // width of the short convolution

/// What a decode step may do around the recurrence; null pointers leave a part out.
/// Tails: [sequence][kTaps - 1][heads D] rows before the sequence, oldest first; [token] for those
/// after each token.
struct KdaFusion {
  const float* weights[3];  // q, k, v: [heads D][kTaps]
  bf16* tails[3];
  bf16* token_tails[3];
  const bf16* gate;
  int64_t gate_row;
  const float* norm_weight;  // [D]; null: no norm
  float norm_eps;
};

/// One lane's share of a token's inputs, loaded one token ahead.
template <int kD>
struct TokenInputs {
  static constexpr int kPer = kD / 32;  // channels a lane: 2 or 4
  uint32_t q[kPer / 2], k[kPer / 2], f[kPer / 2];
  uint2 v;
  float logit;

  __device__ __forceinline__ void Load(const KdaParams& p, int64_t t, int head, int lane,
                                       int column) {
    const int64_t at = head * kD + lane * kPer;
#pragma unroll
    for (int i = 0; i < kPer / 2; ++i) {
      q[i] = *reinterpret_cast<const uint32_t*>(p.q + t * p.q_row + at + 2 * i);
      k[i] = *reinterpret_cast<const uint32_t*>(p.k + t * p.k_row + at + 2 * i);
      f[i] = *reinterpret_cast<const uint32_t*>(p.f + t * p.f_row + at + 2 * i);
    }
    v = *reinterpret_cast<const uint2*>(p.v + t * p.v_row + head * kD + column);
    logit = __bfloat162float(p.beta[t * p.beta_row + head]);
  }
  __device__ __forceinline__ float Q(int i) const { return i % 2 ? High(q[i / 2]) : Low(q[i / 2]); }
  __device__ __forceinline__ float K(int i) const { return i % 2 ? High(k[i / 2]) : Low(k[i / 2]); }
  __device__ __forceinline__ float F(int i) const { return i % 2 ? High(f[i / 2]) : Low(f[i / 2]); }
  __device__ __forceinline__ float4 V() const {
    return make_float4(Low(v.x), High(v.x), Low(v.y), High(v.y));
  }
};

/// q, k and the values of a block, in f32: what StageToken leaves in shared memory.
template <int kD, int kColumns>
struct TokenRows {
  alignas(16) float q[kD];
  float k[kD];
  float v[kColumns];
};

/// The same share of a token whose rows are staged. `f` and beta come from memory, as above.
template <int kD>
struct StagedInputs {
  static constexpr int kPer = kD / 32;
  uint32_t f[kPer / 2];
  float logit;
  float q[kPer], k[kPer];
  float4 v;

  __device__ __forceinline__ void LoadGate(const KdaParams& p, int64_t t, int head, int lane) {
#pragma unroll
    for (int i = 0; i < kPer / 2; ++i) {
      f[i] =
          *reinterpret_cast<const uint32_t*>(p.f + t * p.f_row + head * kD + lane * kPer + 2 * i);
    }
    logit = __bfloat162float(p.beta[t * p.beta_row + head]);
  }
  /// `at`: the lane's first column inside the block.
  template <int kColumns>
  __device__ __forceinline__ void LoadRows(const TokenRows<kD, kColumns>& rows, int lane, int at) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) q[i] = rows.q[lane * kPer + i], k[i] = rows.k[lane * kPer + i];
    v = *reinterpret_cast<const float4*>(&rows.v[at]);
  }
  __device__ __forceinline__ float Q(int i) const { return q[i]; }
  __device__ __forceinline__ float K(int i) const { return k[i]; }
  __device__ __forceinline__ float F(int i) const { return i % 2 ? High(f[i / 2]) : Low(f[i / 2]); }
  __device__ __forceinline__ float4 V() const { return v; }
};

/// A token's coefficients for the key rows of one warp, and what all lanes need.
template <int kD>
struct TokenTerms {
  static constexpr int kPer = kD / 32;
  float beta, kq;  // kq = k . q

  /// Writes decay, k and q of rows [row0, row0 + rows) to `to` [3][rows]. Called by a whole warp.
  template <class Inputs>
  __device__ __forceinline__ TokenTerms(const KdaParams& p, const Inputs& x,
                                        const float (&bias)[kPer], float a, int row0, int rows,
                                        float* to, int lane)
      : beta(Sigmoid(x.logit)) {
    float q[kPer], k[kPer], decay[kPer], qq = 0, kk = 0;
    kq = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      q[i] = x.Q(i), k[i] = x.K(i);
      decay[i] = __expf(LogDecay(x.F(i), bias[i], a, p.lower_bound));
      qq += q[i] * q[i], kk += k[i] * k[i], kq += q[i] * k[i];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      qq += __shfl_xor_sync(~0u, qq, mask);
      kk += __shfl_xor_sync(~0u, kk, mask);
      kq += __shfl_xor_sync(~0u, kq, mask);
    }
    const float q_norm = rsqrtf(qq + kNormEps) * p.scale, k_norm = rsqrtf(kk + kNormEps);
    kq *= q_norm * k_norm;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int row = lane * kPer + i - row0;
      if (row >= 0 && row < rows) {
        to[row] = decay[i], to[rows + row] = k[i] * k_norm, to[2 * rows + row] = q[i] * q_norm;
      }
    }
    __syncwarp();
  }
};

// Short convolution ------------------------------------------------------------------------------

/// Four channels of q (0), k (1) or v (2) that a thread owns in every token of a sequence.
struct ChannelGroup {
  int which, channel;  // channel: of the row, all heads counted
  int64_t row;         // stride of the input, of [heads D] for tails
  const bf16* input;

  template <int kD, int kColumns>
  static __device__ __forceinline__ ChannelGroup At(const KdaParams& p, int group, int head,
                                                    int column) {
    const int which = group < kD / 4 ? 0 : group < kD / 2 ? 1 : 2;
    const int channel = head * kD + (which == 2 ? column : 0) + 4 * (group - which * (kD / 4));
    return {which, channel,
            which == 0   ? p.q_row
            : which == 1 ? p.k_row
                         : p.v_row,
            (which == 0   ? p.q
             : which == 1 ? p.k
                          : p.v) +
                channel};
  }
  /// Row `i` of the sequence; the tail holds rows -3 to -1.
  __device__ __forceinline__ uint2 Row(const KdaFusion& x, const Rows& rows, int sequence,
                                       int width, int i) const {
    const bf16* from =
        i >= 0
            ? input + (rows.begin + i) * row
            : x.tails[which] + (int64_t{sequence} * (kTaps - 1) + kTaps - 1 + i) * width + channel;
    return *reinterpret_cast<const uint2*>(from);
  }
};

__device__ __forceinline__ float Silu(float x) { return x * Sigmoid(x); }

__device__ __forceinline__ void AddTap(float4& y, const float (&w)[4], uint2 x) {
  y.x += w[0] * Low(x.x), y.y += w[1] * High(x.x), y.z += w[2] * Low(x.y), y.w += w[3] * High(x.y);
}

/// Leaves q, k and values [column, column + kColumns) of token `i` in `to`, convolved if the fusion
/// asks for it. Called by the whole block; the caller synchronises. `owner`: this block is the one
/// that writes what q and k leave behind.
template <int kD, int kColumns>
__device__ __forceinline__ void StageToken(const KdaParams& p, const KdaFusion& x, const Rows& rows,
                                           int sequence, int i, int head, int column, bool owner,
                                           TokenRows<kD, kColumns>& to) {
  const int width = p.n_heads * kD;
  for (int n = threadIdx.x; n < (2 * kD + kColumns) / 4; n += blockDim.x) {
    const auto g = ChannelGroup::At<kD, kColumns>(p, n, head, column);
    float4 y = make_float4(0, 0, 0, 0);
    if (x.weights[0] == nullptr) {
      const float one[4] = {1, 1, 1, 1};
      AddTap(y, one, g.Row(x, rows, sequence, width, i));
    } else {
      const float4* taps = reinterpret_cast<const float4*>(x.weights[g.which]) + g.channel;
      const float4 a = taps[0], b = taps[1], c = taps[2], d = taps[3];
      uint2 row[kTaps];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) row[j] = g.Row(x, rows, sequence, width, i - kTaps + 1 + j);
      AddTap(y, {a.x, b.x, c.x, d.x}, row[0]);
      AddTap(y, {a.y, b.y, c.y, d.y}, row[1]);
      AddTap(y, {a.z, b.z, c.z, d.z}, row[2]);
      AddTap(y, {a.w, b.w, c.w, d.w}, row[3]);
      y = make_float4(Silu(y.x), Silu(y.y), Silu(y.z), Silu(y.w));
      bf16* kept = x.token_tails[g.which];
      if (kept != nullptr && (owner || g.which == 2)) {
        kept += (rows.begin + i) * (kTaps - 1) * width + g.channel;
#pragma unroll
        for (int j = 1; j < kTaps; ++j) {
          *reinterpret_cast<uint2*>(kept + int64_t{j - 1} * width) = row[j];
        }
      }
    }
    float* at = n < kD / 4 ? to.q + 4 * n : n < kD / 2 ? to.k + 4 * n - kD : to.v + 4 * n - 2 * kD;
    *reinterpret_cast<float4*>(at) = y;
  }
}

/// Replaces the tails by the last rows of the sequence. A thread reads and writes the groups that
/// it read in StageToken; q and k are the owner's, once no other block reads them.
template <int kD, int kColumns>
__device__ __forceinline__ void StoreTails(const KdaParams& p, const KdaFusion& x, const Rows& rows,
                                           int sequence, int head, int column, bool owner) {
  const int width = p.n_heads * kD;
  for (int n = threadIdx.x; n < (2 * kD + kColumns) / 4; n += blockDim.x) {
    const auto g = ChannelGroup::At<kD, kColumns>(p, n, head, column);
    if (!owner && g.which != 2) continue;
    uint2 row[kTaps - 1];
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) {
      row[j] = g.Row(x, rows, sequence, width, rows.count - kTaps + 1 + j);
    }
    bf16* to = x.tails[g.which] + int64_t{sequence} * (kTaps - 1) * width + g.channel;
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) {
      *reinterpret_cast<uint2*>(to + int64_t{j} * width) = row[j];
    }
  }
}

// Gated norm -------------------------------------------------------------------------------------

/// Gate and weight of a lane's four columns, loaded ahead.
struct NormInputs {
  uint2 gate;
  float4 weight;

  __device__ __forceinline__ void Load(const KdaFusion& x, int64_t token, int first, int column) {
    gate = *reinterpret_cast<const uint2*>(x.gate + token * x.gate_row + first + column);
    weight = *reinterpret_cast<const float4*>(x.norm_weight + column);
  }
  /// weight o / sqrt(mean_square + eps) sigmoid(gate)
  __device__ __forceinline__ float4 Apply(float4 o, float mean_square, float eps) const {
    const float r = rsqrtf(mean_square + eps);
    return make_float4(
        weight.x * o.x * r * Sigmoid(Low(gate.x)), weight.y * o.y * r * Sigmoid(High(gate.x)),
        weight.z * o.z * r * Sigmoid(Low(gate.y)), weight.w * o.w * r * Sigmoid(High(gate.y)));
  }
};

__device__ __forceinline__ void StoreOutput(const KdaParams& p, int64_t token, int64_t channel,
                                            float4 o) {
  *reinterpret_cast<uint2*>(p.o + token * p.o_row + channel) = {PackBf16(o.x, o.y),
                                                                PackBf16(o.z, o.w)};
}

// Clusters: the blocks of one head ---------------------------------------------------------------

__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Stores to the same variable of another block of the cluster.
__device__ __forceinline__ void StoreRemote(uint32_t address, uint32_t block, float x) {
  asm volatile(
      "{.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nst.shared::cluster.f32 [a], %2;}" ::"r"(
          address),
      "r"(block), "f"(x)
      : "memory");
}

}  // namespace k3::cuda
