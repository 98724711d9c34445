// bf16 products of oneDNN beside ours, in one program: x [M, 4096] times a weight [4096, 4096], one
// thread. Both convert f32 activations to bf16 inside the timing; oneDNN may reorder its weights
// beforehand, ours are read as the file has them. Built only where oneDNN is installed.
#include <benchmark/benchmark.h>

#include <cstring>
#include <dnnl.hpp>
#include <vector>

#include "k3/base/rng.h"
#include "k3/kernels/exec.h"
#include "k3/tensor/dtype.h"

namespace k3 {
namespace {

constexpr std::int64_t kSize = 4096;

void BM_onednn_bf16_4096(benchmark::State& state) {
  using dnnl::memory;
  const std::int64_t M = state.range(0);
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto f32 = memory::data_type::f32, bf16 = memory::data_type::bf16;
  const auto ab = memory::format_tag::ab, any = memory::format_tag::any;
  memory x({{M, kSize}, f32, ab}, engine), x16({{M, kSize}, bf16, ab}, engine),
      y({{M, kSize}, f32, ab}, engine), w({{kSize, kSize}, bf16, memory::format_tag::ba}, engine);
  Rng rng(1);
  auto* values = static_cast<float*>(x.get_data_handle());
  for (std::int64_t i = 0; i < M * kSize; ++i) values[i] = static_cast<float>(rng.Uniform() - 0.5);
  auto* weights = static_cast<std::uint8_t*>(w.get_data_handle());
  for (std::int64_t i = 0; i < kSize * kSize; ++i) {
    const BF16 v = ToBF16(static_cast<float>(rng.Uniform() - 0.5));
    std::memcpy(weights + 2 * i, &v, 2);
  }
  const dnnl::matmul::desc desc({{M, kSize}, bf16, ab}, {{kSize, kSize}, bf16, any},
                                {{M, kSize}, f32, ab});
  const dnnl::matmul::primitive_desc chosen(desc, engine);
  memory packed(chosen.weights_desc(), engine);
  dnnl::reorder(w, packed).execute(stream, w, packed);
  const dnnl::matmul product(chosen);
  const dnnl::reorder round(x, x16);
  for (auto _ : state) {
    round.execute(stream, x, x16);
    product.execute(stream, {{DNNL_ARG_SRC, x16}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, y}});
    stream.wait();
    benchmark::DoNotOptimize(y.get_data_handle());
  }
  state.counters["MAC/s"] = benchmark::Counter(static_cast<double>(M * kSize * kSize),
                                               benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_onednn_bf16_4096)->ArgName("rows")->Arg(1)->Arg(16)->Arg(96);

}  // namespace
}  // namespace k3
