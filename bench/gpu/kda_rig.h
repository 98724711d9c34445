// Every call of k3/kda.h on one batch, with guards around all that is written.
#pragma once

#include <cmath>
#include <cstring>
#include <string>

#include "big_problem.h"

namespace k3::bench {

/// Device memory between two zones that nobody may write.
class Guarded {
 public:
  explicit Guarded(std::int64_t bytes) : bytes_(Size(bytes)), all_(bytes_ + 2 * kZone) {}
  void* get() const { return all_.get() + kZone; }
  float* floats() const { return static_cast<float*>(get()); }
  std::size_t size() const { return bytes_; }
  void Zero() { CUDA_CHECK(cudaMemset(get(), 0, bytes_)); }
  std::vector<unsigned char> Host() const {
    std::vector<unsigned char> host(bytes_);
    CUDA_CHECK(cudaMemcpy(host.data(), get(), bytes_, cudaMemcpyDefault));
    return host;
  }
  template <class T>
  std::vector<T> Values() const {
    std::vector<T> host(bytes_ / sizeof(T));
    CUDA_CHECK(cudaMemcpy(host.data(), get(), bytes_, cudaMemcpyDefault));
    return host;
  }
  bool Kept() const {
    std::vector<unsigned char> zone(2 * kZone);
    CUDA_CHECK(cudaMemcpy(zone.data(), all_.get(), kZone, cudaMemcpyDefault));
    CUDA_CHECK(
        cudaMemcpy(zone.data() + kZone, all_.get() + kZone + bytes_, kZone, cudaMemcpyDefault));
    bool kept = true;
    for (const unsigned char x : zone) kept &= x == 0xFF;
    return kept;
  }

 private:
  static constexpr std::size_t kZone = 4096;
  static std::size_t Size(std::int64_t n) { return n > 0 ? static_cast<std::size_t>(n) : 0; }
  std::size_t bytes_;
  DeviceArray<unsigned char> all_;
};

struct Rig {
  /// Random rows; states start at zero and are left out where the call allows it if `!states`.
  Rig(std::int64_t tokens, const std::vector<std::int32_t>& starts, int heads, int dim,
      bool with_states = true)
      : width(std::int64_t{heads} * dim),
        pairs(static_cast<std::int64_t>(starts.size() - 1) * heads),
        states(with_states),
        o(tokens * width * 2),
        s_out(states ? pairs * dim * dim * 4 : 0),
        state(states ? pairs * dim * dim * 4 : 0),
        token_states(states ? tokens * width * dim * 4 : 0),
        tails(states ? static_cast<std::int64_t>(starts.size() - 1) * 9 * width * 2 : 0),
        token_tails(states ? tokens * 9 * width * 2 : 0),
        dq(tokens * width * 2),
        dk(tokens * width * 2),
        dv(tokens * width * 2),
        df(tokens * width * 2),
        dbeta(tokens * heads * 4),
        da_log(heads * 4),
        ddt_bias(width * 4) {
    cu.Resize(starts.size()), cu.Set(starts);
    const auto n = static_cast<std::size_t>(tokens * width);
    unsigned seed = 1;
    for (auto* x : {&q, &k, &v, &f, &rows_d_o, &gate}) x->Resize(n), FillDevice(*x, 1.f, seed++);
    beta.Resize(static_cast<std::size_t>(tokens * heads)), FillDevice(beta, 1.f, seed++);
    a_log.Resize(static_cast<std::size_t>(heads));
    for (auto* x : {&dt_bias, &ones}) x->Resize(static_cast<std::size_t>(width));
    taps.Resize(static_cast<std::size_t>(4 * width));
    Constants(0.f, 0.6f);
    batch = {tokens, static_cast<int>(starts.size()) - 1, cu.get(), heads, dim};
    inputs = {{q.get(), width},
              {k.get(), width},
              {v.get(), width},
              {f.get(), width},
              {beta.get(), heads},
              a_log.get(),
              dt_bias.get(),
              -5.f,
              0.09f};
    d_o = {rows_d_o.get(), width};
    norm = {{gate.get(), width}, ones.get(), 1e-5f};
    const std::int64_t part = static_cast<std::int64_t>(starts.size() - 1) * 3 * width * 2;
    for (int i = 0; i < 3; ++i) {
      conv.weights[i] = taps.get();
      conv.tails[i] = static_cast<char*>(tails.get()) + i * part;
      conv.token_tails[i] = static_cast<char*>(token_tails.get()) + i * tokens * 3 * width * 2;
    }
    o_data = o.get(), o_row = width, o_tokens = tokens;
    ResetStates();
  }

