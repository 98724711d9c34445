// Problems of the size that is timed.
#pragma once

#include <map>

#include "device_problem.h"

namespace k3::bench {

/// Random bf16 on the device without a host copy of every element.
inline void FillDevice(DeviceArray<std::uint16_t>& to, float spread, unsigned seed) {
  static std::map<unsigned, Bits> blocks;  // a second for each
  if (blocks[seed].empty()) {
    Problem p;
    p.lengths = {1024}, p.n_heads = 8, p.seed = seed;
    blocks[seed] = MakeInputs(p).q;
  }
  Bits block = blocks[seed];
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

}  // namespace k3::bench
