#include "engine.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <limits>
#include <system_error>

#include "exit_codes.h"
#include "k3/base/memory.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/model/memory_plan.h"
#include "options.h"
#include "output.h"

namespace k3::app {
namespace {

constexpr std::int64_t kMaxThreads = 1024;

std::string ProgramFolder() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  if (n <= 0 || static_cast<std::size_t>(n) == sizeof path) return ".";
  const std::string_view program(path, static_cast<std::size_t>(n));
  return std::string(program.substr(0, program.rfind('/')));
}

bool Exists(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0;
}

Residence ResidenceOf(const EngineOptions& o) {
  if (o.weights == "map" || (o.weights == "auto" && o.brief)) return Residence::kMapped;
  return o.weights == "copy" ? Residence::kCopied : Residence::kAuto;
}

Status LoadParts(const EngineOptions& options, Engine& engine) {
  if (const auto table = cpu::ChooseTable(); !table.ok()) return table.error();
  K3_ASSIGN(engine.dir, ResolveModel(options.model));
  const auto start = std::chrono::steady_clock::now();
  K3_ASSIGN(engine.model, Model::Load(engine.dir, ResidenceOf(options)));
  auto tokenizer = Tokenizer::Load(engine.dir);
  if (!tokenizer.ok()) return tokenizer.error();
  engine.tokenizer.emplace(std::move(tokenizer).value());
  engine.load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {};
}

}  // namespace

void AddModel(CLI::App& app, std::string& model) {
  app.add_option(
         "MODEL", model,
         "Model folder (config.json, safetensors, tiktoken.model); without it the demo model")
      ->type_name("")
      ->check([](const std::string& text) {
        return text.empty() ? std::string("found \"\", expected a folder") : std::string();
      });
}

void AddEngineOptions(CLI::App& app, EngineOptions& options, bool with_context) {
  app.add_option(
         "--math", options.math,
         "exact: the same bits for every batch, split and thread count; fast: quicker, on a "
         "fixed grid (default exact)")
      ->check(OneOf({"exact", "fast"}))
      ->type_name("MODE");
  app.add_option(
         "--weights", options.weights,
         "map: read weights in the files, which other programs share; copy: in memory, quicker for "
         "single tokens; auto: copy when twice their size is free, unless the run is short "
         "(default "
         "auto)")
      ->check(OneOf({"auto", "map", "copy"}))
      ->type_name("WHERE");
  AddInteger(app, "--threads", options.threads, {0, kMaxThreads},
             "Threads to compute with; 0 means all usable processors (default 0)");
  if (!with_context) return;
  AddInteger(app, "--ctx", options.ctx, {1, std::numeric_limits<std::int32_t>::max()},
             "Most tokens of prompt and answer together (default: the model's limit)");
  AddInteger(app, "--prefill-chunk", options.prefill_chunk, {1, 1 << 20},
             "Prompt tokens of one pass (default 512); fast mode rounds up to its grid");
  AddMemory(app, options.memory);
}

Result<std::string> FindDemoModel() {
  if (const char* from_environment = std::getenv("K3_MODEL"); from_environment != nullptr) {
    if (*from_environment != '\0') return std::string(from_environment);
  }
  const std::string here = ProgramFolder();
  const std::string places[] = {here + "/../../models/k3-books-27m",
                                here + "/../share/k3/models/k3-books-27m"};
  for (const std::string& place : places) {
    if (!Exists(place + "/config.json")) continue;
    char* resolved = realpath(place.c_str(), nullptr);
    std::string dir = resolved != nullptr ? resolved : place;
    std::free(resolved);
    return dir;
  }
  return Error{
      Code::kNotFound,
      fmt::format("no MODEL given and no demo model found: K3_MODEL is not set, nothing in "
                  "{} or {}",
                  places[0], places[1])};
}

Result<std::string> ResolveModel(const std::string& model) {
  if (!model.empty()) return model;
  return FindDemoModel();
}

std::unique_ptr<Engine> LoadEngine(const EngineOptions& options, int& exit_code) {
  auto engine = std::make_unique<Engine>();
  if (const Status s = LoadParts(options, *engine); !s.ok()) {
    exit_code = Fail(s.error());
    return nullptr;
  }
  const ModelConfig& config = engine->model->config();
  for (const std::string& warning : engine->model->warnings()) Warn(warning);
  if (const std::string file = engine->dir + "/tokenizer_config.json"; !Exists(file)) {
    Warn(file + " is missing: control tokens have no names, and no BOS goes in front of text");
  }
  if (options.ctx > config.max_positions) {
    Complain(fmt::format("--ctx: found {}, expected at most {}, the limit of {}", options.ctx,
                         config.max_positions, engine->dir));
    exit_code = kExitUsage;
    return nullptr;
  }
  engine->context = options.ctx > 0 ? options.ctx : config.max_positions;
  engine->bos = config.bos;
  if (!engine->bos.has_value()) engine->bos = engine->tokenizer->SpecialId("[BOS]");
  const int threads = options.threads > 0 ? static_cast<int>(options.threads) : UsableCpus();
  try {
    engine->exec = std::make_unique<Exec>(
        threads, options.math == "fast" ? MathMode::kFast : MathMode::kExact);
  } catch (const std::system_error& error) {
    Complain(
        fmt::format("--threads: cannot start {} threads: {}", threads, error.code().message()));
    exit_code = kExitResource;
    return nullptr;
  }
  const MemoryLimit limit = UsableMemory();
  engine->memory = options.memory > 0 ? options.memory : limit.bytes;
  engine->memory_source = options.memory > 0 ? "--memory" : limit.source;
  if (options.ctx > 0) {  // a context that was asked for must fit whole
    if (const Status s = CheckMemory(*engine, options, options.ctx, 1); !s.ok()) {
      exit_code = Fail(s.error());
      return nullptr;
    }
  }
  engine->runner = std::make_unique<ModelRunner>(*engine->model, *engine->exec);
  return engine;
}

Status CheckMemory(const Engine& engine, const EngineOptions& options, std::int64_t tokens,
                   std::int64_t batch) {
  PlanOptions plan;
  plan.context = tokens;
  plan.batch = batch;
  plan.prefill_chunk = options.prefill_chunk;
  plan.threads = engine.exec->pool.size();
  plan.math = engine.exec->math;
  const std::int64_t needed = HeapBytesToRun(engine.model->config(), plan);
  if (engine.memory <= 0 || needed <= engine.memory) return {};
  return Error{Code::kResource,
               fmt::format("a context of {} tokens needs {} bytes of memory besides the weights, "
                           "{} are there ({}); k3 plan shows what would fit",
                           tokens, needed, engine.memory, engine.memory_source)};
}

Status CheckIds(const std::vector<TokenId>& ids, std::int64_t vocab) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      return Error{Code::kInvalidArgument,
                   fmt::format("token id {}: found {}, expected less than the vocabulary of {}",
                               i + 1, ids[i], vocab)};
    }
  }
  return {};
}

}  // namespace k3::app
