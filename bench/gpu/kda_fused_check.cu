// Checks of the decode step with convolution and norm inside: against float64, in a CUDA graph, and
// after a rollback to one of its draft tokens.
#include <cmath>
#include <cstring>

#include "device_problem.h"

namespace k3::bench {
namespace {

constexpr float kEps = 1e-5f;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// A decode problem with its fusions, on the host.
struct FusedProblem {
  Problem p;
  Inputs x;
  std::vector<float> weights[3], norm_weight;
  Bits tails[3], gate;
  std::int64_t width = 0;

  FusedProblem(int dim, std::vector<int> lengths, int heads, unsigned seed) {
    p.lengths = std::move(lengths), p.n_heads = heads, p.dim = dim, p.regime = Regime::kMix;
    p.initial_state = true, p.seed = seed;
    x = MakeInputs(p);
    width = static_cast<std::int64_t>(heads) * dim;
    Problem other;  // normal numbers for the rest
    other.lengths = {static_cast<int>(4 + 3 * p.lengths.size() + Size(x.tokens))};
    other.n_heads = heads, other.dim = dim;
    for (int i = 0; i < 3; ++i) {
      other.seed = seed * 7 + static_cast<unsigned>(i) + 100;
      const Inputs y = MakeInputs(other);
      for (std::int64_t n = 0; n < 4 * width; ++n)
        weights[i].push_back(0.5f * FromBits(y.q[Size(n)]));
      tails[i].assign(y.k.begin(), y.k.begin() + 3 * width * static_cast<int>(p.lengths.size()));
      if (i == 0) {
        gate.assign(y.v.begin(), y.v.begin() + x.tokens * width);
        for (int d = 0; d < dim; ++d) norm_weight.push_back(1.f + 0.3f * FromBits(y.f[Size(d)]));
      }
    }
  }

