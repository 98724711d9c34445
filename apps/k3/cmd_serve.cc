// k3 serve: the model behind HTTP.
#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <thread>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "k3/base/memory.h"
#include "k3/io/mapped_file.h"
#include "k3/runtime/engine.h"
#include "k3/serve/api.h"
#include "k3/serve/drift.h"
#include "k3/serve/http_server.h"
#include "k3/serve/served_model.h"
#include "k3/serve/state_files.h"
#include "k3/serve/telemetry.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kServeHelp =
    "Speaks the OpenAI API (/v1/chat/completions, /v1/completions, /v1/models) and Anthropic's\n"
    "(/v1/messages), and shows /health, /ready and /metrics; docs/serve.md has the rest.\n"
    "Listens on this machine only unless --host says otherwise. Keys come from --api-key,\n"
    "--api-key-file (one a line) and K3_API_KEY together; without any everybody may call.\n"
    "SIGTERM or Ctrl-C: nothing new is accepted, running requests are finished; again: stops at "
    "once.\n"
    "\nExamples:\n"
    "  k3 serve\n"
    "  k3 serve MODEL --port 8000 --api-key-file keys.txt --ctx 32768\n"
    "  curl http://127.0.0.1:8080/v1/completions -d '{\"prompt\": \"Once upon a time\"}'";

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kGiB = std::int64_t{1} << 30;

struct ServeOptions {
  EngineOptions engine;
  k3::EngineOptions batch;
  serve::HttpOptions http;
  serve::ApiOptions api;
  std::int64_t port = 8080, connections = 512, body_bytes = 16 << 20;
  std::int64_t state_memory = 0, cache_memory = -1, spill_memory = kGiB, state_dir_limit = kGiB;
  std::int64_t drain_s = 30, sample_every = 16;
  bool no_cache = false, no_speculation = false;
  std::string key, key_file, name, draft, log_level = "warn", drift_reference, state_dir;
};

void SetUpLog(const std::string& level) {
  spdlog::set_default_logger(spdlog::stderr_logger_mt("k3"));
  spdlog::set_level(spdlog::level::from_str(level));
}

Status ReadKeys(const ServeOptions& o, std::vector<std::string>& keys) {
  if (!o.key.empty()) keys.push_back(o.key);
  if (const char* key = std::getenv("K3_API_KEY"); key != nullptr && *key != '\0') {
    keys.emplace_back(key);
  }
  if (o.key_file.empty()) return {};
  K3_ASSIGN(const std::string text, ReadTextFile(o.key_file));
  const std::size_t before = keys.size();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    line.erase(line.find_last_not_of(" \t\r") + 1);
    line.erase(0, line.find_first_not_of(" \t"));
    if (!line.empty()) keys.push_back(std::move(line));
    at = end + 1;
  }
  if (keys.size() == before) {
    return Error{Code::kInvalidArgument, fmt::format("{}: there is no key in it", o.key_file)};
  }
  return {};
}

/// Half of the memory for running sequences, an eighth for the prefix cache, unless told.
void ShareMemory(const ServeOptions& o, std::int64_t memory, k3::EngineOptions& batch) {
  if (memory > 0) {
    batch.state_bytes = std::min(memory / 2, 4 * kGiB);
    batch.cache_bytes = std::min(memory / 8, kGiB);
  }
  if (o.state_memory > 0) batch.state_bytes = o.state_memory;
  if (o.cache_memory >= 0) batch.cache_bytes = o.cache_memory;
}

std::string NameOf(const ServeOptions& o, const std::string& dir) {
  if (!o.name.empty()) return o.name;
  std::string path = dir;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::string name = path.substr(path.rfind('/') + 1);
  return name.empty() || name == "." || name == ".." ? "k3" : name;
}

/// A variable that is not set must not open the server to everybody.
std::string CheckKey(const std::string& text) {
  return text.empty() ? std::string("found \"\", expected a key") : std::string();
}

