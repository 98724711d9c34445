#include "k3/kernels/op_probe.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string_view>

#include "k3/base/rng.h"
#include "k3/base/threads.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/cpu/cpu_backend.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/kernels/cuda_backend.h"

namespace k3 {
namespace {

constexpr std::int64_t kT = 5, kN = 2, kD = 32;  // tokens, heads, width of a head

/// Numbers in [low, high), the same every time.
std::vector<float> Values(std::uint64_t seed, std::int64_t n, double low = -1, double high = 1) {
  Rng rng(seed);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = static_cast<float>(low + (high - low) * rng.Uniform());
  return v;
}

/// Owns inputs and the output of one case, in a GPU's memory if one is given.
class Bench {
 public:
  explicit Bench(CudaBackend* gpu = nullptr) : gpu_(gpu) {}
  CMat In(std::uint64_t seed, std::int64_t rows, std::int64_t cols, double low = -1,
          double high = 1) {
    return CMat(Keep(Values(seed, rows * cols, low, high)), {rows, cols});
  }
  CVec Vector(std::uint64_t seed, std::int64_t n, double low = -1, double high = 1) {
    return CVec(Keep(Values(seed, n, low, high)), {n});
  }
  WeightRef Weight(std::uint64_t seed, std::int64_t rows, std::int64_t cols) {
    return {WeightFormat::kF32, rows, cols, Keep(Values(seed, rows * cols)), nullptr};
  }
  float* Keep(std::vector<float> v) {
    if (gpu_ != nullptr) return OnGpu(v);
    kept_.push_back(std::make_unique<std::vector<float>>(std::move(v)));
    return kept_.back()->data();
  }
  Mat Out(std::int64_t rows, std::int64_t cols) {
    out.assign(static_cast<std::size_t>(rows * cols), 0.f);
    gpu_out_ = gpu_ != nullptr ? OnGpu(out) : nullptr;
    return Mat(gpu_ != nullptr ? gpu_out_ : out.data(), {rows, cols});
  }
  /// Brings the output home; the first error of the GPU, also of the op.
  Status Finish() {
    if (gpu_ == nullptr) return Status();
    if (Status status = gpu_->Wait(); !status.ok()) return status;
    if (!status_.ok() || gpu_out_ == nullptr) return status_;
    return gpu_->CopyToHost(out.data(), gpu_out_, static_cast<std::int64_t>(4 * out.size()));
  }
  std::vector<float> out;

 private:
  float* OnGpu(const std::vector<float>& v) {
    const auto bytes = static_cast<std::int64_t>(4 * v.size());
    auto buffer = gpu_->Allocate(bytes);
    if (!buffer.ok()) {
      status_ = buffer.status();
      return nullptr;
    }
    on_gpu_.push_back(std::move(*buffer));
    auto* data = static_cast<float*>(on_gpu_.back().data());
    if (Status status = gpu_->CopyToDevice(data, v.data(), bytes); !status.ok()) status_ = status;
    return data;
  }

