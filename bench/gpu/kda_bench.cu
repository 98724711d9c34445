// Times of the CUDA KDA: CUDA events, medians, the shapes of docs/kda-on-hopper.md.
#include "device_problem.h"

namespace k3::bench {
namespace {

/// Random bf16 on the device without a host copy of every element.
void FillDevice(DeviceArray<std::uint16_t>& to, float spread, unsigned seed) {
  Problem p;
  p.lengths = {1024}, p.n_heads = 8, p.seed = seed;
  const Inputs x = MakeInputs(p);
  Bits block = x.q;
  for (auto& bits : block) bits = ToBits(FromBits(bits) * spread);
  for (std::size_t at = 0; at < to.size(); at += block.size()) {
    const std::size_t n = std::min(block.size(), to.size() - at);
    CUDA_CHECK(cudaMemcpy(to.get() + at, block.data(), n * 2, cudaMemcpyDefault));
  }
}

/// A problem whose tensors repeat one random block: large shapes without minutes of host work.
struct BigProblem {
  BigProblem(const std::vector<int>& lengths, int heads, float lower_bound) {
    Problem tiny;
    tiny.lengths.assign(lengths.size(), 0), tiny.n_heads = heads, tiny.lower_bound = lower_bound;
    std::vector<std::int32_t> starts = {0};
    for (int n : lengths) starts.push_back(starts.back() + n);
    tokens = starts.back();
    const std::int64_t width = heads * 128;
    const auto n = static_cast<std::size_t>(tokens * width);
    for (auto* x : {&q, &k, &v, &f, &o, &d_o}) x->Resize(n);
    beta.Resize(static_cast<std::size_t>(tokens * heads));
    unsigned seed = 1;
    for (auto* x : {&q, &k, &v, &f, &beta, &d_o}) FillDevice(*x, 1.f, seed++);
    cu.Resize(starts.size()), cu.Set(starts);
    a_log.Resize(static_cast<std::size_t>(heads)), a_log.Set(std::vector<float>(a_log.size(), 0.f));
    bias.Resize(static_cast<std::size_t>(width));
    bias.Set(std::vector<float>(bias.size(), 0.6f));
    state.Resize(lengths.size() * static_cast<std::size_t>(width) * 128);
    batch = {tokens, static_cast<int>(lengths.size()), cu.get(), heads, 128};
    inputs = {{q.get(), width}, {k.get(), width},    {v.get(), width},
              {f.get(), width}, {beta.get(), heads}, a_log.get(),
              bias.get(),       lower_bound,         0.08838835f};
  }
  DeviceArray<std::uint16_t> q, k, v, f, o, d_o, beta;
  DeviceArray<std::int32_t> cu;
  DeviceArray<float> a_log, bias, state;
  k3_kda_batch batch;
  k3_kda_inputs inputs;
  std::int64_t tokens = 0;
};

std::string Fields(double ms, double bytes) {
  char text[120];
  std::snprintf(text, sizeof text, "\"ms\": %.4f, \"GBps\": %.0f", ms, bytes / ms / 1e6);
  return text;
}

void BenchForward(Report& report, const char* shape, const std::vector<int>& lengths, int heads,
                  k3_kda_plan plan, float lower_bound = -5.f) {
  BigProblem x(lengths, heads, lower_bound);
  const auto bytes = k3_kda_forward_workspace(&x.batch, lower_bound, plan);
  DeviceArray<unsigned char> workspace(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)));
  const std::int64_t width = heads * 128;
  auto call = [&] {
    const auto status =
        k3_kda_forward(&x.batch, &x.inputs, x.o.get(), width, nullptr, x.state.get(), plan,
                       workspace.get(), workspace.size(), nullptr);
    if (status != K3_KDA_OK) std::printf("%s: %s\n", shape, k3_kda_status_text(status));
  };
  const double ms = TimeMs(call, lower_bound == 0.f ? 5 : 20);
  const double least = static_cast<double>(x.tokens) * heads * 1282 +
                       static_cast<double>(lengths.size()) * heads * 65536;
  const char* plans[] = {"auto", "fused", "split", "recurrent"};
  report.Row(
      "time",
      std::string(shape) + " [" + plans[plan] + "]" + (lower_bound == 0.f ? " softplus" : ""),
      Fields(ms, least));
}

void BenchBackward(Report& report, const char* shape, const std::vector<int>& lengths, int heads) {
  BigProblem x(lengths, heads, -5.f);
  const auto bytes = k3_kda_backward_workspace(&x.batch, -5.f);
  if (bytes < 0) return;
  DeviceArray<unsigned char> workspace(static_cast<std::size_t>(bytes));
  const std::int64_t width = heads * 128;
  const auto n = static_cast<std::size_t>(x.tokens * width);
  DeviceArray<std::uint16_t> dq(n), dk(n), dv(n), df(n);
  DeviceArray<float> dbeta(static_cast<std::size_t>(x.tokens * heads)),
      da(static_cast<std::size_t>(heads)), bias(static_cast<std::size_t>(width));
  const k3_kda_gradients out = {dq.get(),    dk.get(), dv.get(),   df.get(),
                                dbeta.get(), da.get(), bias.get(), nullptr};
  auto backward = [&] {
    const auto status = k3_kda_backward(&x.batch, &x.inputs, nullptr, {x.d_o.get(), width}, nullptr,
                                        &out, workspace.get(), workspace.size(), nullptr);
    if (status != K3_KDA_OK) std::printf("%s: %s\n", shape, k3_kda_status_text(status));
  };
  const double alone = TimeMs(backward, 10);
  auto both = [&] {
    k3_kda_forward(&x.batch, &x.inputs, x.o.get(), width, nullptr, x.state.get(), K3_KDA_AUTO,
                   workspace.get(), workspace.size(), nullptr);
    backward();
  };
  const double ms = TimeMs(both, 10);
  char text[160];
  std::snprintf(text, sizeof text, "\"ms\": %.4f, \"backward_ms\": %.4f, \"workspace_MB\": %.0f",
                ms, alone, static_cast<double>(bytes) / 1e6);
  report.Row("time", std::string(shape) + " forward + backward", text);
}

