// The TOML file of a training run.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "k3/io/mapped_file.h"
#include "k3/train/trainer.h"

namespace k3 {
namespace {

/// The value as TOML, shortened, on one line.
std::string Shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& n) { out << n; });
  std::string text = out.str().substr(0, 40);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return text;
}

/// Insertions, removals and changes that make `b` of `a`.
std::size_t Edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

/// ", did you mean X?" when one of the words is near.
std::string Suggestion(std::string_view key, const std::set<std::string>& words) {
  std::size_t least = 3;
  std::string best;
  for (const std::string& word : words) {
    if (key.size() > 64) break;
    if (const std::size_t n = Edits(key, word); n < least) least = n, best = word;
  }
  return best.empty() ? "" : fmt::format(", did you mean {}?", best);
}

/// Reads keys of one table, remembers the first error and which keys were asked for.
class Section {
 public:
  Section(const toml::table& root, std::string name, std::string where)
      : name_(std::move(name)), where_(std::move(where)) {
    const auto* node = root.get(name_);
    table_ = node ? node->as_table() : nullptr;
    if (node && !table_) Refuse("", "a table");
  }

  void Text(const char* key, std::string& value) {
    if (const auto* node = Get(key)) {
      const auto v = node->value_exact<std::string>();
      v && v->find('\0') == v->npos ? void(value = *v) : Refuse(key, "a string without NUL");
    }
  }
  void Flag(const char* key, bool& value) {
    if (const auto* node = Get(key)) {
      const auto v = node->value_exact<bool>();
      v ? void(value = *v) : Refuse(key, "true or false");
    }
  }
  void Integer(const char* key, std::int64_t& value, std::int64_t low, std::int64_t high) {
    if (const auto* node = Get(key)) {
      const auto v = node->value_exact<std::int64_t>();
      if (!v || *v < low || *v > high) {
        return Refuse(key, fmt::format("an integer from {} to {}", low, high));
      }
      value = *v;
    }
  }
  void Real(const char* key, double& value, double low, double high) {
    if (const auto* node = Get(key)) {
      const auto v = node->is_number() ? node->value<double>() : std::nullopt;
      if (!v || !(*v >= low && *v <= high)) {
        return Refuse(key, fmt::format("a number from {} to {}", low, high));
      }
      value = *v;
    }
  }
  template <class E>
  void Word(const char* key, E& value, std::initializer_list<std::pair<const char*, E>> words) {
    const auto* node = Get(key);
    if (node == nullptr) return;
    std::string all;
    for (const auto& [word, meaning] : words) {
      if (node->value_exact<std::string>() == word) return void(value = meaning);
      all += all.empty() ? word : fmt::format(", {}", word);
    }
    Refuse(key, "one of " + all);
  }

  /// The first problem, or a key nobody asked for.
  Status Done() const {
    if (!status_.ok() || table_ == nullptr) return status_;
    for (const auto& [key, node] : *table_) {
      if (!asked_.contains(std::string(key.str()))) {
        return Error{Code::kInvalidArgument, fmt::format("{}: unknown key {}.{}{}", where_, name_,
                                                         key.str(), Suggestion(key.str(), asked_))};
      }
    }
    return {};
  }

 private:
  const toml::node* Get(const char* key) {
    asked_.insert(key);
    return table_ ? table_->get(key) : nullptr;
  }
  void Refuse(const std::string& key, const std::string& expected) {
    if (!status_.ok()) return;
    std::string found = "no table";
    if (!key.empty()) found = Shown(*table_->get(key));
    status_ = Error{Code::kInvalidArgument,
                    fmt::format("{}: bad value {}{}{}, expected {}, found {}", where_, name_,
                                key.empty() ? "" : ".", key, expected, found)};
  }

  std::string name_, where_;
  const toml::table* table_ = nullptr;
  std::set<std::string> asked_;
  Status status_;
};

constexpr std::int64_t kMany = std::int64_t{1} << 40;

Status ReadRun(Section train, TrainConfig& c) {
  std::int64_t seed = 0;
  train.Text("out", c.out);
  train.Integer("seed", seed, 0, std::numeric_limits<std::int64_t>::max());
  train.Integer("steps", c.steps, 1, kMany);
  train.Integer("batch", c.batch, 1, 65536);
  train.Integer("sequence", c.sequence, 1, 1 << 20);
  train.Integer("accumulate", c.accumulate, 1, 65536);
  train.Integer("threads", c.threads, 0, 1024);
  train.Real("clip", c.clip, 0, 1e9);
  train.Integer("log_every", c.log_every, 1, kMany);
  train.Integer("eval_every", c.eval_every, 0, kMany);
  train.Integer("eval_rows", c.eval_rows, 1, kMany);
  train.Integer("checkpoint_every", c.checkpoint_every, 1, kMany);
  train.Integer("keep", c.keep, 1, 1000);
  train.Integer("probe_every", c.probe_every, 0, kMany);
  train.Integer("sample_every", c.sample_every, 0, kMany);
  train.Text("sample_prompt", c.sample_prompt);
  train.Flag("pack_experts", c.pack_experts);
  train.Word("math", c.fast, {{"exact", false}, {"fast", true}});
  train.Word("compute", c.bf16, {{"f32", false}, {"bf16", true}});
  train.Integer("plant_noise", c.plant_noise, 0, 1 << 20);
  train.Real("mxfp4_from", c.mxfp4_from, 0, 1);
  c.seed = static_cast<std::uint64_t>(seed);
  return train.Done();
}

