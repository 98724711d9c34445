// Times of the CUDA KDA: CUDA events, medians, the shapes of docs/kda-on-hopper.md.
#include "big_problem.h"

namespace k3::bench {
namespace {

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

void BenchCopy(Report& report) {
  const std::size_t bytes = std::size_t{2} << 30;
  DeviceArray<unsigned char> a(bytes), b(bytes);
  const double ms = TimeMs(
      [&] { CUDA_CHECK(cudaMemcpyAsync(b.get(), a.get(), bytes, cudaMemcpyDeviceToDevice)); });
  report.Row("time", "device copy 2 GiB", Fields(ms, 2.0 * static_cast<double>(bytes)));
}

}  // namespace

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

void RunForwardBench(Report& report) {
  const std::vector<int> varlen = {1300, 547, 2048, 963, 271, 3063}, eight(8, 4096);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_FUSED);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_SPLIT);
  BenchForward(report, "H96 8x4096", eight, 96, K3_KDA_FUSED);
  BenchForward(report, "H96 varlen6", varlen, 96, K3_KDA_FUSED);
  BenchForward(report, "H96 1x32768", {32768}, 96, K3_KDA_FUSED);
  for (const int heads : {32, 12}) {
    const char* shape = heads == 32 ? "H32 1x8192" : "H12 1x8192";
    BenchForward(report, shape, {8192}, heads, K3_KDA_SPLIT);
    BenchForward(report, shape, {8192}, heads, K3_KDA_FUSED);
  }
}

void RunBench(Report& report) {
  BenchCopy(report);
  RunForwardBench(report);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_RECURRENT);
  BenchForward(report, "H96 1x8192", {8192}, 96, K3_KDA_AUTO, 0.f);
  BenchBackward(report, "H96 1x8192", {8192}, 96);
  RunDecodeBench(report);
}

}  // namespace k3::bench
