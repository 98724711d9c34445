#include "k3/kernels/cuda/op_kernels.cuh"

#include "k3/kernels/cuda/kda_common.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 128;

/// Rows of an op's matrix on the device.
struct Rows2 {
  const float* in;
  float* out;
  std::int64_t in_row, out_row;
};
Rows2 RowsOf(const CMat& x, const Mat& y) { return {x.data, y.data, x.strides[0], y.strides[0]}; }

unsigned Blocks(std::int64_t n, int each) { return static_cast<unsigned>((n + each - 1) / each); }

/// A warp a head of a token.
template <class Body>
__device__ __forceinline__ void ForHeads(std::int64_t heads, const Body& body) {
  const std::int64_t at = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (at < heads) body(at, threadIdx.x % 32);
}

__global__ void L2NormKernel(Rows2 r, std::int64_t heads, int per_row, int dim, float eps) {
  ForHeads(heads, [&](std::int64_t at, int lane) {
    const float* x = r.in + at / per_row * r.in_row + at % per_row * dim;
    float* y = r.out + at / per_row * r.out_row + at % per_row * dim;
    float sum = 0;
    for (int i = lane; i < dim; i += 32) sum += x[i] * x[i];
    const float scale = 1.f / sqrtf(WarpSum(sum) + eps);
    for (int i = lane; i < dim; i += 32) y[i] = x[i] * scale;
  });
}

__global__ void GatedRmsNormKernel(Rows2 r, const float* gate, std::int64_t gate_row,
                                   const float* weight, std::int64_t heads, int per_row, int dim,
                                   float eps) {
  ForHeads(heads, [&](std::int64_t at, int lane) {
    const std::int64_t row = at / per_row, first = at % per_row * dim;
    const float* x = r.in + row * r.in_row + first;
    const float* g = gate + row * gate_row + first;
    float* y = r.out + row * r.out_row + first;
    float sum = 0;
    for (int i = lane; i < dim; i += 32) sum += x[i] * x[i];
    const float scale = 1.f / sqrtf(WarpSum(sum) / static_cast<float>(dim) + eps);
    for (int i = lane; i < dim; i += 32) y[i] = weight[i] * x[i] * scale / (1.f + expf(-g[i]));
  });
}

/// out = fn(in, row, column), a thread an element.
template <class Fn>
__global__ void ElementKernel(Rows2 r, std::int64_t n, std::int64_t columns, Fn fn) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const std::int64_t row = i / columns, c = i % columns;
  r.out[row * r.out_row + c] = fn(r.in[row * r.in_row + c], c);
}
template <class Fn>
cudaError_t Elements(const CMat& x, const Mat& y, cudaStream_t stream, Fn fn) {
  const std::int64_t n = x.size();
  if (n == 0) return cudaSuccess;
  ElementKernel<<<Blocks(n, kThreads), kThreads, 0, stream>>>(RowsOf(x, y), n, x.dim(1), fn);
  return cudaGetLastError();
}

struct SigmoidFn {
  __device__ float operator()(float x, std::int64_t) const { return 1.f / (1.f + expf(-x)); }
};
struct KdaGateFn {
  const float *bias, *a_log;
  std::int64_t dim;
  bool bounded;
  float bound;
  __device__ float operator()(float f, std::int64_t c) const {
    const float rate = expf(a_log[c / dim]), z = f + bias[c];
    if (bounded) return bound / (1.f + expf(-rate * z));
    return -rate * (z > 20.f ? z : log1pf(expf(z)));
  }
};

/// A thread runs one channel of one sequence from its first token to its last.
__global__ void ShortConvKernel(Rows2 r, const float* weights, std::int64_t weight_row, int taps,
                                int channels, const OpSequences sequences) {
  const int c = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (c >= channels) return;
  const SequenceRange range = sequences.ranges[blockIdx.y];
  if (range.count <= 0) return;
  float* history = sequences.states[blockIdx.y] + c;
  const float* w = weights + c * weight_row;
  const float* x = r.in + range.begin * r.in_row + c;
  auto row = [&](std::int64_t t) {
    return t >= 0 ? x[t * r.in_row] : history[(taps - 1 + t) * channels];
  };
  for (std::int64_t t = 0; t < range.count; ++t) {
    float sum = 0;
    for (int j = 0; j < taps; ++j) sum += w[j] * row(t - taps + 1 + j);
    r.out[(range.begin + t) * r.out_row + c] = sum / (1.f + expf(-sum));
  }
  for (int j = 0; j < taps - 1; ++j) {  // oldest first: what is read lies behind what is written
    history[std::int64_t{j} * channels] = row(range.count - taps + 1 + j);
  }
}

}  // namespace

cudaError_t LaunchOp(const L2NormArgs& a, cudaStream_t stream) {
  const std::int64_t per_row = a.x.dim(1) / a.head_dim, heads = a.x.dim(0) * per_row;
  if (heads == 0) return cudaSuccess;
  L2NormKernel<<<Blocks(heads, kThreads / 32), kThreads, 0, stream>>>(
      RowsOf(a.x, a.y), heads, static_cast<int>(per_row), static_cast<int>(a.head_dim), a.eps);
  return cudaGetLastError();
}

cudaError_t LaunchOp(const GatedRmsNormArgs& a, cudaStream_t stream) {
  const std::int64_t dim = a.w.dim(0), per_row = a.x.dim(1) / dim, heads = a.x.dim(0) * per_row;
  if (heads == 0) return cudaSuccess;
  GatedRmsNormKernel<<<Blocks(heads, kThreads / 32), kThreads, 0, stream>>>(
      RowsOf(a.x, a.y), a.gate.data, a.gate.strides[0], a.w.data, heads, static_cast<int>(per_row),
      static_cast<int>(dim), a.eps);
  return cudaGetLastError();
}

cudaError_t LaunchOp(const SigmoidArgs& a, cudaStream_t stream) {
  return Elements(a.x, a.y, stream, SigmoidFn{});
}

cudaError_t LaunchOp(const KdaGateArgs& a, cudaStream_t stream) {
  if (a.f.size() == 0) return cudaSuccess;
  return Elements(a.f, a.g, stream,
                  KdaGateFn{a.dt_bias.data, a.a_log.data, a.f.dim(1) / a.a_log.dim(0),
                            a.lower_bound.has_value(), a.lower_bound.value_or(0.f)});
}

cudaError_t LaunchOp(const ShortConvArgs& a, cudaStream_t stream) {
  const int channels = static_cast<int>(a.x.dim(1)), taps = static_cast<int>(a.w.dim(1));
  if (channels == 0) return cudaSuccess;
  return ForSequences(a.sequences, a.histories, [&](const OpSequences& part) {
    const dim3 grid(Blocks(channels, kThreads), static_cast<unsigned>(part.count));
    ShortConvKernel<<<grid, kThreads, 0, stream>>>(RowsOf(a.x, a.y), a.w.data, a.w.strides[0], taps,
                                                   channels, part);
  });
}

}  // namespace k3::cuda
