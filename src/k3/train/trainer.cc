#include "k3/train/trainer.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "k3/base/memory.h"
#include "k3/base/threads.h"
#include "k3/io/atomic_file.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/folder_lock.h"
#include "k3/train/run_log.h"
#include "k3/train/train_state.h"

namespace k3 {

struct Trainer::Impl {
  TrainConfig config;
  std::string config_json, tokenizer_dir;
  std::optional<TokenFile> train, valid;
  std::unique_ptr<Parameters> params;
  std::unique_ptr<Teacher> teacher;
  std::unique_ptr<GradientPass> pass;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Balancer> balancer;
  std::optional<RowReader> rows;
  std::unique_ptr<RunLog> log;
  RunMemory memory;
  TrainState state;
  double step_s = 0;      // smoothed
  double token_flop = 0;  // of products with weights, forward and backward
  std::vector<std::string> notes;
  std::optional<FolderLock> lock;

  /// Other noise every pass, the same after a resume.
  void PlantNoise(std::uint64_t number) {
    if (config.plant_noise < 0) return;
    pass->PlantNoise(config.plant_noise, config.seed * 0x9E3779B97F4A7C15ull + number);
  }
  Status Inspect(const ModelConfig& model);
  Status Prepare();
  Status LockFolder();
  int threads() const {
    return static_cast<int>(config.threads > 0 ? config.threads : UsableCpus());
  }
  MathMode math() const { return config.fast ? MathMode::kFast : MathMode::kExact; }
  ComputeOptions compute() const { return {config.bf16, config.mxfp4_from < 1}; }
  Result<ModelConfig> ReadConfig();
  Status LoadTeacher(std::int64_t vocab);
  Status PlanMemory(const ModelConfig& model);
  Status LoadModel(const ModelConfig& model);
  Status LoadData(std::int64_t vocab);
  Status Resume();
  Status Save();
  Status RunPasses(const std::atomic<bool>* stop, StepReport& r, std::int64_t& tokens);
  Result<StepReport> Step(const std::atomic<bool>* stop);
  Status Evaluate(StepReport& report);
  Status Observe(StepReport& report, const RunLimits& limits);
  void AddRow(const TokenFile& file, std::span<const TokenId> row,
              std::vector<TrainRow>& batch) const;
  std::string checkpoints() const { return config.out + "/checkpoints"; }
};

namespace {

namespace fs = std::filesystem;

double Seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

/// The exporter has to pack what training rounds.
Status CheckRounding(const TrainConfig& c, const ModelConfig& model) {
  if (c.mxfp4_from >= 1) return {};
  if (!c.pack_experts) {
    return Error{Code::kInvalidArgument,
                 fmt::format("train.mxfp4_from is {}, expected train.pack_experts = true with it",
                             c.mxfp4_from)};
  }
  if (Parameters::CopiedFloats(model, {false, true}) == 0) {
    return Error{
        Code::kInvalidArgument,
        fmt::format("train.mxfp4_from is {}, but the model has no routed expert whose rows "
                    "are whole blocks of 32",
                    c.mxfp4_from)};
  }
  return {};
}

/// The tokenizer goes into the exported model: a wrong one must not be noticed only there.
Status CheckTokenizer(const std::string& dir, const TokenFile& tokens) {
  std::error_code e;
  if (!fs::exists(dir + "/tiktoken.model", e)) return {};
  K3_ASSIGN(const Tokenizer t, Tokenizer::Load(dir));
  if (t.vocab_size() == static_cast<std::size_t>(tokens.vocab())) return {};
  return Error{Code::kInvalidArgument,
               fmt::format("{}: its vocabulary has {} ids, that of the tokenizer beside it {}",
                           tokens.path(), tokens.vocab(), t.vocab_size())};
}

/// Operations of a token in products with the weights it meets: two a weight going forward, four
/// going back. Scores of attention and state updates are not counted.
double ProductFlop(const ModelConfig& c) {
  double weights = 0;
  for (const TensorSpec& s : ExpectedTensors(c)) {
    const bool product = IsRoundedInBf16(s) || (s.role == TensorRole::kRouter && !s.f32);
    if (!product || (s.role == TensorRole::kEmbedding && !c.tied_embeddings)) continue;
    const double share =
        s.role == TensorRole::kRoutedExpert
            ? static_cast<double>(c.moe.top_k) / static_cast<double>(c.moe.n_experts)
            : 1.0;
    weights += share * static_cast<double>(s.elements());
  }
  return 6 * weights;
}

TrainRow RowOf(std::span<const TokenId> tokens) {
  return {tokens.first(tokens.size() - 1), tokens.subspan(1)};
}

}  // namespace

/// A document must not see the one packed before it: each becomes a sequence of its own.
void Trainer::Impl::AddRow(const TokenFile& file, std::span<const TokenId> row,
                           std::vector<TrainRow>& batch) const {
  if (config.across_documents) return batch.push_back(RowOf(row));
  for (const auto part : SplitAtDocuments(row, file.tokens(), file.starts())) {
    batch.push_back(RowOf(part));
  }
}

Status Trainer::Impl::LockFolder() {
  K3_ASSIGN(lock, FolderLock::Take(config.out, "another run"));
  std::error_code e;
  fs::create_directories(checkpoints(), e);
  if (e) {
    return Error{Code::kIo, fmt::format("{}: cannot create: {}", checkpoints(), e.message())};
  }
  RemoveUnfinished(config.out), RemoveUnfinished(checkpoints());
  return {};
}

Result<ModelConfig> Trainer::Impl::ReadConfig() {
  const std::string path =
      config.init_from.empty() ? config.model_config : config.init_from + "/config.json";
  K3_ASSIGN(config_json, ReadTextFile(path));
  return ParseModelConfig(config_json, path);
}

Status Trainer::Impl::PlanMemory(const ModelConfig& model) {
  PassShape shape{config.batch, config.sequence, 1.0, threads(), math()};
  if (!config.across_documents) {
    shape.parts_per_row += static_cast<double>(config.sequence) *
                           static_cast<double>(train->documents()) /
                           static_cast<double>(train->tokens().size());
  }
  const std::int64_t program = ResidentBytes();
  const MemoryLimit limit = UsableMemory();
  // First what needs no pass to know: planning would take that memory itself.
  std::int64_t weights = 0;
  for (const TensorSpec& s : ExpectedTensors(model)) weights += 16 * s.elements();
  if (limit.bytes > 0 && weights > limit.bytes) {
    return Error{Code::kResource,
                 fmt::format("weights, gradients and optimizer need {}, there are {} ({})",
                             BytesText(weights), BytesText(limit.bytes), limit.source)};
  }
  K3_ASSIGN(memory, PlanRunMemory(model, shape, config.balance, config.accumulate));
  memory.weights += 4 * Parameters::CopiedFloats(model, compute());
  if (teacher) memory.teacher = teacher->bytes(config.batch, config.sequence, threads());
  memory.program = program;
  if (limit.bytes > 0 && memory.total() - program > limit.bytes) {
    return Error{Code::kResource,
                 fmt::format("the run needs {} ({}), there are {} ({})", BytesText(memory.total()),
                             MemoryText(memory), BytesText(limit.bytes), limit.source)};
  }
  return {};
}

Status Trainer::Impl::LoadModel(const ModelConfig& model) {
  if (!config.init_from.empty()) {
    K3_ASSIGN(params, Parameters::Load(config.init_from, compute()));
    return {};
  }
  K3_ASSIGN(params, Parameters::Create(model, compute()));
  params->Initialise({config.seed, config.init_std});
  return {};
}

Status Trainer::Impl::LoadTeacher(std::int64_t vocab) {
  if (config.distill.teacher.empty()) return {};
  K3_ASSIGN(teacher, Teacher::Load(config.distill, config.data, vocab, threads(), math()));
  return {};
}

Status Trainer::Impl::LoadData(std::int64_t vocab) {
  K3_ASSIGN(train, TokenFile::Open(config.data + "/train.tokens"));
  if (train->vocab() > vocab) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: its vocabulary has {} ids, the model's {}", train->path(),
                             train->vocab(), vocab)};
  }
  K3_TRY(CheckTokenizer(config.data, *train));
  K3_ASSIGN(rows, RowReader::Create(train->tokens(), config.sequence, config.seed, train->path()));
  if (config.eval_every == 0) return {};
  K3_ASSIGN(valid, TokenFile::Open(config.data + "/valid.tokens"));
  if (valid->vocab() > vocab) {
    return Error{Code::kInvalidArgument, fmt::format("{}: vocabulary {}, the model's is {}",
                                                     valid->path(), valid->vocab(), vocab)};
  }
  K3_TRY(RowReader::Create(valid->tokens(), config.sequence, 0, valid->path()).status());
  return {};
}

