#include "k3/serve/served_model.h"

#include <fmt/format.h>

#include <utility>

#include "k3/grammar/token_constraint.h"
#include "k3/model/generation_config.h"
#include "k3/serve/constraints.h"

namespace k3::serve {
namespace {

class EngineAdapter final : public TextEngine {
 public:
  explicit EngineAdapter(Engine& engine) : engine_(engine) {}
  Result<RequestId> Submit(EngineRequest request, std::shared_ptr<RequestSink> sink) override {
    return engine_.Submit(std::move(request), std::move(sink));
  }
  void Cancel(RequestId id) override { engine_.Cancel(id); }
  EngineStats stats() const override { return engine_.stats(); }
  void UseCache(std::function<void(PrefixCache*)> use) override {
    engine_.UseCache(std::move(use));
  }

 private:
  Engine& engine_;
};

void SetDefaults(const GenerationConfig& file, SamplingParams& p) {
  if (file.do_sample == false) {
    p.temperature = 0;
    return;
  }
  p.temperature = file.temperature.value_or(1.f);
  p.top_p = file.top_p.value_or(1.f);
  p.min_p = file.min_p.value_or(0.f);
  p.top_k = file.top_k.value_or(0);
  p.repetition_penalty = file.repetition_penalty.value_or(1.f);
}

}  // namespace

std::unique_ptr<TextEngine> AsTextEngine(Engine& engine) {
  return std::make_unique<EngineAdapter>(engine);
}

Result<ServedModel> DescribeModel(const std::string& dir, const ModelConfig& config,
                                  const Tokenizer& tokenizer, std::int64_t context,
                                  std::vector<std::string>& warnings) {
  ServedModel m;
  m.vocab = config.vocab;
  m.context = context;
  K3_ASSIGN(const GenerationConfig file, ReadGenerationConfig(dir, config.vocab));
  SetDefaults(file, m.defaults);
  m.eos = file.eos.empty() ? config.eos : file.eos;
  m.tokenizer = &tokenizer;
  for (TokenId id = 0; id < config.vocab; ++id) {
    m.longest_token = std::max(m.longest_token, tokenizer.Bytes(id).value_or("").size());
  }
  if (tokenizer.add_bos()) {
    m.bos = config.bos ? config.bos : tokenizer.SpecialId("[BOS]");
    if (m.bos && (*m.bos < 0 || *m.bos >= config.vocab)) {
      return Error{Code::kCorrupt, fmt::format("{}: the BOS id is {}, expected 0 to {}", dir,
                                               *m.bos, config.vocab - 1)};
    }
  }
  m.markup = chat::FindMarkup(tokenizer);
  K3_ASSIGN(m.chat_format, chat::SpeaksChat(tokenizer, dir));
  m.constraints = std::make_shared<ConstraintCache>(tokenizer, m.markup);
  m.bodies = PlainBodies();
  if (!m.chat_format) return m;
  K3_ASSIGN(auto bodies, chat::LoadBodies(dir));
  if (bodies) {
    m.bodies = *std::move(bodies);
  } else {
    warnings.push_back(
        fmt::format("{} has no {}: tools and formats are declared in words of ours (docs/chat.md)",
                    dir, chat::kBodiesFile));
  }
  return m;
}

chat::Bodies PlainBodies() {
  chat::Bodies b;
  b.tool_declare = "These tools may be called: {}";
  b.tool_declare_dynamic = "From here on these tools may be called too: {}";
  b.thinking_effort = "Effort of thinking: {}";
  b.tool_choice_required = "The next reply has to call a tool.";
  b.tool_choice_none = "The next reply must not call a tool.";
  b.json_object = "Reply with one JSON object and nothing else.";
  b.json_schema = "Reply with JSON that fits this schema and nothing else: {}";
  return b;
}

}  // namespace k3::serve