std::string CheckName(const std::string& text) {
  const bool control = std::any_of(text.begin(), text.end(),
                                   [](char c) { return static_cast<unsigned char>(c) < ' '; });
  return text.empty() || control ? std::string("expected a name without control characters")
                                 : std::string();
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

/// Everything from the loaded model to the last answer.
Status Serve(const ServeOptions& o, Engine& loaded, Engine* draft, serve::Api& api,
             serve::HttpServer& server) {
  k3::EngineOptions batch = o.batch;
  batch.context = loaded.context;
  batch.prefill_tokens_per_step = o.engine.prefill_chunk;
  ShareMemory(o, loaded.memory, batch);
  serve::DriftMonitor drift;
  if (!o.drift_reference.empty()) {
    K3_ASSIGN(const std::string text, ReadTextFile(o.drift_reference));
    K3_TRY(drift.LoadReference(text, o.drift_reference));
  }
  serve::Telemetry telemetry(loaded.model->config().moe.n_experts, &drift);
  serve::ObservedModel observed(*loaded.model, *loaded.exec, telemetry, o.sample_every);
  K3_ASSIGN(const auto engine,
            k3::Engine::Create(observed, batch, draft != nullptr ? draft->runner.get() : nullptr));
  std::vector<std::string> warnings;
  K3_ASSIGN(serve::ServedModel model,
            serve::DescribeModel(loaded.dir, loaded.model->config(), *loaded.tokenizer,
                                 engine->context(), warnings));
  for (const std::string& w : warnings) Warn(w);
  model.id = NameOf(o, loaded.dir);
  model.created = std::chrono::duration_cast<std::chrono::seconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count();
  const auto adapter = serve::AsTextEngine(*engine);
  model.engine = adapter.get();
  std::unique_ptr<serve::StateFiles> states;  // ends before the engine does
  if (!o.state_dir.empty()) {
    serve::StateFiles::Limits limits;
    limits.bytes = o.state_dir_limit;
    K3_ASSIGN(states, serve::StateFiles::Open(o.state_dir, limits, observed));
    model.states = states.get();
  }
  model.telemetry = &telemetry;
  model.drift = &drift;
  api.metrics().SetModel(
      {K3_VERSION, model.id, o.engine.math, fmt::format("{:016x}", loaded.model->fingerprint())},
      loaded.load_s);
  const std::string line = fmt::format(
      "k3 serves {} at {}: context {}, up to {} sequences of it at once, states {}, prefix cache "
      "{}\n",
      model.id, server.url(), model.context, engine->capacity(model.context),
      BytesText(batch.state_bytes), batch.prefix_cache ? BytesText(batch.cache_bytes) : "off");
  api.SetModel(std::make_shared<const serve::ServedModel>(std::move(model)));
  if (const Status written = WriteOut(line); !written.ok()) spdlog::debug("nobody reads stdout");
  while (!Interrupted()) std::this_thread::sleep_for(std::chrono::milliseconds(20));

  api.SetDraining();
  server.StopAccepting();
  engine->Drain(std::chrono::seconds(o.drain_s));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (server.connections() > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the last answers are being sent
  }
  server.Stop();
  return {};
}

int Run(const ServeOptions& given) {
  ServeOptions o = given;
  SetUpLog(o.log_level);
  ::umask(0077);  // snapshots on disk hold what users wrote
  o.http.port = static_cast<std::uint16_t>(o.port);
  o.http.limits.connections = static_cast<std::size_t>(o.connections);
  o.http.limits.body_bytes = static_cast<std::size_t>(o.body_bytes);
  o.http.limits.all_body_bytes = std::max(o.http.limits.all_body_bytes, o.http.limits.body_bytes);
  o.batch.prefix_cache = !o.no_cache;
  o.batch.speculate = !o.no_speculation;
  o.batch.spill_bytes = o.spill_memory;
  if (const Status s = ReadKeys(o, o.api.keys); !s.ok()) return Fail(s.error());
  if (o.api.keys.empty() && !IsLoopback(o.http.host)) {
    Warn(fmt::format("{} is open to others and no API key is set", o.http.host));
  }
  o.api.check_caller =
      !o.api.allowed_hosts.empty() || (o.api.keys.empty() && IsLoopback(o.http.host));
  const bool bare_ipv6 = o.http.host.find(':') != std::string::npos && o.http.host[0] != '[';
  o.api.allowed_hosts.push_back(bare_ipv6 ? "[" + o.http.host + "]" : o.http.host);
  o.api.log_requests = true;
  serve::Api api(o.api);
  auto server = serve::HttpServer::Start(o.http, api);
  if (!server.ok()) return Fail(server.error());
  api.SetConnectionCount([raw = server->get()] { return raw->connections(); });
  Say(fmt::format("k3: {} is up, loading the model\n", (*server)->url()));
  int exit_code = kExitOk;
  const auto engine = LoadEngine(o.engine, exit_code);
  if (engine == nullptr) return exit_code;
  std::unique_ptr<Engine> draft;
  if (!o.draft.empty()) {
    EngineOptions small = o.engine;
    small.model = o.draft;
    small.ctx = 0;
    draft = LoadEngine(small, exit_code);
    if (draft == nullptr) return exit_code;
  }
  const Status served = Serve(o, *engine, draft.get(), api, **server);
  return served.ok() ? kExitOk : Fail(served.error());
}

void AddLimits(CLI::App& app, ServeOptions& o) {
  AddInteger(app, "--max-running", o.batch.max_running, {1, 4096},
             "Most sequences computed at once (default 64)");
  AddInteger(app, "--max-waiting", o.batch.max_waiting, {0, 1 << 20},
             "Most sequences in the queue; more are told 429 (default 256)");
  AddBytes(app, "--state-memory", o.state_memory,
           "For the states of running sequences (default: half of --memory, at most 4 GiB)");
  CLI::Option* cache =
      AddBytes(app, "--cache-memory", o.cache_memory,
               "For the prefix cache (default: an eighth of --memory, at most 1 GiB)");
  CLI::Option* spill = app.add_option("--spill-dir", o.batch.spill_dir,
                                      "Keep evicted snapshots in this folder, which has to exist")
                           ->type_name("DIR");
  CLI::Option* states =
      app.add_option("--state-dir", o.state_dir,
                     "Let POST /slots/ID?action=save and restore use files in this folder, which\n"
                     "has to exist (docs/serve.md)")
          ->type_name("DIR");
  AddBytes(app, "--state-dir-limit", o.state_dir_limit, "Most bytes there (default 1 GiB)")
      ->needs(states);
  app.add_flag("--no-prefix-cache", o.no_cache, "Read every prompt from its start")
      ->excludes(cache)
      ->excludes(spill)
      ->excludes(states);
  AddBytes(app, "--spill-memory", o.spill_memory, "Most bytes there (default 1 GiB)")->needs(spill);
  CLI::Option* draft =
      app.add_option("--draft-model", o.draft, "Smaller model of the same vocabulary to guess with")
          ->type_name("DIR");
  app.add_flag("--no-speculation", o.no_speculation, "Never guess several tokens ahead")
      ->excludes(draft);
  AddInteger(app, "--max-connections", o.connections, {1, 65536},
             "Most open connections (default 512)");
  AddBytes(app, "--max-body", o.body_bytes, "Largest body of a request (default 16 MiB)");
  AddInteger(app, "--drain-timeout", o.drain_s, {0, 3600},
             "Seconds that running requests get to finish after SIGTERM (default 30)");
  app.add_option("--drift-reference", o.drift_reference,
                 "Compare with this instead of learning: what GET /alerts/reference gave")
      ->type_name("FILE");
  AddInteger(app, "--sample-every", o.sample_every, {0, 1 << 20},
             "Look into every Nth pass for the model's metrics; 0: never (default 16)");
}

}  // namespace

