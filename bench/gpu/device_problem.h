// A KDA problem on the device, and helpers that end the program when CUDA fails.
#pragma once

#include <cuda_runtime.h>
#include <k3/kda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kda_reference.h"

namespace k3::bench {

#define CUDA_CHECK(call)                                                              \
  do {                                                                                \
    const cudaError_t cuda_check = (call);                                            \
    if (cuda_check != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(cuda_check)); \
      std::exit(3);                                                                   \
    }                                                                                 \
  } while (0)

/// Owns device memory. New memory is filled with 0xFF, NaN in every float format.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count = 0) { Resize(count); }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { Set(host); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  void Resize(std::size_t count) {
    cudaFree(data_);
    data_ = nullptr, count_ = count;
    if (count == 0) return;
    CUDA_CHECK(cudaMalloc(&data_, count * sizeof(T)));
    Poison();
  }
  void Poison() {
    if (count_) CUDA_CHECK(cudaMemset(data_, 0xFF, count_ * sizeof(T)));
  }
  void Set(const std::vector<T>& host) {
    if (count_) CUDA_CHECK(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyDefault));
  }
  std::vector<T> Get() const {
    std::vector<T> host(count_);
    if (count_) CUDA_CHECK(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDefault));
    return host;
  }
  T* get() const { return data_; }
  std::size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

struct DeviceProblem {
  explicit DeviceProblem(const Problem& p, const Inputs& x)
      : q(x.q),
        k(x.k),
        v(x.v),
        f(x.f),
        beta(x.beta),
        d_o(x.d_o),
        a_log(x.a_log),
        dt_bias(x.dt_bias),
        state(x.state),
        d_state(x.d_state),
        cu(x.cu),
        o(x.q.size()),
        state_out(x.state.size()) {
    batch = {x.tokens, static_cast<int>(p.lengths.size()), cu.get(), p.n_heads, p.dim};
    inputs = {{q.get(), x.row}, {k.get(), x.row},        {v.get(), x.row},
              {f.get(), x.row}, {beta.get(), p.n_heads}, a_log.get(),
              dt_bias.get(),    p.lower_bound,           x.scale};
    row = x.row;
    s_in = p.initial_state ? state.get() : nullptr;
  }
  DeviceArray<std::uint16_t> q, k, v, f, beta, d_o;
  DeviceArray<float> a_log, dt_bias, state, d_state;
  DeviceArray<std::int32_t> cu;
  DeviceArray<std::uint16_t> o;
  DeviceArray<float> state_out;
  DeviceArray<unsigned char> workspace;
  k3_kda_batch batch;
  k3_kda_inputs inputs;
  std::int64_t row = 0;
  const float* s_in = nullptr;

  k3_kda_status Forward(k3_kda_plan plan, cudaStream_t stream = nullptr) {
    const std::int64_t bytes = k3_kda_forward_workspace(&batch, inputs.lower_bound, plan);
    if (bytes < 0) return K3_KDA_INVALID;
    if (workspace.size() < static_cast<std::size_t>(bytes)) {
      workspace.Resize(static_cast<std::size_t>(bytes));
    }
    return k3_kda_forward(&batch, &inputs, o.get(), row, s_in, state_out.get(), plan,
                          workspace.get(), workspace.size(), stream);
  }
};

/// bf16 rows of `row` elements as dense doubles of `width` a row.
inline std::vector<double> Dense(const Bits& bits, std::int64_t row, std::int64_t width) {
  std::vector<double> out;
  out.reserve(bits.size());
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (static_cast<std::int64_t>(i) % row < width) out.push_back(FromBits(bits[i]));
  }
  return out;
}
inline std::vector<double> Widen(const std::vector<float>& x) { return {x.begin(), x.end()}; }

inline double Median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x.empty() ? 0 : x[x.size() / 2];
}

/// Median milliseconds of `body`, by events, after `warm` runs.
template <class Body>
double TimeMs(Body&& body, int repeats = 20, int warm = 3) {
  cudaEvent_t a, b;
  CUDA_CHECK(cudaEventCreate(&a));
  CUDA_CHECK(cudaEventCreate(&b));
  std::vector<float> times;
  for (int i = 0; i < warm + repeats; ++i) {
    CUDA_CHECK(cudaEventRecord(a));
    body();
    CUDA_CHECK(cudaEventRecord(b));
    CUDA_CHECK(cudaEventSynchronize(b));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i >= warm) times.push_back(ms);
  }
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  return Median(times);
}

// The parts of the program; checks return how many of their rows failed.
struct Report;
int RunChecks(Report& report, bool small);
int RunFusedDecodeChecks(Report& report, bool small);
int RunHostile(Report& report, bool small);
void RunBench(Report& report);
void RunForwardBench(Report& report);
void RunDecodeBench(Report& report);
void RunProfile();  // each kernel of H96 1x8192 twice, for a profiler

/// Rows of the table, also written as JSON.
struct Report {
  std::FILE* json = nullptr;
  bool first = true;
  void Row(const char* kind, const std::string& name, const std::string& fields, bool ok = true) {
    std::printf("%-8s %-44s %s%s\n", kind, name.c_str(), fields.c_str(), ok ? "" : "  FAIL");
    std::fflush(stdout);
    if (!json) return;
    std::fprintf(json, "%s\n    {\"kind\": \"%s\", \"name\": \"%s\", %s, \"ok\": %s}",
                 first ? "" : ",", kind, name.c_str(), fields.c_str(), ok ? "true" : "false");
    first = false;
  }
};

}  // namespace k3::bench