  static const char* PlanName(k3_kda_plan plan) {
    const char* names[] = {"auto", "fused", "split", "recurrent"};
    return names[plan];
  }
  void Constants(float rate, float bias) {
    a_log.Set(std::vector<float>(a_log.size(), rate));
    dt_bias.Set(std::vector<float>(dt_bias.size(), bias));
    ones.Set(std::vector<float>(ones.size(), 1.f));
    taps.Set(std::vector<float>(taps.size(), 0.5f));
  }
  void Fill(std::uint16_t bits, float rate) {
    for (auto* x : {&q, &k, &v, &f, &rows_d_o, &gate, &beta}) x->Set(Bits(x->size(), bits));
    Constants(rate, rate);
  }
  void ResetStates() { state.Zero(), tails.Zero(); }

  k3_kda_status Forward(k3_kda_plan plan) {
    k3_kda_batch b = batch;
    b.n_tokens = o_tokens;
    Workspace(k3_kda_forward_workspace(&b, inputs.lower_bound, plan));
    return k3_kda_forward(&b, &inputs, o_data, o_row, states ? state.floats() : nullptr,
                          states ? s_out.floats() : nullptr, plan, workspace.get(),
                          workspace.size(), nullptr);
  }
  k3_kda_status Decode(bool fused) {
    k3_kda_batch b = batch;
    b.n_tokens = o_tokens;
    if (!fused) {
      return k3_kda_decode(&b, &inputs, o_data, o_row, state.floats(), token_states.floats(),
                           nullptr);
    }
    return k3_kda_decode_fused(&b, &inputs, &conv, &norm, o_data, o_row, state.floats(),
                               token_states.floats(), nullptr);
  }
  k3_kda_status Backward() {
    Workspace(k3_kda_backward_workspace(&batch, inputs.lower_bound));
    const k3_kda_gradients out = {dq.get(),          dk.get(),       dv.get(),
                                  df.get(),          dbeta.floats(), da_log.floats(),
                                  ddt_bias.floats(), s_out.floats()};
    return k3_kda_backward(&batch, &inputs, state.floats(), d_o, state.floats(), &out,
                           workspace.get(), workspace.size(), nullptr);
  }

  /// Ends the program when a call was refused or its kernels fault.
  void Must(const std::string& name, k3_kda_status status) {
    const cudaError_t error = cudaDeviceSynchronize();
    if (status == K3_KDA_OK && error == cudaSuccess) return;
    std::printf("hostile %s: %s, %s\n", name.c_str(), k3_kda_status_text(status),
                cudaGetErrorString(error));
    std::exit(3);
  }
  bool GuardsKept() const {
    bool kept = true;
    for (const Guarded* g : {&o, &s_out, &state, &token_states, &tails, &token_tails, &dq, &dk, &dv,
                             &df, &dbeta, &da_log, &ddt_bias}) {
      kept &= g->Kept();
    }
    return kept;
  }

