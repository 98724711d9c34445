#include "k3/train/run_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "k3/base/memory.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/model/model.h"
#include "k3/model/pass_memory.h"
#include "k3/model/tensor_table.h"
#include "k3/train/tape.h"

namespace k3 {
namespace {

/// Ops that do nothing: the tape around them sees what it would have to keep.
class NoOps final : public Backend {
 public:
#define K3_NO_OP(name) \
  void name(const name##Args&) override {}
  K3_FOR_EACH_OP(K3_NO_OP)
#undef K3_NO_OP
  void KdaRecurrent(const KdaArgs&) override {}
  void KdaChunk(const KdaArgs&) override {}
};

struct Unmap {
  std::size_t bytes = 0;
  void operator()(std::byte* p) const { munmap(p, bytes); }
};

/// Addresses of weights without memory behind them; reads give zeros.
class PhantomWeights {
 public:
  static Result<PhantomWeights> Create(const ModelConfig& config) {
    PhantomWeights w;
    const std::vector<TensorSpec> specs = ExpectedTensors(config);
    for (const TensorSpec& s : specs) w.floats_ += s.elements();
    const auto bytes = static_cast<std::size_t>(4 * w.floats_);
    void* p = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      return Error{Code::kResource, fmt::format("weights take {}: more than can be addressed",
                                                BytesText(static_cast<std::int64_t>(bytes)))};
    }
    w.memory_ = {static_cast<std::byte*>(p), Unmap{bytes}};
    TensorMap tensors;
    std::int64_t at = 0;
    for (const TensorSpec& s : specs) {
      tensors[s.name] = {DType::kF32, s.shape, w.memory_.get() + 4 * at};
      at += s.elements();
    }
    K3_ASSIGN(w.model_, Model::FromTensors(config, tensors));
    return w;
  }
  const Model& model() const { return *model_; }
  std::int64_t floats() const { return floats_; }

 private:
  std::int64_t floats_ = 0;
  std::unique_ptr<std::byte, Unmap> memory_;
  std::unique_ptr<Model> model_;
};

struct RowCost {
  std::int64_t saved = 0, sequences = 0;
};

/// A row of `tokens` tokens through the tape.
Result<RowCost> TraceRow(const Model& model, std::int64_t tokens, MathMode math) {
  K3_ASSIGN(const cpu::SimdTable* table, cpu::ChooseTable());
  Exec exec(1, math, std::make_unique<NoOps>());
  auto owner = std::make_unique<TapeBackend>(exec, std::move(exec.ops), *table);
  TapeBackend& tape = *owner;
  exec.ops = std::move(owner);
  const std::vector<TokenId> ids(static_cast<std::size_t>(tokens));
  ModelState state = model.NewState();
  const SequenceInput row{ids, &state, LogitRows::kNone};
  CMat hidden;
  tape.Start();
  K3_TRY(model.ForwardHidden({&row, 1}, exec, hidden));
  const std::int64_t shadows = tape.shadow_bytes();  // before Finish: of caches and states alone
  tape.Finish();
  const StateBytes parts = ModelState::PartsFor(model.config(), tokens);
  // Backward passes start from copies of the states the pass began with.
  return RowCost{tape.saved_bytes(), shadows + state.bytes() + parts.kda + parts.conv};
}

/// The widest temporaries of backward passes that run at the same time.
std::int64_t BackwardScratch(const ModelConfig& c, const PassShape& s) {
  const std::int64_t tokens = s.rows * s.sequence;
  const std::int64_t loss = std::min<std::int64_t>(tokens, 256) * c.vocab;
  std::int64_t widest = 0;
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    if (c.is_moe(i))
      widest =
          std::max(widest, tokens * c.moe.top_k * (c.moe.latent > 0 ? c.moe.latent : c.hidden));
  }
  return 4 * std::max(loss, widest);
}

std::int64_t BalanceBytes(const ModelConfig& c, const PassShape& s, const BalanceOptions& o,
                          std::int64_t accumulate) {
  const std::int64_t scores = s.rows * s.sequence * c.moe.n_experts * 8;
  const bool keeps = o.method == BalanceMethod::kSlidingQuantile ||
                     (o.method == BalanceMethod::kQuantile && o.exact);
  std::int64_t bytes = 0;
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    if (!c.is_moe(i)) continue;
    if (keeps) bytes += scores * accumulate;
    if (o.method == BalanceMethod::kQuantile && !o.exact) bytes += c.moe.n_experts * o.bins * 8;
  }
  return bytes;
}

}  // namespace

Result<RunMemory> PlanRunMemory(const ModelConfig& config, const PassShape& shape,
                                const BalanceOptions& balance, std::int64_t accumulate) {
  constexpr std::int64_t kLongest = 4096;  // longer rows are extrapolated
  K3_ASSIGN(const PhantomWeights weights, PhantomWeights::Create(config));
  const std::int64_t traced = std::min(shape.sequence, kLongest);
  K3_ASSIGN(const RowCost row, TraceRow(weights.model(), traced, shape.math));
  const double rows = static_cast<double>(shape.rows) * static_cast<double>(shape.sequence) /
                      static_cast<double>(traced);
  auto scaled = [](std::int64_t bytes, double factor) {
    return static_cast<std::int64_t>(static_cast<double>(bytes) * factor);
  };
  RunMemory m;
  m.weights = m.gradients = 4 * weights.floats();
  m.optimizer = 8 * weights.floats();
  const std::int64_t tokens = shape.rows * shape.sequence;
  m.workspace = 2 * PassBytes(config, tokens, 0);
  m.saved = scaled(row.saved, rows);
  const StateBytes parts = ModelState::PartsFor(config, 0);  // three times: state, gradient, copy
  m.sequences = scaled(row.sequences, rows) +
                scaled(3 * (parts.kda + parts.conv),
                       static_cast<double>(shape.rows) * std::max(0.0, shape.parts_per_row - 1));
  const OpScratch ops = OpScratchBytes(config, tokens, shape.sequence, shape.sequence, shape.math);
  m.scratch = ops.shared + shape.threads * ops.per_thread + BackwardScratch(config, shape);
  m.balance = BalanceBytes(config, shape, balance, accumulate);
  return m;
}

std::string MemoryText(const RunMemory& m) {
  return fmt::format(
      "weights {}, gradients {}, optimizer {}, activations {}, {}program and data {}; total {}",
      BytesText(m.weights), BytesText(m.gradients), BytesText(m.optimizer),
      BytesText(m.activations()),
      m.teacher > 0 ? fmt::format("teacher {}, ", BytesText(m.teacher)) : "", BytesText(m.program),
      BytesText(m.total()));
}

}  // namespace k3
