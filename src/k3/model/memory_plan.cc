#include "k3/model/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "k3/base/check.h"
#include "k3/model/model_state.h"
#include "k3/model/pass_memory.h"

namespace k3 {
namespace {

// Measured on glibc with 64-bit pointers; docs/explain.md says how.
constexpr std::int64_t kBytesPerTensor = 230;    // names, shapes and views of a loaded checkpoint
constexpr std::int64_t kBytesPerToken = 160;     // a vocabulary entry of the tokenizer
constexpr std::int64_t kProgramBytes = 8 << 20;  // code, libraries, stacks
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 58;

double D(std::int64_t x) { return static_cast<double>(x); }

/// Values that are decoded to f32 once: vectors, convolutions and depth queries.
std::int64_t DecodedValues(const ModelConfig& c) {
  std::int64_t sum = 0;
  const Status s = ForEachTensor(c, [&](const TensorSpec& t) {
    const bool query = t.role == TensorRole::kResidual && t.name.ends_with("_proj.weight");
    if (t.shape.size() != 2 || query) sum += t.elements();
    return Status();
  });
  K3_CHECK(s.ok(), "a visitor that never fails");
  return sum;
}

struct Running {
  StateBytes state;  // one sequence
  std::int64_t workspace = 0;
  OpScratch scratch;
  std::int64_t scores = 0;

  std::int64_t heap(const PlanOptions& o) const {
    return o.batch * state.total() + workspace + scratch.shared + o.threads * scratch.per_thread +
           scores;
  }
};

Running RunningBytes(const ModelConfig& c, const PlanOptions& o) {
  Running r;
  r.state = ModelState::PartsFor(c, o.context);
  const std::int64_t chunk = std::min(o.prefill_chunk, o.context);
  r.workspace = std::max(PassBytes(c, chunk, 1), PassBytes(c, o.batch, o.batch));
  const OpScratch read = OpScratchBytes(c, chunk, chunk, o.context, o.math);
  const OpScratch decode = OpScratchBytes(c, o.batch, 1, o.context, o.math);
  r.scratch = {std::max(read.shared, decode.shared), std::max(read.per_thread, decode.per_thread)};
  r.scores = 4 * c.vocab * o.batch + 16 * c.vocab;  // scores, and what sampling sorts
  return r;
}

/// Refuses what would overflow, by a count in floating point that is never too low.
Status CheckCountable(const ModelConfig& c, const PlanOptions& o) {
  const StateBytes one = ModelState::PartsFor(c, 1);
  const double rows = D(o.context) + 64;
  const double state = D(o.batch) * (D(one.kda + one.conv) + 4 * D(one.row_token) * rows);
  const std::int64_t tokens = std::max({o.prefill_chunk, o.batch, std::int64_t{1}});
  const double pass = D(PassBytes(c, 1, 1)) * D(tokens) + 64.0 * 64 * D(c.n_layers);
  const double mla = D(o.threads) * 4 * D(o.context) * D(c.mla.qk_nope_dim + c.mla.v_dim + 2);
  const double scores = 16.0 * D(c.vocab) * (D(o.batch) + 1);
  const double wide = D(c.expert_width() + 2 * c.moe.intermediate + c.kda.head_dim);
  const double experts =
      4 * D(tokens) * (D(c.moe.top_k) * D(c.expert_width() + 4) + 2 * D(o.threads) * wide);
  const double sum = state + pass + mla + scores + experts;
  if (sum < D(kMaxBytes)) return {};
  return Error{Code::kInvalidArgument,
               fmt::format("a context of {} in {} sequences takes {:.3g} bytes: more than can be "
                           "planned",
                           o.context, o.batch, sum)};
}

class Planner {
 public:
  Planner(const Inventory& i, const PlanOptions& o) : i_(i), c_(i.config) { plan_.options = o; }