Status ReadOptimizer(Section o, TrainConfig& c) {
  o.Real("lr", c.lr, 0, 1e9);
  o.Real("beta1", c.adamw.b1, 0, 0.999999);
  o.Real("beta2", c.adamw.b2, 0, 0.999999);
  o.Real("eps", c.adamw.eps, 1e-30, 1);
  o.Real("decay", c.adamw.decay, 0, 10);
  o.Flag("muon", c.muon.enabled);
  o.Flag("muon_router", c.muon.router);
  o.Real("muon_lr", c.muon.lr, 0, 1e9);
  o.Real("muon_momentum", c.muon.momentum, 0, 0.999999);
  o.Real("muon_decay", c.muon.decay, 0, 10);
  return o.Done();
}

Status ReadSchedule(Section s, TrainConfig& c) {
  s.Word("kind", c.schedule.kind,
         {{"constant", ScheduleKind::kConstant},
          {"cosine", ScheduleKind::kCosine},
          {"wsd", ScheduleKind::kWarmupStableDecay}});
  c.schedule.total = c.steps;
  c.schedule.warmup = std::min(c.steps, (c.steps + 99) / 100);
  s.Integer("warmup", c.schedule.warmup, 0, kMany);
  s.Integer("decay", c.schedule.decay, 0, kMany);
  s.Real("floor", c.schedule.floor, 0, 1);
  return s.Done();
}

Status ReadBalance(Section b, TrainConfig& c) {
  b.Word("method", c.balance.method,
         {{"none", BalanceMethod::kNone},
          {"quantile", BalanceMethod::kQuantile},
          {"sliding_quantile", BalanceMethod::kSlidingQuantile},
          {"sign", BalanceMethod::kSign},
          {"aux_loss", BalanceMethod::kAuxLoss}});
  b.Word("estimator", c.balance.exact, {{"histogram", false}, {"exact", true}});
  b.Integer("bins", c.balance.bins, 2, 1'000'000);
  b.Real("rate", c.balance.rate, 0, 1);
  b.Real("decay", c.balance.decay, 0, 1);
  b.Real("decay_end", c.balance.decay_end, 0, 1);
  b.Real("capacity", c.balance.capacity, 0, 16);
  b.Real("capacity_end", c.balance.capacity_end, 0, 16);
  b.Integer("window", c.balance.window, 1, 1000);
  b.Flag("within_batch", c.balance.within_batch);
  b.Word("sync", c.balance.local, {{"pooled", false}, {"local", true}});
  b.Real("step", c.balance.step, 0, 1);
  b.Real("weight", c.balance.weight, 0, 100);
  return b.Done();
}

Status ReadDistill(Section d, TrainConfig& c) {
  d.Text("teacher", c.distill.teacher);
  d.Real("weight", c.distill.weight, 0, 1);
  d.Real("temperature", c.distill.temperature, 0.01, 100);
  return d.Done();
}

}  // namespace

Result<TrainConfig> ReadTrainConfig(const std::string& path) {
  K3_ASSIGN(std::string text, ReadTextFile(path, std::size_t{1} << 20));
  return ParseTrainConfig(std::move(text), path);
}

Result<TrainConfig> ParseTrainConfig(std::string text, const std::string& path) {
  TrainConfig c;
  c.text = std::move(text);
  const toml::parse_result parsed = toml::parse(c.text);
  if (!parsed) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: line {}: {}", path, parsed.error().source().begin.line,
                             parsed.error().description())};
  }
  const toml::table& root = parsed.table();
  for (const auto& [key, node] : root) {
    static const std::set<std::string> kSections{"model",    "data",    "train",  "optimizer",
                                                 "schedule", "balance", "distill"};
    if (!kSections.contains(std::string(key.str()))) {
      return Error{Code::kInvalidArgument, fmt::format("{}: unknown key {}{}", path, key.str(),
                                                       Suggestion(key.str(), kSections))};
    }
  }
  Section model(root, "model", path), data(root, "data", path);
  model.Text("config", c.model_config);
  model.Text("init_from", c.init_from);
  model.Real("init_std", c.init_std, 1e-9, 10);
  data.Text("dir", c.data);
  data.Flag("across_documents", c.across_documents);
  K3_TRY(model.Done());
  K3_TRY(data.Done());
  K3_TRY(ReadRun(Section(root, "train", path), c));
  K3_TRY(ReadOptimizer(Section(root, "optimizer", path), c));
  K3_TRY(ReadSchedule(Section(root, "schedule", path), c));
  K3_TRY(ReadBalance(Section(root, "balance", path), c));
  K3_TRY(ReadDistill(Section(root, "distill", path), c));
  auto missing = [&](const char* key) {
    return Error{Code::kInvalidArgument, fmt::format("{}: missing key {}", path, key)};
  };
  if (c.model_config.empty() == c.init_from.empty()) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: expected either model.config or model.init_from, found {}", path,
                             c.init_from.empty() ? "neither" : "both")};
  }
  if (c.data.empty()) return missing("data.dir");
  if (c.out.empty()) return missing("train.out");
  if (c.steps == 0) return missing("train.steps");
  if (root.contains("distill") && c.distill.teacher.empty()) return missing("distill.teacher");
  const std::filesystem::path base = std::filesystem::path(path).parent_path();
  for (std::string* p : {&c.model_config, &c.init_from, &c.data, &c.out, &c.distill.teacher}) {
    if (!p->empty()) *p = (base / *p).string();
  }
  return c;
}

}  // namespace k3
