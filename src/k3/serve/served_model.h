// What the handlers know of the model that is served. Immutable once the server is ready.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "k3/base/ids.h"
#include "k3/chat/format.h"
#include "k3/model/config.h"
#include "k3/runtime/engine.h"
#include "k3/runtime/sampler.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::serve {

/// The part of Engine that handlers use; tests have their own.
class TextEngine {
 public:
  virtual ~TextEngine() = default;
  virtual Result<RequestId> Submit(EngineRequest request, std::shared_ptr<RequestSink> sink) = 0;
  virtual void Cancel(RequestId id) = 0;
  virtual EngineStats stats() const = 0;
  /// As Engine::UseCache.
  virtual void UseCache(std::function<void(PrefixCache*)> use) { use(nullptr); }
};

class ConstraintCache;
class Telemetry;
class DriftMonitor;
class StateFiles;

struct ServedModel {
  std::string id;            // what clients call it
  std::int64_t created = 0;  // seconds since 1970
  std::int64_t vocab = 0;
  std::int64_t context = 0;
  std::size_t longest_token = 0;  // bytes of the vocabulary's longest; 0: unknown
  SamplingParams defaults;        // where a request says nothing
  std::vector<TokenId> eos;

  const Tokenizer* tokenizer = nullptr;  // outlives the server
  std::optional<TokenId> bos;            // comes before plain text
  std::optional<chat::Markup> markup;
  bool chat_format = false;  // false: messages are plain text that the model continues
  chat::Bodies bodies;

  std::shared_ptr<ConstraintCache> constraints;  // null: forms are promised to nobody (tests)
  const Telemetry* telemetry = nullptr;          // outlives the server; may be null
  DriftMonitor* drift = nullptr;                 // outlives the server; may be null
  StateFiles* states = nullptr;                  // outlives the server; null: nothing is saved
  TextEngine* engine = nullptr;                  // outlives the server
};

/// `engine` outlives it.
std::unique_ptr<TextEngine> AsTextEngine(Engine& engine);

/// Reads generation_config.json, chat_bodies.json and what the tokenizer says from the model's
/// folder. Everything but id, created and engine is filled in. Sampling defaults are the file's
/// where it does not say do_sample false, which means temperature 0; else temperature 1.
/// `warnings` gets a line when the folder has no chat_bodies.json and ours are used.
Result<ServedModel> DescribeModel(const std::string& dir, const ModelConfig& config,
                                  const Tokenizer& tokenizer, std::int64_t context,
                                  std::vector<std::string>& warnings);

/// Sentences of ours, for models whose folder has no chat_bodies.json. A model trained with other
/// words understands its own better.
chat::Bodies PlainBodies();

}  // namespace k3::serve