Status Trainer::Impl::Resume() {
  const std::string identity = fmt::format(
      "{}\n{} {} {} {} {:x}", config_json, train->tokens().size(), train->vocab(), config.sequence,
      config.seed, XXH3_64bits(train->tokens().data(), train->tokens().size_bytes()));
  state.run = XXH3_64bits(identity.data(), identity.size());
  state.config = XXH3_64bits(config.text.data(), config.text.size());
  for (const std::string& path : ListStates(checkpoints())) {
    auto loaded = LoadState(path, state.run, *params, *optimizer, *balancer);
    if (loaded.ok()) {
      const std::uint64_t text = std::exchange(state, *loaded).config;
      notes.push_back(fmt::format("resumed from {} at step {}", path, state.step));
      if (std::exchange(state.config, text) != text) {
        notes.push_back("the config file has changed since that checkpoint was written");
      }
      const std::int64_t rows_per_step = config.batch * config.accumulate;
      if (state.rows_per_step != rows_per_step) {
        notes.push_back(
            fmt::format("the checkpoint was made with {} rows a step, the config says "
                        "{}",
                        state.rows_per_step, rows_per_step));
      }
      return rows->Seek(state.cursor);
    }
    if (loaded.error().code == Code::kInvalidArgument) return loaded.error();
    notes.push_back(loaded.message() + "; trying the checkpoint before it");
  }
  if (!notes.empty()) notes.push_back("no checkpoint can be read: starting from the beginning");
  return {};
}