  CudaBackend* gpu_;
  Status status_;
  std::vector<DeviceBuffer> on_gpu_;
  float* gpu_out_ = nullptr;
  std::vector<std::unique_ptr<std::vector<float>>> kept_;
};

void ProbeRmsNorm(Backend& ops, Bench& b) {
  ops.RmsNorm({b.In(1, kT, kD), b.Vector(2, kD), 1e-5f, b.Out(kT, kD)});
}
void ProbeGatedRmsNorm(Backend& ops, Bench& b) {
  const std::int64_t w = kN * kD;
  ops.GatedRmsNorm({b.In(1, kT, w), b.In(2, kT, w), b.Vector(3, kD), 1e-5f, b.Out(kT, w)});
}
void ProbeL2Norm(Backend& ops, Bench& b) {
  ops.L2Norm({b.In(1, kT, kN * kD), kD, 1e-6f, b.Out(kT, kN * kD)});
}
void ProbeGemm(Backend& ops, Bench& b) {
  ops.Gemm({b.In(1, kT, 96), b.Weight(2, 19, 96), b.Out(kT, 19)});
}
void ProbeEmbed(Backend& ops, Bench& b) {
  const TokenId ids[] = {3, 0, 6};
  ops.Embed({ids, b.Weight(1, 7, kD), b.Out(3, kD)});
}
void ProbeGatedAct(Backend& ops, Bench& b) {
  ops.GatedAct(
      {b.In(1, kT, kD, -9, 9), b.In(2, kT, kD, -40, 40), {true, 4.f, 25.f}, b.Out(kT, kD)});
}
void ProbeResidual(Backend& ops, Bench& b) {
  ops.Residual({b.In(1, kT, kD), b.In(2, kT, kD), 0.7f, b.In(3, kT, 1), b.Out(kT, kD)});
}
void ProbePointwise(Backend& ops, Bench& b) {
  ops.Pointwise({b.In(1, kT, kD, -4, 4), PointwiseFn::kTanh, b.Out(kT, kD)});
}
void ProbeSigmoid(Backend& ops, Bench& b) { ops.Sigmoid({b.In(1, kT, kD, -9, 9), b.Out(kT, kD)}); }
void ProbeSigmoidGate(Backend& ops, Bench& b) {
  ops.SigmoidGate({b.In(1, kT, kD), b.In(2, kT, kD, -4, 4), b.Out(kT, kD)});
}
void ProbeShortConv(Backend& ops, Bench& b) {
  const SequenceRange ranges[] = {{0, 2}, {2, kT - 2}};
  float* histories[] = {b.Keep(Values(3, 3 * kD)), b.Keep(Values(4, 3 * kD))};
  ops.ShortConv({b.In(1, kT, kD), b.In(2, kD, 4), ranges, histories, b.Out(kT, kD)});
}
void ProbeKdaGate(Backend& ops, Bench& b) {
  const std::int64_t w = kN * kD;
  ops.KdaGate({b.In(1, kT, w), b.Vector(2, w), b.Vector(3, kN), -5.f, b.Out(kT, w)});
}
void ProbeMla(Backend& ops, Bench& b) {
  constexpr std::int64_t kRank = 32, kRope = 8, kRows = 9;
  const float* page = b.Keep(Values(2, kRows * (kRank + kRope)));
  const float* pages[] = {page};
  const MlaSequence sequences[] = {{0, kT, pages, kRows}};
  MlaArgs a;
  a.q = b.In(1, kT, kN * (kD + kRope));
  a.kv_b = b.Weight(3, kN * (kD + kD), kRank);
  a.n_heads = kN, a.nope_dim = kD, a.rope_dim = kRope, a.v_dim = kD, a.page_rows = 64;
  a.scale = 0.16f;
  a.sequences = sequences;
  a.o = b.Out(kT, kN * kD);
  ops.Mla(a);
}
void ProbeGqa(Backend& ops, Bench& b) {
  constexpr std::int64_t kRows = 9;
  const float* keys[] = {b.Keep(Values(2, kRows * kD))};
  const float* values[] = {b.Keep(Values(3, kRows * kD))};
  const GqaSequence sequences[] = {{0, kT, keys, values, kRows}};
  ops.Gqa({b.In(1, kT, kN * kD), kN, 1, 64, sequences, b.Out(kT, kN * kD)});
}
void ProbeRope(Backend& ops, Bench& b) {
  const std::int64_t positions[] = {0, 1, 70, 4096, 1000000};
  const Mat x = b.Out(kT, kN * kD);
  b.out = Values(1, kT * kN * kD);
  ops.Rope({Mat(b.out.data(), x.shape), kD, 10000.0, positions});
}
void ProbeAttnRes(Backend& ops, Bench& b) {
  const float* rows[] = {b.Keep(Values(1, kT * kD)), b.Keep(Values(2, kT * kD)),
                         b.Keep(Values(3, kT * kD))};
  ops.AttnRes({rows, b.Vector(4, kD), 1e-5f, std::nullopt, b.Out(kT, kD), {}});
}
void ProbeRoute(Backend& ops, Bench& b) {
  constexpr std::int64_t kExperts = 16, kTop = 4;
  std::vector<std::int32_t> chosen(kT * kTop);
  RouteArgs a;
  a.logits = b.In(1, kT, kExperts, -3, 3);
  a.bias = b.Vector(2, kExperts, -0.1, 0.1);
  a.k = kTop;
  a.experts = View<std::int32_t, 2>(chosen.data(), {kT, kTop});
  a.weights = b.Out(kT, kTop);
  ops.Route(a);
  for (const std::int32_t e : chosen) b.out.push_back(static_cast<float>(e));
}
void ProbeExpertMlp(Backend& ops, Bench& b) {
  constexpr std::int64_t kInner = 16;
  std::vector<ExpertWeights> table;
  for (std::uint64_t e = 0; e < 4; ++e) {
    table.push_back(
        {b.Weight(10 + e, kInner, kD), b.Weight(20 + e, kInner, kD), b.Weight(30 + e, kD, kInner)});
  }
  const std::int32_t chosen[kT * 2] = {0, 1, 3, 0, 1, 3, 3, 1, 0, 3};  // expert 2 gets nothing
  ops.ExpertMlp({b.In(1, kT, kD),
                 View<const std::int32_t, 2>(chosen, {kT, 2}),
                 b.In(2, kT, 2),
                 table,
                 {false, 0.f, {}},
                 b.Out(kT, kD)});
}

void ProbeKda(Backend& ops, Bench& b, bool chunk) {
  const std::int64_t T = 21, w = kN * kD;
  const SequenceRange ranges[] = {{0, T}};
  float* states[] = {b.Keep(Values(6, kN * kD * kD))};
  KdaArgs a;
  a.q = b.In(1, T, w, -0.2, 0.2), a.k = b.In(2, T, w, -0.2, 0.2), a.v = b.In(3, T, w);
  a.g = b.In(4, T, w, -5, 0), a.beta = b.In(5, T, kN, 0, 1);
  a.n_heads = kN;
  a.scale = 0.18f;
  a.sequences = ranges;
  a.states = states;
  a.lower_bound = -5.f;
  a.o = b.Out(T, w);
  if (chunk) {
    ops.KdaChunk(a);
  } else {
    ops.KdaRecurrent(a);
  }
}
void ProbeAddBias(Backend& ops, Bench& b) {
  ops.AddBias({b.In(1, kT, kD), b.Vector(2, kD), b.Out(kT, kD)});
}
void ProbeCopyRows(Backend& ops, Bench& b) {
  const std::int64_t rows[] = {3, 0, 3};
  ops.CopyRows({b.In(1, kT, kD), rows, b.Out(3, kD)});
}
void ProbeStoreRows(Backend& ops, Bench& b) {
  const Mat cache = b.Out(8, kD);  // two pages of four rows
  float* const pages[] = {cache.row(0), cache.row(4)};
  const StoreRun runs[] = {{1, 4, 2, pages}};
  ops.StoreRows({b.In(1, kT, kD), 4, runs});
}
void ProbeKdaRecurrent(Backend& ops, Bench& b) { ProbeKda(ops, b, false); }
void ProbeKdaChunk(Backend& ops, Bench& b) { ProbeKda(ops, b, true); }

struct Probe {
  const char* op;
  void (*run)(Backend&, Bench&);
};

constexpr Probe kProbes[] = {
#define K3_PROBE(name) {#name, &Probe##name},
    K3_FOR_EACH_OP(K3_PROBE) K3_PROBE(KdaRecurrent) K3_PROBE(KdaChunk)
#undef K3_PROBE
};

std::vector<float> Output(const Probe& probe, Backend& backend) {
  Bench bench;
  probe.run(backend, bench);
  return bench.out;
}

double RelativeL2(const std::vector<float>& got, const std::vector<float>& want) {
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    diff += d * d;
    norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

/// Instruction sets this build was compiled for, whether or not the machine has them.
std::vector<std::string> BuiltTables() {
#if defined(__x86_64__)
  return {"scalar", "avx2", "avx512", "avx512bf16", "amx"};
#elif defined(__aarch64__)
  return {"scalar", "neon"};
#else
  return {"scalar"};
#endif
}

OpProbeCell Judge(const std::string& backend, const std::vector<float>& got,
                  const std::vector<float>& want) {
  const double error = got.size() == want.size() ? RelativeL2(got, want) : HUGE_VAL;
  const bool agrees = error <= kProbeTolerance;  // false for NaN
  return {backend, agrees ? ProbeState::kAgrees : ProbeState::kDiffers, error};
}

/// The op on the first GPU; `gpu` is null where there is none.
OpProbeCell ProbeCuda(const Probe& probe, CudaBackend* gpu, const std::vector<float>& want) {
  if (!CudaHas(probe.op)) return {"cuda", ProbeState::kNotImplemented, 0};
  if (gpu == nullptr) return {"cuda", ProbeState::kNotHere, 0};
  Bench bench(gpu);
  probe.run(*gpu, bench);
  const Status status = bench.Finish();
  if (!status.ok()) return {"cuda", ProbeState::kDiffers, HUGE_VAL};
  return Judge("cuda", bench.out, want);
}

}  // namespace

std::string_view Name(ProbeState state) {
  switch (state) {
    case ProbeState::kReference:
      return "reference";
    case ProbeState::kAgrees:
      return "agrees";
    case ProbeState::kDiffers:
      return "differs";
    case ProbeState::kNotHere:
      return "not on this machine";
    case ProbeState::kNotImplemented:
      return "no";
  }
  return "";
}

std::vector<OpProbeRow> ProbeOps() {
  ThreadPool pool(1);
  ReferenceBackend reference;
  const auto tables = cpu::SupportedTables();
  const auto gpu = MakeCudaBackend(0);
  std::vector<OpProbeRow> rows;
  for (const Probe& probe : kProbes) {
    const std::vector<float> want = Output(probe, reference);
    OpProbeRow row{probe.op, {{"ref", ProbeState::kReference, 0}}};
    for (const std::string& name : BuiltTables()) {
      const auto it = std::find_if(tables.begin(), tables.end(),
                                   [&](const cpu::SimdTable* t) { return t->name == name; });
      if (it == tables.end()) {
        row.cells.push_back({name, ProbeState::kNotHere, 0});
        continue;
      }
      cpu::CpuBackend backend(pool, **it);
      row.cells.push_back(Judge(name, Output(probe, backend), want));
    }
    row.cells.push_back(ProbeCuda(probe, gpu.ok() ? gpu->get() : nullptr, want));
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace k3