void AddServe(CLI::App& root, Action& action) {
  auto o = std::make_shared<ServeOptions>();
  CLI::App* app = root.add_subcommand("serve", "Answer HTTP requests: OpenAI API, many users");
  app->footer(std::string(kServeHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  app->add_option("--host", o->http.host, "Address to listen on (default 127.0.0.1)")
      ->type_name("HOST");
  AddInteger(*app, "--port", o->port, {0, 65535}, "Port; 0 takes a free one (default 8080)");
  app->add_option("--api-key", o->key, "Key that callers have to show; others can see it in ps")
      ->check(CheckKey)
      ->type_name("KEY");
  app->add_option("--api-key-file", o->key_file, "File with one key a line")->type_name("FILE");
  app->add_option("--cors", o->api.cors_origin, "Let pages of this origin call (\"*\": of any)")
      ->type_name("ORIGIN")
      ->check([](const std::string& text) {
        const bool bad = std::any_of(text.begin(), text.end(), [](char c) { return c <= ' '; });
        return text.empty() || bad ? std::string("found \"" + text + "\", expected an origin")
                                   : std::string();
      });
  app->add_option("--allowed-host", o->api.allowed_hosts,
                  "Answer requests whose Host is this name too; repeatable (docs/serve.md)")
      ->check(CheckName)
      ->type_name("NAME");
  app->add_option("--model-name", o->name, "What clients call the model (default: its folder's)")
      ->check(CheckName)
      ->type_name("NAME");
  app->add_flag("--strict-model", o->api.strict_model, "Refuse requests that name another model");
  AddLimits(*app, *o);
  app->add_option("--log-level", o->log_level, "debug, info (each request), warn or error")
      ->check(OneOf({"debug", "info", "warn", "error"}))
      ->type_name("LEVEL");
  app->add_flag("--log-prompts", o->api.log_prompts, "Bodies of requests go to the log too (info)");
  AddEngineOptions(*app, o->engine, true);
  app->callback([o, &action] { action = [o] { return Run(*o); }; });
}

}  // namespace k3::app