Status Trainer::Impl::Inspect(const ModelConfig& model) {
  K3_TRY(config.schedule.Check());
  K3_TRY(config.balance.Check());
  K3_TRY(CheckRounding(config, model));
  if (config.plant_noise >= model.n_layers) {
    return Error{Code::kInvalidArgument,
                 fmt::format("train.plant_noise is {}, expected a layer below {}",
                             config.plant_noise, model.n_layers)};
  }
  K3_TRY(LoadData(model.vocab));
  return LoadTeacher(model.vocab);
}

Status Trainer::Impl::Prepare() {
  K3_ASSIGN(const ModelConfig model, ReadConfig());
  K3_TRY(Inspect(model));
  K3_TRY(PlanMemory(model));
  K3_TRY(LockFolder());
  K3_TRY(LoadModel(model));
  pass = std::make_unique<GradientPass>(*params, threads(), math());
  pass->Distil(teacher.get());
  token_flop = ProductFlop(model);
  optimizer = std::make_unique<Optimizer>(*params, config.adamw, config.muon);
  balancer = std::make_unique<Balancer>(*params, config.balance);
  balancer->Attach(pass->tape());
  tokenizer_dir = config.data;
  K3_TRY(Resume());
  K3_ASSIGN(log, RunLog::Open(config.out, state.step));
  return {};
}

Status Trainer::Impl::Save() {
  state.cursor = rows->cursor(), state.rows_per_step = config.batch * config.accumulate;
  K3_TRY(SaveState(StatePath(checkpoints(), state.step), state, *params, *optimizer, *balancer));
  PruneStates(checkpoints(), state.step, config.keep);
  return log->Plot();
}

/// Everything that is looked at between steps.
Status Trainer::Impl::Observe(StepReport& r, const RunLimits& limits) {
  const bool last = state.step == config.steps;
  auto due = [&](std::int64_t every) { return every > 0 && (last || state.step % every == 0); };
  if (due(config.eval_every)) K3_TRY(Evaluate(r));
  if (due(config.probe_every > 0 ? config.probe_every : config.eval_every)) {
    const TokenFile& file = valid ? *valid : *train;
    K3_ASSIGN(r.probe, ProbeModel(*params, file.tokens().first(static_cast<std::size_t>(
                                               std::min<std::int64_t>(config.sequence, 512)))));
  }
  if (limits.sampler && due(config.sample_every)) {
    K3_ASSIGN(r.sample, limits.sampler(params->model()));
    K3_TRY(log->AddSample(r.step, r.sample));
  }
  if (due(config.log_every)) K3_TRY(log->Add(r));
  if (limits.on_step) limits.on_step(r);
  return {};
}

Status Trainer::Impl::Evaluate(StepReport& report) {
  K3_ASSIGN(RowReader reader, RowReader::Create(valid->tokens(), config.sequence, 0, "valid"));
  GradientPass::LossSum sum;
  PlantNoise(~std::uint64_t{0});
  for (std::int64_t i = 0; i < std::min(config.eval_rows, reader.rows()); ++i) {
    std::vector<TrainRow> row;
    AddRow(*valid, reader.Next(), row);
    K3_ASSIGN(const auto one, pass->Evaluate(row));
    sum.nats += one.nats, sum.counted += one.counted;
  }
  if (sum.counted == 0) return {};
  report.eval_loss = sum.nats / static_cast<double>(sum.counted);
  // A BOS that begins a sequence is given, not predicted.
  auto tokens = static_cast<std::int64_t>(valid->tokens().size());
  for (std::int64_t d = 0; d < valid->documents() && !config.across_documents; ++d) {
    const auto start = valid->starts()[static_cast<std::size_t>(d)];
    if (valid->tokens()[start] == params->config().bos) --tokens;
  }
  report.eval_bits_per_byte = report.eval_loss / std::log(2.0) * static_cast<double>(tokens) /
                              static_cast<double>(std::max<std::int64_t>(1, valid->text_bytes()));
  return {};
}

