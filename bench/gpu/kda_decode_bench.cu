// Times of the decode step: alone, with convolution and norm inside it, and with both as kernels
// beside it. States are rotated past the L2 and steps replayed as one CUDA graph.
#include "big_problem.h"
#include "k3/kernels/cuda/kda_token.cuh"

namespace k3::bench {
namespace {

enum class Around { kNothing, kFused, kApart };

// The two neighbours as kernels of their own: one pass, eight bytes a thread.
__global__ void ConvKernel(const cuda::bf16* x, const float* weights, cuda::bf16* tail,
                           cuda::bf16* y, int width) {
  const int at = 4 * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= width) return;
  const int64_t s = blockIdx.y;
  cuda::bf16* old = tail + s * 3 * width + at;
  uint2 row[4];
  for (int j = 0; j < 3; ++j) row[j] = *reinterpret_cast<const uint2*>(old + int64_t{j} * width);
  row[3] = *reinterpret_cast<const uint2*>(x + s * width + at);
  const float4* w = reinterpret_cast<const float4*>(weights) + at;
  const float4 a = w[0], b = w[1], c = w[2], d = w[3];
  float4 sum = make_float4(0, 0, 0, 0);
  cuda::AddTap(sum, {a.x, b.x, c.x, d.x}, row[0]);
  cuda::AddTap(sum, {a.y, b.y, c.y, d.y}, row[1]);
  cuda::AddTap(sum, {a.z, b.z, c.z, d.z}, row[2]);
  cuda::AddTap(sum, {a.w, b.w, c.w, d.w}, row[3]);
  *reinterpret_cast<uint2*>(y + s * width + at) = {
      cuda::PackBf16(cuda::Silu(sum.x), cuda::Silu(sum.y)),
      cuda::PackBf16(cuda::Silu(sum.z), cuda::Silu(sum.w))};
  for (int j = 0; j < 3; ++j) *reinterpret_cast<uint2*>(old + int64_t{j} * width) = row[j + 1];
}
__global__ void NormKernel(cuda::KdaFusion x, cuda::bf16* o, int rows, int heads) {
  const int row = static_cast<int>(blockIdx.x * 4 + threadIdx.x / 32), lane = threadIdx.x % 32;
  if (row >= rows) return;
  cuda::NormInputs gate;
  gate.Load(x, row / heads, row % heads * 128, lane * 4);
  uint2* at = reinterpret_cast<uint2*>(o + static_cast<int64_t>(row) * 128 + lane * 4);
  const float4 y =
      make_float4(cuda::Low(at->x), cuda::High(at->x), cuda::Low(at->y), cuda::High(at->y));
  const float sum = cuda::WarpSum(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w);
  const float4 z = gate.Apply(y, sum / 128, x.norm_eps);
  *at = {cuda::PackBf16(z.x, z.y), cuda::PackBf16(z.z, z.w)};
}

struct DecodeProblem {
  DecodeProblem(int heads, int n, int drafts)
      : x(std::vector<int>(static_cast<std::size_t>(n), drafts), heads, -5.f), sequences(n) {
    width = heads * 128, tokens = n * drafts;
    set = static_cast<std::size_t>(n) * static_cast<std::size_t>(width) * 128;
    sets = std::max<std::size_t>(
        1, std::min<std::size_t>(48, (std::size_t{256} << 20) / (set * 4) + 1));
    states.Resize(set * sets);
    CUDA_CHECK(cudaMemset(states.get(), 0, states.size() * 4));
    if (drafts > 1) token_states.Resize(set * static_cast<std::size_t>(drafts));
    const std::vector<float> some(static_cast<std::size_t>(width) * 4, 0.4f);
    for (int i = 0; i < 3; ++i) {
      weights[i].Resize(some.size()), weights[i].Set(some);
      tails[i].Resize(static_cast<std::size_t>(n) * 3 * static_cast<std::size_t>(width));
      FillDevice(tails[i], 1.f, 20u + static_cast<unsigned>(i));
      apart[i].Resize(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(width));
      conv.weights[i] = weights[i].get(), conv.tails[i] = tails[i].get();
      if (drafts > 1) {
        token_tails[i].Resize(tails[i].size() * static_cast<std::size_t>(drafts));
        conv.token_tails[i] = token_tails[i].get();
      }
    }
    gate.Resize(apart[0].size());
    FillDevice(gate, 1.f, 30);
    norm = {{gate.get(), width}, weights[0].get(), 1e-5f};
  }
  void Step(Around around, std::size_t i, cudaStream_t stream) {
    float* state = states.get() + i % sets * set;
    if (around == Around::kApart) {
      Apart(state, stream);
      return;
    }
    const bool fused = around == Around::kFused;
    k3_kda_decode_fused(&x.batch, &x.inputs, fused ? &conv : nullptr, fused ? &norm : nullptr,
                        x.o.get(), width, state, token_states.get(), stream);
  }
  void Apart(float* state, cudaStream_t stream) {  // one token a sequence
    k3_kda_inputs inputs = x.inputs;
    k3_kda_tensor* rows[] = {&inputs.q, &inputs.k, &inputs.v};
    const dim3 grid(static_cast<unsigned>((width / 4 + 127) / 128),
                    static_cast<unsigned>(sequences));
    for (int i = 0; i < 3; ++i) {
      auto* to = reinterpret_cast<cuda::bf16*>(apart[i].get());
      ConvKernel<<<grid, 128, 0, stream>>>(
          static_cast<const cuda::bf16*>(rows[i]->data), weights[i].get(),
          reinterpret_cast<cuda::bf16*>(tails[i].get()), to, width);
      rows[i]->data = to;
    }
    k3_kda_decode(&x.batch, &inputs, x.o.get(), width, state, nullptr, stream);
    cuda::KdaFusion f = {};
    f.gate = reinterpret_cast<const cuda::bf16*>(gate.get()), f.gate_row = width;
    f.norm_weight = weights[0].get(), f.norm_eps = 1e-5f;
    const int pairs = sequences * width / 128;
    NormKernel<<<static_cast<unsigned>((pairs + 3) / 4), 128, 0, stream>>>(
        f, reinterpret_cast<cuda::bf16*>(x.o.get()), pairs, width / 128);
  }
  BigProblem x;
  int sequences, width = 0, tokens = 0;
  std::size_t set = 0, sets = 1;
  DeviceArray<float> states, token_states, weights[3];
  DeviceArray<std::uint16_t> tails[3], token_tails[3], apart[3], gate;
  k3_kda_conv conv = {};
  k3_kda_norm norm = {};
};

/// `drafts` tokens for each of `n` sequences; more than one: states and tails of each are kept.
void BenchDecode(Report& report, int heads, int n, int drafts, Around around) {
  DecodeProblem d(heads, n, drafts);
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  const std::size_t steps = std::max<std::size_t>(d.sets, 8);  // so that a graph's launch is spread
  auto queue = [&] {
    for (std::size_t i = 0; i < steps; ++i) d.Step(around, i, stream);
  };
  for (int i = 0; i < 3; ++i) queue();  // the state fills with values that are not zero
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  queue();
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  const double ms = TimeMs([&] { CUDA_CHECK(cudaGraphLaunch(replay, nullptr)); }, 25) /
                    static_cast<double>(steps);
  const char* what[] = {"", " conv + norm inside", " conv, norm beside"};
  char name[80], text[120];
  std::snprintf(name, sizeof name, "decode H%d batch %d%s%s", heads, n,
                drafts > 1 ? (" drafts " + std::to_string(drafts)).c_str() : "",
                what[static_cast<int>(around)]);
  // State in and out, each token's rows, and the states kept after each draft.
  const double kept = drafts > 1 ? 65536. * drafts : 0;
  std::snprintf(text, sizeof text, "\"us\": %.2f, \"GBps\": %.0f", ms * 1e3,
                static_cast<double>(n) * heads * (131072. + kept + 1282. * drafts) / ms / 1e6);
  report.Row("time", name, text);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

void RunDecodeBench(Report& report) {
  for (const int n : {1, 8, 64, 256}) {
    for (const Around around : {Around::kNothing, Around::kFused, Around::kApart}) {
      BenchDecode(report, 96, n, 1, around);
    }
  }
  for (const Around around : {Around::kNothing, Around::kFused}) {
    BenchDecode(report, 96, 8, 4, around);
    BenchDecode(report, 96, 64, 4, around);
  }
}

}  // namespace k3::bench
