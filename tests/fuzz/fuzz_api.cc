// Bodies of requests on every endpoint, down to a scripted engine. The first byte chooses the
// endpoint. Every answer is JSON or a stream of JSON events, and an error has its shape.
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "k3/serve/serve_test_util.h"

namespace {

using k3::serve::test::Answer;
using k3::serve::test::Fixture;

constexpr std::string_view kPaths[] = {
    "/v1/chat/completions",      "/v1/completions", "/v1/messages",
    "/v1/messages/count_tokens", "/tokenize",       "/detokenize",
    "/apply-template",
};

void Check(const Answer& a) {
  if (!a.ended) __builtin_trap();
  if (a.status == 200) {
    if (a.body.starts_with("data: ") || a.body.starts_with("event: ")) {
      (void)a.Events();  // throws, which ends the process, when one is not JSON
    } else {
      (void)a.Json();
    }
    return;
  }
  const auto error = a.Json().at("error");
  const std::string message = error.at("message");
  if (a.status < 400 || message.empty() || message.find('\n') != message.npos) __builtin_trap();
  if (!error.contains("type") || !error.contains("param") || !error.contains("code")) {
    __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Fixture chat(true), plain(false);
  if (size == 0) return 0;
  Fixture& f = (data[0] & 64) != 0 ? plain : chat;
  f.engine.script =
      "a\xE2\x82\xAC"
      "b{close}think{sep}{open}response{sep}yes{close}response{sep}{open}tools{sep}"
      "{open}call tool=\"t\" index=\"1\"{sep}{close}call{sep}{close}tools{sep}{close}message{sep}"
      "{end}";
  const std::string path(kPaths[(data[0] & 63) % std::size(kPaths)]);
  Check(*f.Call("POST", path, std::string(reinterpret_cast<const char*>(data + 1), size - 1)));
  if (!f.engine.sinks.empty()) __builtin_trap();  // nothing may be left in the engine
  f.engine.requests.clear();
  return 0;
}