/// One token for each of `n` sequences, states rotated past the L2, replayed as one CUDA graph.
void BenchDecode(Report& report, int heads, int n) {
  BigProblem x(std::vector<int>(static_cast<std::size_t>(n), 1), heads, -5.f);
  const std::size_t set = static_cast<std::size_t>(n) * static_cast<std::size_t>(heads) * 16384;
  const std::size_t sets =
      std::max<std::size_t>(1, std::min<std::size_t>(48, (std::size_t{256} << 20) / (set * 4) + 1));
  DeviceArray<float> states(set * sets);
  CUDA_CHECK(cudaMemset(states.get(), 0, states.size() * 4));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  const std::size_t steps = std::max<std::size_t>(sets, 8);  // so that one graph's launch is spread
  auto queue = [&] {
    for (std::size_t i = 0; i < steps; ++i) {
      k3_kda_decode(&x.batch, &x.inputs, x.o.get(), heads * 128, states.get() + i % sets * set,
                    nullptr, stream);
    }
  };
  for (int i = 0; i < 3; ++i) queue();  // the state fills with values that are not zero
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  queue();
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  const double ms = TimeMs([&] { CUDA_CHECK(cudaGraphLaunch(replay, nullptr)); }, 25) /
                    static_cast<double>(steps);
  char name[60], text[120];
  std::snprintf(name, sizeof name, "decode H%d batch %d", heads, n);
  std::snprintf(text, sizeof text, "\"us\": %.2f, \"GBps\": %.0f", ms * 1e3,
                static_cast<double>(n) * heads * (131072. + 1282) / ms / 1e6);
  report.Row("time", name, text);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

void BenchCopy(Report& report) {
  const std::size_t bytes = std::size_t{2} << 30;
  DeviceArray<unsigned char> a(bytes), b(bytes);
  const double ms = TimeMs(
      [&] { CUDA_CHECK(cudaMemcpyAsync(b.get(), a.get(), bytes, cudaMemcpyDeviceToDevice)); });
  report.Row("time", "device copy 2 GiB", Fields(ms, 2.0 * static_cast<double>(bytes)));
}

}  // namespace

void RunDecodeBench(Report& report) {
  for (const int n : {1, 8, 64, 256}) BenchDecode(report, 96, n);
}

void RunProfile() {
  BigProblem x({8192}, 96, -5.f);
  const auto bytes = std::max(k3_kda_forward_workspace(&x.batch, -5.f, K3_KDA_SPLIT),
                              k3_kda_backward_workspace(&x.batch, -5.f));
  DeviceArray<unsigned char> workspace(static_cast<std::size_t>(bytes));
  for (int i = 0; i < 2; ++i) {
    for (const auto plan : {K3_KDA_FUSED, K3_KDA_SPLIT}) {
      k3_kda_forward(&x.batch, &x.inputs, x.o.get(), 96 * 128, nullptr, x.state.get(), plan,
                     workspace.get(), workspace.size(), nullptr);
    }
  }
  const std::size_t n = static_cast<std::size_t>(x.tokens) * 96 * 128;
  DeviceArray<std::uint16_t> dq(n), dk(n), dv(n), df(n);
  DeviceArray<float> dbeta(n / 128), da(96), bias(96 * 128);
  const k3_kda_gradients out = {dq.get(),    dk.get(), dv.get(),   df.get(),
                                dbeta.get(), da.get(), bias.get(), nullptr};
  k3_kda_backward(&x.batch, &x.inputs, nullptr, {x.d_o.get(), 96 * 128}, nullptr, &out,
                  workspace.get(), workspace.size(), nullptr);
  CUDA_CHECK(cudaDeviceSynchronize());
}

void RunBench(Report& report) {
  BenchCopy(report);
  const std::vector<int> varlen = {1300, 547, 2048, 963, 271, 3063}, eight(8, 4096);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_FUSED);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_SPLIT);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_RECURRENT);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_AUTO, 0.f);
  BenchForward(report, "H96 8x4096", eight, 96, K3_KDA_FUSED);
  BenchForward(report, "H96 varlen6", varlen, 96, K3_KDA_FUSED);
  BenchForward(report, "H96 1x32768", {32768}, 96, K3_KDA_FUSED);
  for (const int heads : {32, 12}) {
    const char* shape = heads == 32 ? "H32 1x8192" : "H12 1x8192";
    BenchForward(report, shape, {8192}, heads, K3_KDA_SPLIT);
    BenchForward(report, shape, {8192}, heads, K3_KDA_FUSED);
  }
  BenchBackward(report, "H96 1x8192", {8192}, 96);
  RunDecodeBench(report);
}

}  // namespace k3::bench