  bool RunAll(Report& report, const std::string& name) {
    const bool bounded = inputs.lower_bound < 0.f && batch.head_dim == 128;
    const std::string title =
        name + ", H" + std::to_string(batch.n_heads) + " D" + std::to_string(batch.head_dim);
    Must(title, Forward(K3_KDA_RECURRENT));
    if (bounded) Must(title, Forward(K3_KDA_SPLIT)), Must(title, Forward(K3_KDA_FUSED));
    Must(title, Forward(K3_KDA_AUTO));
    Must(title, Decode(false)), ResetStates();
    Must(title, Decode(true)), ResetStates();
    if (bounded) Must(title, Backward());
    const bool kept = GuardsKept();
    if (bounded) Must(title, Forward(K3_KDA_AUTO));  // leaves a forward's states behind
    report.Row("hostile", title, std::string("\"guards\": \"") + (kept ? "kept" : "WRITTEN") + "\"",
               kept);
    return kept;
  }
  std::vector<double> Run(k3_kda_plan plan) {
    Must("plans", Forward(plan));
    const auto bits = o.Values<std::uint16_t>();
    return Dense(bits, width, width);
  }
  bool PlansAgree(Report& report, const std::string& name) {
    ResetStates();
    const std::vector<double> judge = Run(K3_KDA_RECURRENT);
    double worst = 0;
    for (const auto plan : {K3_KDA_SPLIT, K3_KDA_FUSED}) {
      worst = std::max(worst, RelativeError(Run(plan), judge));
    }
    Must(name, Decode(false));
    worst = std::max(worst, RelativeError(Dense(o.Values<std::uint16_t>(), width, width), judge));
    char text[60];
    std::snprintf(text, sizeof text, "\"o\": %.3g, \"limit\": 0.006", worst);
    report.Row("hostile", name + ": plans agree", text, worst <= 6e-3);
    return worst <= 6e-3;
  }
  /// Sequences of one token repeat every `period`: so must the results of every call.
  bool RowsRepeat(Report& report, const std::string& name, std::size_t period) {
    auto repeats = [&](const Guarded& g) {
      const auto x = g.Host();
      const std::size_t bytes = period * static_cast<std::size_t>(width) * 2;
      return x.size() > bytes && std::memcmp(x.data(), x.data() + bytes, x.size() - bytes) == 0;
    };
    ResetStates();
    Must(name, Forward(K3_KDA_FUSED));
    bool ok = repeats(o);
    Must(name, Decode(true));
    ok &= repeats(o);
    ResetStates();
    Must(name, Backward());
    for (const Guarded* g : {&dq, &dk, &dv, &df}) ok &= repeats(*g);
    report.Row("hostile", name + ": equal rows, equal results",
               std::string("\"same_bits\": ") + (ok ? "true" : "false"), ok);
    return ok;
  }
  std::vector<unsigned char> Output() const {  // rows of o without what lies between them
    std::vector<unsigned char> out(static_cast<std::size_t>(o_tokens * width * 2));
    const auto row = static_cast<std::size_t>(width) * 2;
    CUDA_CHECK(cudaMemcpy2D(out.data(), row, o_data, static_cast<std::size_t>(o_row) * 2, row,
                            static_cast<std::size_t>(o_tokens), cudaMemcpyDefault));
    return out;
  }
  void Workspace(std::int64_t bytes) {
    const auto n = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0));
    if (workspace.size() < n) workspace.Resize(n);
  }

  std::int64_t width, pairs;
  bool states;
  Guarded o, s_out, state, token_states, tails, token_tails, dq, dk, dv, df, dbeta, da_log,
      ddt_bias;
  DeviceArray<std::uint16_t> q, k, v, f, rows_d_o, gate, beta;
  DeviceArray<float> a_log, dt_bias, ones, taps;
  DeviceArray<std::int32_t> cu;
  DeviceArray<unsigned char> workspace;
  k3_kda_batch batch;
  k3_kda_inputs inputs;
  k3_kda_tensor d_o;
  k3_kda_conv conv = {};
  k3_kda_norm norm = {};
  void* o_data = nullptr;
  std::int64_t o_row = 0, o_tokens = 0;
};

}  // namespace k3::bench