  MemoryPlan Run() {
    Weights();
    Heap();
    for (const PlanPart& p : plan_.parts) {
      (p.home == Home::kHeap ? plan_.heap_bytes : plan_.mapped_bytes) += p.bytes;
    }
    Judge();
    plan_.decode = Step(plan_.options.batch, false);
    plan_.prefill = Step(std::min(plan_.options.prefill_chunk, plan_.options.context), true);
    return std::move(plan_);
  }

 private:
  void Add(std::string name, Home home, std::int64_t bytes, std::string note,
           std::int64_t bf16 = -1) {
    if (bytes > 0) plan_.parts.push_back({std::move(name), home, bytes, bf16, std::move(note)});
  }
  void Weights();
  void Heap();
  void Judge();
  std::int64_t HeapAt(std::int64_t context, std::int64_t batch) const;
  double ExpertBytes(std::int64_t tokens) const;
  double Operations(std::int64_t context) const;
  StepCost Step(std::int64_t tokens, bool prefill) const;

  const Inventory& i_;
  const ModelConfig& c_;
  MemoryPlan plan_;
  std::int64_t fixed_heap_ = 0;  // what does not depend on context or batch
};

void Planner::Weights() {
  for (const RoleTotal& r : i_.roles) {
    Add("weights: " + r.role, Home::kMapped, r.bytes,
        fmt::format("{} tensors as stored", r.tensors));
  }
}

void Planner::Heap() {
  const PlanOptions& o = plan_.options;
  Add("decoded vectors", Home::kHeap, 4 * DecodedValues(c_), "norms, gates, convolutions in f32");
  Add("tensor tables", Home::kHeap, kBytesPerTensor * i_.tensors, "estimate, names and places");
  Add("tokenizer", Home::kHeap, kBytesPerToken * c_.vocab, "estimate, by the vocabulary");
  Add("program", Home::kHeap, kProgramBytes, "estimate: code, libraries, stacks");
  for (const PlanPart& p : plan_.parts) fixed_heap_ += p.home == Home::kHeap ? p.bytes : 0;

  const Running r = RunningBytes(c_, o);
  const std::string sequences = fmt::format("f32, {} sequence{}", o.batch, o.batch == 1 ? "" : "s");
  Add("KDA state", Home::kHeap, o.batch * r.state.kda, sequences + ", the same at any context");
  Add("convolution tails", Home::kHeap, o.batch * r.state.conv, sequences);
  const std::int64_t values = r.state.row_token;
  plan_.row_bytes = 4 * values;
  plan_.row_bytes_bf16 = 2 * values;
  const auto rows = [&](const char* name, std::int64_t bytes) {
    Add(name, Home::kHeap, o.batch * bytes, sequences + ", in pages of 64 tokens",
        o.batch * bytes / 2);
  };
  rows("MLA rows", r.state.mla);
  rows("GQA rows", r.state.gqa);
  plan_.workspace_bytes = r.workspace;
  Add("activations", Home::kHeap, r.workspace,
      fmt::format("one pass over {} tokens",
                  std::max(std::min(o.prefill_chunk, o.context), o.batch)));
  Add("op scratch", Home::kHeap, r.scratch.shared + o.threads * r.scratch.per_thread,
      fmt::format("shared, and for each of {} threads", o.threads));
  Add("scores", Home::kHeap, r.scores, "of the vocabulary, and sampling");
}

std::int64_t Planner::HeapAt(std::int64_t context, std::int64_t batch) const {
  PlanOptions o = plan_.options;
  o.context = context;
  o.batch = batch;
  if (!CheckCountable(c_, o).ok()) return kMaxBytes;
  return fixed_heap_ + RunningBytes(c_, o).heap(o);
}

/// Largest n in [0, limit] with fits(n), fits being true up to some point.
std::int64_t Largest(std::int64_t limit, const std::function<bool(std::int64_t)>& fits) {
  std::int64_t low = 0, high = limit;
  while (low < high) {
    const std::int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

void Planner::Judge() {
  const PlanOptions& o = plan_.options;
  if (o.memory <= 0) return;
  plan_.verdict = plan_.total_bytes() <= o.memory ? PlanVerdict::kFits
                  : plan_.heap_bytes <= o.memory  ? PlanVerdict::kFromDisk
                                                  : PlanVerdict::kTooLarge;
  // If the weights leave no room for one token they are best thought of as read from disk.
  std::int64_t room = o.memory - plan_.mapped_bytes;
  if (HeapAt(1, 1) > room) room = o.memory;
  plan_.largest_context = Largest(
      c_.max_positions, [&](std::int64_t n) { return n == 0 || HeapAt(n, o.batch) <= room; });
  plan_.largest_batch =
      Largest(1 << 20, [&](std::int64_t n) { return n == 0 || HeapAt(o.context, n) <= room; });
}

/// Bytes of the different routed experts that `tokens` tokens choose, if they chose at random.
double Planner::ExpertBytes(std::int64_t tokens) const {
  if (c_.moe.n_experts == 0) return 0;
  const double share = D(c_.moe.top_k) / D(c_.moe.n_experts);
  const double met = 1 - std::pow(1 - share, D(tokens));
  return met * D(i_.role_bytes(TensorRole::kRoutedExpert));
}

/// Multiplications and additions for one token that attends to `context` rows.
double Planner::Operations(std::int64_t context) const {
  double sum = 2 * D(i_.active_parameters);
  for (const AttentionKind kind : c_.attention) {
    switch (kind) {
      case AttentionKind::kKda:  // decay, read, write and read again
        sum += 7 * D(c_.kda.width()) * D(c_.kda.head_dim);
        break;
      case AttentionKind::kMla:
        sum += 2 * D(c_.n_heads) * D(context) * D(c_.mla.row_dim() + c_.mla.kv_lora_rank);
        break;
      case AttentionKind::kGqa:
        sum += 4 * D(c_.n_heads) * D(context) * D(c_.gqa.head_dim);
        break;
    }
  }
  return sum;
}

StepCost Planner::Step(std::int64_t tokens, bool prefill) const {
  const PlanOptions& o = plan_.options;
  StepCost s;
  s.tokens = tokens;
  const std::int64_t experts = i_.role_bytes(TensorRole::kRoutedExpert);
  const std::int64_t table = i_.has_head ? i_.role_bytes(TensorRole::kEmbedding) : 0;
  s.weight_bytes = D(plan_.mapped_bytes - experts - table) + ExpertBytes(tokens);
  const StateBytes state = ModelState::PartsFor(c_, o.context);
  const double sequences = prefill ? 1 : D(tokens);
  s.state_bytes = sequences * (2 * D(state.kda + state.conv) + D(state.mla + state.gqa));
  // A chunk's tokens see between none and all of the context; the last chunk sees nearly all.
  s.operations = D(tokens) * Operations(o.context);
  return s;
}

}  // namespace

std::string_view Name(Home home) { return home == Home::kHeap ? "heap" : "mapped file"; }

std::string_view Name(PlanVerdict verdict) {
  switch (verdict) {
    case PlanVerdict::kNotAsked:
      return "not asked";
    case PlanVerdict::kFits:
      return "fits";
    case PlanVerdict::kFromDisk:
      return "from disk";
    case PlanVerdict::kTooLarge:
      return "too large";
  }
  return "";
}

const PlanPart* MemoryPlan::Find(std::string_view name) const {
  for (const PlanPart& p : parts) {
    if (p.name == name) return &p;
  }
  return nullptr;
}

Result<MemoryPlan> MakePlan(const Inventory& inventory, const PlanOptions& options) {
  if (options.context > inventory.config.max_positions) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: a context of {} was asked for, the model's limit is {}",
                             inventory.path, options.context, inventory.config.max_positions)};
  }
  K3_TRY(CheckCountable(inventory.config, options));
  return Planner(inventory, options).Run();
}

std::int64_t HeapBytesToRun(const ModelConfig& config, const PlanOptions& options) {
  if (!CheckCountable(config, options).ok()) return kMaxBytes;
  return RunningBytes(config, options).heap(options) + 4 * DecodedValues(config);
}

}  // namespace k3
