#include "sampling.h"

#include <limits>

#include "k3/model/generation_config.h"
#include "options.h"
#include "signals.h"

namespace k3::app {

void AddSamplingOptions(CLI::App& app, SamplingOptions& o) {
  const auto real = [&app](const char* name, std::optional<double>& value, RealRange range,
                           const char* help) {
    app.add_option_function<std::string>(
           name,
           [&value, range, name](const std::string& text) {
             auto parsed = ParseReal(text, range.low, range.high);
             if (!parsed.ok()) throw CLI::ValidationError(name, parsed.message());
             value = *parsed;
           },
           help)
        ->type_name("X");
  };
  real("--temp", o.temperature, {0, 100}, "Temperature; 0 (or below 0.001) takes the best token");
  real("--top-p", o.top_p, {0, 1}, "Keep the best tokens up to this share of probability");
  app.add_option_function<std::string>(
         "--top-k",
         [&o](const std::string& text) {
           auto parsed = ParseInteger(text, 0, std::numeric_limits<std::int32_t>::max());
           if (!parsed.ok()) throw CLI::ValidationError("--top-k", parsed.message());
           o.top_k = *parsed;
         },
         "Keep the N best tokens; 0 keeps all")
      ->type_name("N");
  real("--min-p", o.min_p, {0, 1}, "Drop tokens below this share of the best one's probability");
  real("--repeat-penalty", o.repetition_penalty, {0.01, 100},
       "Divide the score of tokens seen before by this; 1 is off");
  AddReal(app, "--frequency-penalty", o.params.frequency_penalty, {-100, 100},
          "Lower a score by this for every time the token was generated");
  AddReal(app, "--presence-penalty", o.params.presence_penalty, {-100, 100},
          "Lower the score of tokens generated before");
  app.add_option("--logit-bias", o.biases, "Add VALUE (-100 to 100) to a token's score; repeatable")
      ->type_name("ID=VALUE")
      ->allow_extra_args(false)
      ->check([](const std::string& text) {
        const auto bias = ParseBias(text);
        return bias.ok() ? std::string() : bias.message();
      });
  AddSeed(app, o.params.seed)->each([&o](const std::string&) { o.seed_given = true; });
}

Result<GenerateOptions> BaseGenerateOptions(const SamplingOptions& o,
                                            const EngineOptions& engine_options,
                                            const Engine& engine) {
  GenerateOptions g;
  K3_ASSIGN(const GenerationConfig defaults,
            ReadGenerationConfig(engine.dir, engine.model->config().vocab));
  g.sampling = o.params;
  g.sampling.temperature = 0;
  if (defaults.do_sample.value_or(false)) {
    g.sampling.temperature = defaults.temperature.value_or(1.f);
    g.sampling.top_p = defaults.top_p.value_or(1.f);
    g.sampling.min_p = defaults.min_p.value_or(0.f);
    g.sampling.top_k = defaults.top_k.value_or(0);
    g.sampling.repetition_penalty = defaults.repetition_penalty.value_or(1.f);
  }
  if (o.temperature.has_value()) g.sampling.temperature = *o.temperature;
  if (o.top_p.has_value()) g.sampling.top_p = *o.top_p;
  if (o.min_p.has_value()) g.sampling.min_p = *o.min_p;
  if (o.top_k.has_value()) g.sampling.top_k = *o.top_k;
  if (o.repetition_penalty.has_value()) g.sampling.repetition_penalty = *o.repetition_penalty;
  for (const std::string& text : o.biases) {
    K3_ASSIGN(const auto bias, ParseBias(text));
    g.sampling.logit_bias.insert_or_assign(bias.first, bias.second);
  }
  g.eos = defaults.eos.empty() ? engine.model->config().eos : defaults.eos;
  g.context = engine.context;
  g.prefill_chunk = engine_options.prefill_chunk;
  g.cancel = &Interrupted();
  return g;
}

}  // namespace k3::app