  /// Row `t` (counted from the start of sequence `s`, -3 the oldest of the tail) of q, k or v.
  std::uint16_t Row(int which, std::size_t s, std::int64_t t, std::int64_t c) const {
    const Bits& bits = which == 0 ? x.q : which == 1 ? x.k : x.v;
    return t >= 0 ? bits[Size((x.cu[s] + t) * x.row + c)]
                  : tails[which][Size((static_cast<std::int64_t>(s) * 3 + 3 + t) * width + c)];
  }
  /// Tails before token `t` of sequence `s`, as three rows.
  void TailsAt(int which, std::size_t s, std::int64_t t, Bits& to, std::int64_t at) const {
    for (std::int64_t j = 0; j < 3; ++j) {
      for (std::int64_t c = 0; c < width; ++c) {
        to[Size((at * 3 + j) * width + c)] = Row(which, s, t - 3 + j, c);
      }
    }
  }
  void Convolve() {
    for (int i = 0; i < 3; ++i) {
      x.wide[i].resize(Size(x.tokens * x.row));
      for (std::size_t s = 0; s < p.lengths.size(); ++s) {
        for (std::int64_t t = 0; t < p.lengths[s]; ++t) {
          for (std::int64_t c = 0; c < width; ++c) {
            double y = 0;
            for (std::int64_t j = 0; j < 4; ++j) {
              y += static_cast<double>(weights[i][Size(4 * c + j)]) *
                   static_cast<double>(FromBits(Row(i, s, t - 3 + j, c)));
            }
            x.wide[i][Size((x.cu[s] + t) * x.row + c)] = y / (1 + std::exp(-y));
          }
        }
      }
    }
  }
  void Normalise(std::vector<double>& o) const {
    for (std::int64_t row = 0; row < x.tokens * p.n_heads; ++row) {
      double* y = &o[Size(row * p.dim)];
      double squares = 0;
      for (int d = 0; d < p.dim; ++d) squares += y[d] * y[d];
      const double r = 1 / std::sqrt(squares / p.dim + static_cast<double>(kEps));
      for (int d = 0; d < p.dim; ++d) {
        const double g = FromBits(gate[Size(row * p.dim + d)]);
        y[d] *= r * static_cast<double>(norm_weight[Size(d)]) / (1 + std::exp(-g));
      }
    }
  }
};

/// The same on the device.
struct FusedDevice {
  FusedDevice(const FusedProblem& f)
      : d(f.p, f.x),
        weights{DeviceArray<float>(f.weights[0]), DeviceArray<float>(f.weights[1]),
                DeviceArray<float>(f.weights[2])},
        tails{DeviceArray<std::uint16_t>(f.tails[0]), DeviceArray<std::uint16_t>(f.tails[1]),
              DeviceArray<std::uint16_t>(f.tails[2])},
        gate(f.gate),
        norm_weight(f.norm_weight),
        token_states(Size(f.x.tokens * f.width * f.p.dim)) {
    for (int i = 0; i < 3; ++i) {
      token_tails[i].Resize(Size(f.x.tokens * 3 * f.width));
      conv.weights[i] = weights[i].get(), conv.tails[i] = tails[i].get();
      conv.token_tails[i] = token_tails[i].get();
    }
    norm = {{gate.get(), f.width}, norm_weight.get(), kEps};
  }
  k3_kda_status Run(bool with_conv, bool with_norm, cudaStream_t stream = nullptr) {
    return k3_kda_decode_fused(&d.batch, &d.inputs, with_conv ? &conv : nullptr,
                               with_norm ? &norm : nullptr, d.o.get(), d.row, d.state.get(),
                               token_states.get(), stream);
  }
  DeviceProblem d;
  DeviceArray<float> weights[3];
  DeviceArray<std::uint16_t> tails[3], token_tails[3];
  DeviceArray<std::uint16_t> gate;
  DeviceArray<float> norm_weight, token_states;
  k3_kda_conv conv = {};
  k3_kda_norm norm = {};
};

/// Whether the tails, and those after each token, are the rows they should be.
bool TailsRight(const FusedProblem& f, const FusedDevice& device) {
  bool right = true;
  for (int i = 0; i < 3; ++i) {
    Bits tails = f.tails[i], each(Size(f.x.tokens * 3 * f.width));
    for (std::size_t s = 0; s < f.p.lengths.size(); ++s) {
      f.TailsAt(i, s, f.p.lengths[s], tails, static_cast<std::int64_t>(s));
      for (std::int64_t t = 0; t < f.p.lengths[s]; ++t) f.TailsAt(i, s, t + 1, each, f.x.cu[s] + t);
    }
    right &= device.tails[i].Get() == tails && device.token_tails[i].Get() == each;
  }
  return right;
}

bool Check(Report& report, const char* name, FusedProblem f, bool conv, bool norm) {
  FusedDevice device(f);
  const auto status = device.Run(conv, norm);
  CUDA_CHECK(cudaDeviceSynchronize());
  if (conv) f.Convolve();
  std::vector<double> states;
  Outputs expected = Reference(f.p, f.x, false, &states);
  if (norm) f.Normalise(expected.o);
  const double o = RelativeError(Dense(device.d.o.Get(), f.x.row, f.width), expected.o);
  const double state = std::max(RelativeError(Widen(device.d.state.Get()), expected.state),
                                RelativeError(Widen(device.token_states.Get()), states));
  const bool tails = !conv || TailsRight(f, device);
  const bool ok = status == K3_KDA_OK && o < 2.5e-3 && state < 2e-6 && tails;
  char text[160], title[120];
  std::snprintf(text, sizeof text,
                "\"o\": %.3g, \"state\": %.3g, \"limit\": 0.0025, \"tails\": \"%s\"", o, state,
                !conv   ? "unused"
                : tails ? "right"
                        : "wrong");
  std::snprintf(title, sizeof title, "fused%s%s, %s", conv ? " conv" : "", norm ? " norm" : "",
                name);
  report.Row("decode", title, text, ok);
  return ok;
}

/// Three steps by calls and three replays of a captured step must give the same bits.
bool CheckGraph(Report& report, int sequences) {
  const FusedProblem f(128, std::vector<int>(Size(sequences), 2), 3, 5);
  FusedDevice calls(f), replays(f);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaStreamCreate(&stream));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  bool ok = replays.Run(true, true, stream) == K3_KDA_OK;
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) {
    ok &= calls.Run(true, true, stream) == K3_KDA_OK;
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
  }
  CUDA_CHECK(cudaStreamSynchronize(stream));
  ok &= calls.d.o.Get() == replays.d.o.Get() && calls.d.state.Get() == replays.d.state.Get();
  for (int i = 0; i < 3; ++i) ok &= calls.tails[i].Get() == replays.tails[i].Get();
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  report.Row("decode", "fused, graph of batch " + std::to_string(sequences),
             std::string("\"same_bits\": ") + (ok ? "true" : "false"), ok);
  return ok;
}

