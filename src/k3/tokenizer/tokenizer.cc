#include "k3/tokenizer/tokenizer.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "k3/tokenizer/bpe.h"
#include "k3/tokenizer/pre_tokenizer.h"
#include "k3/tokenizer/rank_table.h"
#include "k3/tokenizer/special_tokens.h"

namespace k3 {
namespace {

constexpr const char* kRanksFile = "tiktoken.model";
constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr std::size_t kMaxRanksBytes = std::size_t{256} << 20;
constexpr std::size_t kMaxConfigBytes = std::size_t{64} << 20;

/// The bytes of a regular file; nullopt when there is none of that name.
Result<std::optional<std::string>> ReadFile(const std::string& path, std::size_t limit) {
  struct stat info{};
  if (stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::optional<std::string>();
    return Error{Code::kIo, fmt::format("{}: {}", path, std::strerror(errno))};
  }
  if (!S_ISREG(info.st_mode)) return Error{Code::kIo, fmt::format("{}: not a file", path)};
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (!file) return Error{Code::kIo, fmt::format("{}: {}", path, std::strerror(errno))};
  std::string bytes;
  for (;;) {
    constexpr std::size_t kStep = std::size_t{1} << 20;
    const std::size_t have = bytes.size();
    bytes.resize(have + kStep);
    const std::size_t got = std::fread(bytes.data() + have, 1, kStep, file.get());
    bytes.resize(have + got);
    if (bytes.size() > limit) {
      return Error{Code::kCorrupt, fmt::format("{}: larger than {} bytes", path, limit)};
    }
    if (got < kStep) break;
  }
  if (std::ferror(file.get())) {
    return Error{Code::kIo, fmt::format("{}: {}", path, std::strerror(errno))};
  }
  return std::optional<std::string>(std::move(bytes));
}

}  // namespace

struct Tokenizer::Impl {
  RankTable ranks;
  SpecialTokens special;
  std::unordered_map<std::string_view, TokenId> special_ids;  // keys view special.names

  Impl(RankTable r, SpecialTokens s) : ranks(std::move(r)), special(std::move(s)) {
    for (std::size_t i = 0; i < special.names.size(); ++i) {
      special_ids.emplace(special.names[i], static_cast<TokenId>(ranks.size() + i));
    }
  }

  static Result<std::unique_ptr<const Impl>> Make(std::string_view ranks_text,
                                                  std::string_view config_text,
                                                  std::string_view ranks_where,
                                                  std::string_view config_where) {
    K3_ASSIGN(RankTable ranks, RankTable::Parse(ranks_text, ranks_where));
    K3_ASSIGN(SpecialTokens special, ParseSpecialTokens(config_text, ranks.size(), config_where));
    return std::unique_ptr<const Impl>(new Impl(std::move(ranks), std::move(special)));
  }
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Result<Tokenizer> Tokenizer::Load(const std::string& dir) {
  const std::string ranks_path = dir + "/" + kRanksFile;
  const std::string config_path = dir + "/" + kConfigFile;
  K3_ASSIGN(const auto ranks, ReadFile(ranks_path, kMaxRanksBytes));
  K3_ASSIGN(const auto config, ReadFile(config_path, kMaxConfigBytes));
  if (!ranks.has_value()) {
    return Error{Code::kNotFound,
                 fmt::format("{}: no tokenizer: looked for {} (missing) and {} ({})", dir,
                             kRanksFile, kConfigFile, config.has_value() ? "present" : "missing")};
  }
  if (config.has_value() && config->empty()) {
    return Error{Code::kCorrupt, config_path + ": the file is empty, expected a JSON object"};
  }
  K3_ASSIGN(auto impl, Impl::Make(*ranks, config.value_or(""), ranks_path, config_path));
  return Tokenizer(std::move(impl));
}

Result<Tokenizer> Tokenizer::Parse(std::string_view ranks, std::string_view tokenizer_config,
                                   std::string_view where) {
  K3_ASSIGN(auto impl, Impl::Make(ranks, tokenizer_config, where, where));
  return Tokenizer(std::move(impl));
}

std::vector<TokenId> Tokenizer::Encode(std::string_view text) const {
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 3);
  BpeMerger merger(impl_->ranks);
  const auto on_part = [&](std::string_view part) {
    const char* end = part.data() + part.size();
    for (const char* p = part.data(); p != end;) {
      const char* q = PieceEnd(p, end);
      merger.Encode(std::string_view(p, static_cast<std::size_t>(q - p)), ids);
      p = q;
    }
  };
  ForEachStretch(
      text, [&](std::string_view stretch) { ForEachPart(stretch, on_part); },
      [&](std::string_view byte) { merger.Encode(byte, ids); });
  return ids;
}

std::optional<std::string_view> Tokenizer::Bytes(TokenId id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= vocab_size()) return std::nullopt;
  if (!IsSpecial(id)) return impl_->ranks.Bytes(id);
  return impl_->special.names[static_cast<std::size_t>(id) - n_ranks()];
}

std::string Tokenizer::Decode(const std::vector<TokenId>& ids, bool with_special) const {
  std::string text;
  for (const TokenId id : ids) {
    if (IsSpecial(id) && !with_special) continue;
    if (const auto bytes = Bytes(id)) text.append(*bytes);
  }
  return text;
}

std::optional<TokenId> Tokenizer::SpecialId(std::string_view name) const {
  const auto it = impl_->special_ids.find(name);
  if (it == impl_->special_ids.end()) return std::nullopt;
  return it->second;
}

bool Tokenizer::IsSpecial(TokenId id) const {
  return id >= 0 && static_cast<std::size_t>(id) >= n_ranks() &&
         static_cast<std::size_t>(id) < vocab_size();
}

std::size_t Tokenizer::n_ranks() const { return impl_->ranks.size(); }
std::size_t Tokenizer::vocab_size() const { return n_ranks() + kSpecialTokens; }
bool Tokenizer::add_bos() const { return impl_->special.add_bos; }

}  // namespace k3
