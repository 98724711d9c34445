// k3 trace: every intermediate value of one pass, for comparison with the reference.
#include <fmt/format.h>

#include <cstring>
#include <deque>
#include <map>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "k3/io/atomic_file.h"
#include "k3/io/safetensors.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kTraceHelp =
    "Runs the ids through the model in one pass and writes a safetensors file: tokens, logits "
    "of\n"
    "all positions, per layer inputs, outputs and routing, and the caches after the last token.\n"
    "Names are those of tests/reference/README.md.\n"
    "\nExamples:\n"
    "  k3 trace MODEL --ids 1,2,3 --out trace.safetensors\n"
    "  k3 trace --ids @ids.txt --math fast --out fast.safetensors";

struct TraceOptions {
  EngineOptions engine;
  std::optional<std::string> ids;
  std::string out;
};

/// Copies whatever it is shown, so that it can be written after the pass.
class Recorder final : public TraceSink {
 public:
  void Record(std::string_view name, const TensorRef& value) override {
    if (seen_.contains(name)) return;
    Add(std::string(name), value.dtype, value.shape, value.data);
  }
  void AddFloats(const std::string& name, std::vector<std::int64_t> shape,
                 const std::vector<float>& values) {
    if (seen_.contains(name)) return;
    Add(name, DType::kF32, std::move(shape), values.data());
  }
  void AddIds(const std::string& name, const std::vector<TokenId>& ids) {
    Add(name, DType::kI32, {static_cast<std::int64_t>(ids.size())}, ids.data());
  }
  /// Valid while this object lives.
  const std::vector<NamedTensor>& tensors() const { return tensors_; }

 private:
  void Add(std::string name, DType dtype, std::vector<std::int64_t> shape, const void* data) {
    TensorRef ref{dtype, std::move(shape), nullptr};
    auto& copy = storage_.emplace_back(static_cast<std::size_t>(ref.bytes()));
    if (!copy.empty()) std::memcpy(copy.data(), data, copy.size());
    ref.data = copy.data();
    seen_.emplace(name, true);
    tensors_.push_back({std::move(name), std::move(ref)});
  }

  std::deque<std::vector<std::byte>> storage_;
  std::vector<NamedTensor> tensors_;
  std::map<std::string, bool, std::less<>> seen_;
};

void RecordRows(Recorder& recorder, const std::string& name, const PagedRows& rows,
                std::vector<std::int64_t> row_shape) {
  std::vector<float> all;
  all.reserve(static_cast<std::size_t>(rows.size() * rows.width()));
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    all.insert(all.end(), rows.row(i), rows.row(i) + rows.width());
  }
  row_shape.insert(row_shape.begin(), rows.size());
  recorder.AddFloats(name, std::move(row_shape), all);
}

void RecordCaches(Recorder& recorder, const ModelConfig& config, const ModelState& state) {
  for (std::int64_t i = 0; i < state.n_layers(); ++i) {
    const LayerCache& cache = state.layer(i);
    const std::string layer = fmt::format("layer.{}.", i);
    switch (config.attention[static_cast<std::size_t>(i)]) {
      case AttentionKind::kKda:
        recorder.AddFloats(layer + "kda_state",
                           {config.kda.n_heads, config.kda.head_dim, config.kda.head_dim},
                           cache.kda.state);
        recorder.AddFloats(layer + "conv_rows", {3, config.kda.conv_kernel - 1, config.kda.width()},
                           cache.kda.conv);
        break;
      case AttentionKind::kMla:
        RecordRows(recorder, layer + "mla_rows", cache.rows, {config.mla.row_dim()});
        break;
      case AttentionKind::kGqa: {
        const std::vector<std::int64_t> shape{config.gqa.n_kv_heads, config.gqa.head_dim};
        RecordRows(recorder, layer + "gqa_k", cache.rows, shape);
        RecordRows(recorder, layer + "gqa_v", cache.value_rows, shape);
        break;
      }
    }
  }
}

Status WriteTrace(const TraceOptions& o, const Engine& engine, const std::vector<TokenId>& ids) {
  const ModelConfig& config = engine.model->config();
  K3_TRY(CheckIds(ids, config.vocab));
  const auto n = static_cast<std::int64_t>(ids.size());
  if (n == 0) return Error{Code::kInvalidArgument, "--ids: the list is empty"};
  if (n > engine.context) {
    return Error{Code::kInvalidArgument,
                 fmt::format("the prompt has {} tokens, the context holds {}", n, engine.context)};
  }
  ModelState state = engine.model->NewState();
  const SequenceInput input{ids, &state, LogitRows::kAll};
  Recorder recorder;
  std::vector<float> logits;
  engine.exec->cancel = &Interrupted();
  K3_TRY(engine.model->Forward(std::span(&input, 1), *engine.exec, logits, &recorder));
  recorder.AddIds("tokens", ids);
  recorder.AddFloats("logits", {n, config.vocab}, logits);
  RecordCaches(recorder, config, state);
  return WriteSafetensors(o.out, recorder.tensors(),
                          {{"math", o.engine.math}, {"format", "k3-trace"}});
}

int Trace(const TraceOptions& o) {
  const auto ids = ParseIds(*o.ids);
  if (!ids.ok()) return Fail(ids.error());
  if (const Status s = AtomicFile::Check(o.out); !s.ok()) return Fail(s.error());
  int exit_code = kExitOk;
  EngineOptions engine_options = o.engine;
  engine_options.brief = true;
  const auto engine = LoadEngine(engine_options, exit_code);
  if (engine == nullptr) return exit_code;
  const Status s = WriteTrace(o, *engine, *ids);
  return s.ok() ? kExitOk : Fail(s.error());
}

}  // namespace

void AddTrace(CLI::App& root, Action& action) {
  auto o = std::make_shared<TraceOptions>();
  CLI::App* app = root.add_subcommand("trace", "Write the intermediate values of one pass");
  app->footer(std::string(kTraceHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  AddIds(*app, "--ids", o->ids, "Token ids")->required();
  app->add_option("--out", o->out, "File to write")->required()->type_name("FILE");
  AddEngineOptions(*app, o->engine, false);
  app->callback([o, &action] { action = [o] { return Trace(*o); }; });
}

}  // namespace k3::app