/// Four drafts, back to what was kept after the second, and the last two again: the same bits.
bool CheckRollback(Report& report, int sequences) {
  constexpr int kDrafts = 4, kKept = 2;
  const FusedProblem f(128, std::vector<int>(Size(sequences), kDrafts), 3, 6);
  FusedDevice device(f);
  bool ok = device.Run(true, true) == K3_KDA_OK;
  CUDA_CHECK(cudaDeviceSynchronize());
  const Bits drafted = device.d.o.Get();
  const auto state = device.d.state.Get();
  const std::size_t one = Size(f.width * f.p.dim), rows = Size(3 * f.width);
  for (int s = 0; s < sequences; ++s) {
    const std::size_t from = Size(s * kDrafts + kKept - 1), to = Size(s);
    CUDA_CHECK(cudaMemcpy(device.d.state.get() + to * one, device.token_states.get() + from * one,
                          one * 4, cudaMemcpyDefault));
    for (int i = 0; i < 3; ++i) {
      CUDA_CHECK(cudaMemcpy(device.tails[i].get() + to * rows,
                            device.token_tails[i].get() + from * rows, rows * 2,
                            cudaMemcpyDefault));
    }
  }
  // One call for each sequence, on its last rows alone.
  for (int s = 0; s < sequences; ++s) {
    const std::int64_t row = s * kDrafts + kKept;
    k3_kda_batch batch = {kDrafts - kKept, 1, nullptr, f.p.n_heads, f.p.dim};
    k3_kda_inputs inputs = device.d.inputs;
    for (auto* t : {&inputs.q, &inputs.k, &inputs.v, &inputs.f}) {
      t->data = static_cast<const std::uint16_t*>(t->data) + row * t->row_stride;
    }
    inputs.beta.data = static_cast<const std::uint16_t*>(inputs.beta.data) + row * f.p.n_heads;
    k3_kda_conv conv = device.conv;
    for (int i = 0; i < 3; ++i) {
      conv.tails[i] = static_cast<std::uint16_t*>(conv.tails[i]) + Size(s) * rows;
      conv.token_tails[i] = nullptr;
    }
    k3_kda_norm norm = device.norm;
    norm.gate.data = static_cast<const std::uint16_t*>(norm.gate.data) + row * f.width;
    ok &= k3_kda_decode_fused(&batch, &inputs, &conv, &norm, device.d.o.get() + row * device.d.row,
                              device.d.row, device.d.state.get() + Size(s) * one, nullptr,
                              nullptr) == K3_KDA_OK;
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  ok &= device.d.o.Get() == drafted && device.d.state.Get() == state;
  report.Row("decode", "fused, back to draft 2 of 4, batch " + std::to_string(sequences),
             std::string("\"same_bits\": ") + (ok ? "true" : "false"), ok);
  return ok;
}

}  // namespace

int RunFusedDecodeChecks(Report& report, bool small) {
  const std::vector<int> mixed = {0, 1, 2, 3, 4, 5, 0, 9};
  std::vector<int> many(90, 1);  // enough states for a block a head
  many[3] = 0, many[4] = 4, many[89] = 2;
  int failed = 0;
  for (const bool conv : {false, true}) {
    for (const bool norm : {false, true}) {
      if (!conv && !norm) continue;
      failed += !Check(report, "D=128 mixed", FusedProblem(128, mixed, 3, 1), conv, norm);
      failed += !Check(report, "D=64 mixed", FusedProblem(64, mixed, 2, 2), conv, norm);
      failed += !Check(report, "D=128 batch 90", FusedProblem(128, many, 3, 3), conv, norm);
    }
  }
  if (!small) {
    failed += !Check(report, "D=128 batch 200 drafts 5",
                     FusedProblem(128, std::vector<int>(200, 5), 3, 4), true, true);
  }
  for (const int sequences : {2, 90}) failed += !CheckGraph(report, sequences);
  failed += !CheckRollback(report, 2);
  return failed;
}

}  // namespace k3::bench
