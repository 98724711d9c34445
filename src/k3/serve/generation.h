// One request for text, independent of the dialect it came in.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "k3/base/ids.h"
#include "k3/chat/message.h"
#include "k3/io/json.h"
#include "k3/runtime/sampler.h"
#include "k3/serve/api_error.h"
#include "k3/serve/served_model.h"

namespace k3::serve {

inline constexpr std::int64_t kMaxChoices = 128;  // of one request, all prompts together
inline constexpr std::size_t kMaxStops = 16;
inline constexpr std::size_t kMaxStopBytes = 1024;
inline constexpr std::int64_t kMaxTopLogprobs = 20;

struct Generation {
  std::vector<std::vector<TokenId>> prompts;  // chat has one
  std::vector<std::int64_t> snapshot_at;      // in prompts[0]
  const char* prompt_field = "messages";      // what the request calls it
  std::int64_t n = 1;                         // choices of each prompt
  std::int64_t slot = -1;                     // name for prompts[0], to save it by; < 0: none
  SamplingParams sampling;                    // the seed of choice 0
  std::optional<std::int64_t> max_tokens;     // absent: until the context is full
  std::vector<std::string> stop;
  std::int64_t top_logprobs = -1;  // < 0: none
  bool echo = false;               // completions: the prompt is part of the text
  bool ignore_eos = false;
  bool prefix_cache = true;
  int priority = 0;
  std::optional<double> timeout_s;
  bool stream = false;
  bool include_usage = false;

  bool chat = false;  // the prompt is in the chat format, and so is the reply
  chat::ChatOptions chat_options;
  std::shared_ptr<const TokenConstraint> constraint;  // each choice gets a clone; may be null
};

/// Fields that the OpenAI endpoints share: temperature, top_p, top_k, min_p, the penalties, seed
/// (absent: random), logit_bias, n, stop, stream, stream_options, and of ours priority, timeout,
/// ignore_eos, cache_prompt and id_slot. null counts as absent, unknown fields are ignored.
[[nodiscard]] ApiStatus ReadCommonFields(const JsonReader& request, const ServedModel& model,
                                         Generation& out);

/// Refuses a prompt of so many bytes of text that the context has too few tokens for it whatever
/// they are: reading megabytes into tokens takes seconds, and this knows without.
[[nodiscard]] ApiStatus CheckLength(std::size_t text_bytes, const ServedModel& model,
                                    const char* field);
/// The same of a prompt whose tokens are known, or at least how many there are.
ApiError TooLong(std::int64_t tokens, bool at_least, const ServedModel& model, const char* field);

/// A string or a list of strings; `key` is "stop" or "stop_sequences".
[[nodiscard]] ApiStatus ReadStops(const JsonReader& request, const char* key,
                                  std::vector<std::string>& out);

/// One JSON object; messages name it "request".
[[nodiscard]] ApiStatus ParseBody(std::string_view body, nlohmann::json& out);

/// Body of /v1/chat/completions.
[[nodiscard]] ApiStatus ReadChat(const nlohmann::json& body, const ServedModel& model,
                                 Generation& out);
/// Body of /v1/completions.
[[nodiscard]] ApiStatus ReadCompletion(const nlohmann::json& body, const ServedModel& model,
                                       Generation& out);
/// Body of /v1/messages. `counting`: for count_tokens, max_tokens may be absent.
[[nodiscard]] ApiStatus ReadMessages(const nlohmann::json& body, const ServedModel& model,
                                     bool counting, Generation& out);

/// Messages and options as prompts[0], with snapshot_at. Models without the chat format get the
/// plain text: BOS, then each message, those that are not the assistant's on a line of their own.
[[nodiscard]] ApiStatus BuildChatPrompt(const std::vector<chat::Message>& messages,
                                        const ServedModel& model, Generation& out);
/// CheckLength of all their text.
[[nodiscard]] ApiStatus CheckMessages(const std::vector<chat::Message>& messages,
                                      const ServedModel& model);
/// The same prompt for people to read.
[[nodiscard]] ApiStatus ChatPromptText(const std::vector<chat::Message>& messages,
                                       const chat::ChatOptions& options, const ServedModel& model,
                                       std::string& out);
/// Compiles what response_format and tools ask of the reply into out.constraint. `body` may say
/// response_format.json_schema.strict and parallel_tool_calls.
[[nodiscard]] ApiStatus AddConstraint(const nlohmann::json& body, const ServedModel& model,
                                      Generation& out);
/// messages and the fields about them, as ParseChatFields, with `thinking` and
/// `chat_template_kwargs` besides.
[[nodiscard]] ApiStatus ReadChatFields(const nlohmann::json& body, const ServedModel& model,
                                       std::vector<chat::Message>& messages,
                                       chat::ChatOptions& options);

/// JsonReader's errors with the key as param.
template <class T>
ApiStatus Take(Result<T> value, const char* key, T& out) {
  if (!value.ok()) {
    ApiError e;
    e.message = value.message();
    e.param = key;
    return e;
  }
  out = std::move(value).value();
  return {};
}

}  // namespace k3::serve