/// Adds up loss and gradients. kCancelled leaves things as they were before the step.
Status Trainer::Impl::RunPasses(const std::atomic<bool>* stop, StepReport& r,
                                std::int64_t& tokens) {
  const DataCursor before = rows->cursor();
  std::vector<std::vector<TrainRow>> parts(static_cast<std::size_t>(config.accumulate));
  for (auto& batch : parts) {
    for (std::int64_t i = 0; i < config.batch; ++i) AddRow(*train, rows->Next(), batch);
    for (const TrainRow& row : batch) tokens += static_cast<std::int64_t>(row.inputs.size());
  }
  const double scale = 1.0 / static_cast<double>(std::max<std::int64_t>(1, tokens));
  std::int64_t number = state.step * config.accumulate;
  for (const auto& batch : parts) {
    PlantNoise(static_cast<std::uint64_t>(number++));
    if (batch.empty()) continue;  // documents of one token predict nothing
    balancer->StartPass({}, scale);
    K3_ASSIGN(const auto sum, pass->Run(batch, scale));
    balancer->EndPass();
    r.loss += sum.nats * scale;
    if (teacher) r.divergence = std::max(0.0, r.divergence) + sum.divergence * scale;
    if (stop != nullptr && *stop) {  // the half-done step is done again after a resume
      balancer->Discard();
      K3_TRY(rows->Seek(before));
      return Error{Code::kCancelled, "stopped"};
    }
  }
  return {};
}

Result<StepReport> Trainer::Impl::Step(const std::atomic<bool>* stop) {
  const double start = Seconds();
  const double done = static_cast<double>(state.step) / static_cast<double>(config.steps);
  std::int64_t per_step = 0;
  StepReport r;
  params->ZeroGrads();
  balancer->SetProgress(done);
  params->RoundExperts(done >= config.mxfp4_from);
  K3_TRY(RunPasses(stop, r, per_step));
  r.grad_norm = GradientNorm(*params);
  r.lr = config.lr * config.schedule.At(state.step);
  r.skipped = !std::isfinite(r.grad_norm) || !std::isfinite(r.loss) || std::isnan(r.divergence);
  if (r.skipped) {
    ++state.skipped;
    balancer->Discard();
  } else {
    const double clip =
        config.clip > 0 && r.grad_norm > config.clip ? config.clip / r.grad_norm : 1.0;
    optimizer->Step(pass->tape().context(), r.lr, config.muon.lr * config.schedule.At(state.step),
                    clip);
    r.balance = balancer->Update();
  }
  ++state.step;
  state.tokens += per_step;
  r.step = state.step, r.tokens = state.tokens, r.skipped_total = state.skipped;
  const double took = Seconds() - start;
  step_s = step_s > 0 ? 0.9 * step_s + 0.1 * took : took;
  r.tokens_per_s = static_cast<double>(per_step) / took;
  r.steps_left = config.steps - state.step;
  r.eta_s = step_s * static_cast<double>(r.steps_left);
  r.memory_bytes = ResidentBytes();
  return r;
}

Trainer::Trainer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Trainer::~Trainer() = default;

Result<std::unique_ptr<Trainer>> Trainer::Open(const TrainConfig& config) {
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  K3_TRY(impl->Prepare());
  return std::unique_ptr<Trainer>(new Trainer(std::move(impl)));
}

Status Trainer::Check(const TrainConfig& config, const std::string& config_json) {
  Impl impl;
  impl.config = config;
  K3_ASSIGN(const ModelConfig model, ParseModelConfig(config_json, "config.json"));
  return impl.Inspect(model);
}

Result<bool> Trainer::Run(const RunLimits& limits) {
  Impl& t = *impl_;
  const TrainConfig& c = t.config;
  const double start = Seconds();
  while (t.state.step < c.steps) {
    if (limits.stop != nullptr && *limits.stop) break;
    if (limits.max_seconds > 0 && Seconds() - start >= limits.max_seconds) break;
    auto step = t.Step(limits.stop);
    if (!step.ok()) {
      if (step.error().code == Code::kCancelled) break;
      return step.error();
    }
    if (limits.peak_flop_s > 0) {
      step->mfu = t.token_flop * step->tokens_per_s / limits.peak_flop_s;
    }
    K3_TRY(t.Observe(*step, limits));
    if (t.state.step < c.steps && t.state.step % c.checkpoint_every == 0) K3_TRY(t.Save());
  }
  K3_TRY(t.Save());
  K3_TRY(t.params->Export(c.out + "/model", {t.config_json, t.tokenizer_dir, c.pack_experts}));
  return t.state.step >= c.steps;
}

std::int64_t Trainer::step() const { return impl_->state.step; }
Parameters& Trainer::params() { return *impl_->params; }
const std::vector<std::string>& Trainer::notes() const { return impl_->notes; }
const RunMemory& Trainer::memory() const { return impl_->memory; }

}  // namespace k3
