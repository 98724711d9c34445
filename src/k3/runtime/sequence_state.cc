#include "k3/runtime/sequence_state.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "k3/io/mapped_file.h"

namespace k3 {
namespace {

static_assert(std::endian::native == std::endian::little, "the state file is little-endian");

constexpr std::string_view kMagic("K3STATE\0", 8);
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 56;
constexpr std::size_t kChecksumBytes = 8;
constexpr std::size_t kCountBytes = 12;

template <class T>
void Put(std::string& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out.append(raw, sizeof(T));
}

/// The caller has checked that the bytes are there.
template <class T>
T Take(std::string_view& in) {
  T value;
  std::memcpy(&value, in.data(), sizeof(T));
  in.remove_prefix(sizeof(T));
  return value;
}

struct Header {
  std::uint64_t fingerprint, rng, n_tokens, n_counts, model_bytes;
};

/// Checks everything that does not depend on the model: size, version, checksum.
Result<Header> ReadHeader(std::string_view bytes, std::string_view where) {
  if (bytes.size() < kMagic.size() || bytes.substr(0, kMagic.size()) != kMagic) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: not a state file (it does not start with K3STATE)", where)};
  }
  if (bytes.size() < kHeaderBytes + kChecksumBytes) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: state file is cut: {} bytes, expected at least {}", where,
                             bytes.size(), kHeaderBytes + kChecksumBytes)};
  }
  std::string_view in = bytes.substr(kMagic.size());
  const auto version = Take<std::uint32_t>(in);
  if (version != kVersion) {
    return Error{Code::kUnsupported, fmt::format("{}: state file has version {}, expected {}",
                                                 where, version, kVersion)};
  }
  const auto reserved = Take<std::uint32_t>(in);
  Header h{};
  h.fingerprint = Take<std::uint64_t>(in);
  h.rng = Take<std::uint64_t>(in);
  h.n_tokens = Take<std::uint64_t>(in);
  h.n_counts = Take<std::uint64_t>(in);
  h.model_bytes = Take<std::uint64_t>(in);
  // Each part is compared with what is left, so no sum can overflow.
  std::uint64_t left = bytes.size() - kHeaderBytes - kChecksumBytes;
  const auto claim = [&left](std::uint64_t n, std::uint64_t size) {
    if (n > left / size) return false;
    left -= n * size;
    return true;
  };
  const bool fits = claim(h.n_tokens, sizeof(TokenId)) && claim(h.n_counts, kCountBytes) &&
                    claim(h.model_bytes, 1);
  if (!fits || left != 0 || reserved != 0) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: state file of {} bytes does not hold what its header says ({} "
                             "tokens, {} counts, {} bytes of model state)",
                             where, bytes.size(), h.n_tokens, h.n_counts, h.model_bytes)};
  }
  const std::size_t body = bytes.size() - kChecksumBytes;
  std::string_view tail = bytes.substr(body);
  const auto stored = Take<std::uint64_t>(tail);
  const std::uint64_t computed = XXH3_64bits(bytes.data(), body);
  if (stored != computed) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: state file is damaged: checksum {:016x}, expected {:016x}", where,
                             computed, stored)};
  }
  return h;
}

Status CheckToken(std::int64_t id, std::int64_t vocab, std::string_view where) {
  if (id >= 0 && id < vocab) return {};
  return Error{Code::kCorrupt,
               fmt::format("{}: token id {} is outside the vocabulary of {}", where, id, vocab)};
}

}  // namespace

SequenceState NewSequence(const TokenModel& model, std::uint64_t seed) {
  return SequenceState{model.NewState(), Sampler(seed), {}};
}

void AppendPrompt(SequenceState& state, std::span<const TokenId> tokens) {
  state.tokens.insert(state.tokens.end(), tokens.begin(), tokens.end());
  state.sampler.AcceptPrompt(tokens);
}

std::string SerializeState(const SequenceState& state, std::uint64_t fingerprint) {
  const std::string model = state.model.Serialize();
  const auto& counts = state.sampler.counts();
  std::string out;
  out.reserve(kHeaderBytes + state.tokens.size() * sizeof(TokenId) + counts.size() * kCountBytes +
              model.size() + kChecksumBytes);
  out += kMagic;
  Put(out, kVersion);
  Put(out, std::uint32_t{0});
  Put(out, fingerprint);
  Put(out, state.sampler.rng_state());
  Put(out, std::uint64_t{state.tokens.size()});
  Put(out, std::uint64_t{counts.size()});
  Put(out, std::uint64_t{model.size()});
  for (const TokenId t : state.tokens) Put(out, t);
  for (const auto& [id, count] : counts) {
    Put(out, id);
    Put(out, count.prompt);
    Put(out, count.generated);
  }
  out += model;
  Put(out, std::uint64_t{XXH3_64bits(out.data(), out.size())});
  return out;
}

Result<SequenceState> ParseState(std::string_view bytes, std::string_view where,
                                 const StateExpectation& expected, ModelState empty) {
  K3_ASSIGN(const Header h, ReadHeader(bytes, where));
  if (h.fingerprint != expected.fingerprint) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: state belongs to another model: fingerprint {:016x}, expected "
                             "{:016x}",
                             where, h.fingerprint, expected.fingerprint)};
  }
  SequenceState state;
  state.model = std::move(empty);
  state.sampler.set_rng_state(h.rng);
  std::string_view in = bytes.substr(kHeaderBytes);
  state.tokens.reserve(h.n_tokens);
  for (std::uint64_t i = 0; i < h.n_tokens; ++i) {
    const auto id = Take<TokenId>(in);
    K3_TRY(CheckToken(id, expected.vocab, where));
    state.tokens.push_back(id);
  }
  std::map<TokenId, Sampler::Counts> counts;
  for (std::uint64_t i = 0; i < h.n_counts; ++i) {
    const auto id = Take<TokenId>(in);
    K3_TRY(CheckToken(id, expected.vocab, where));
    if (!counts.empty() && id <= counts.rbegin()->first) {
      return Error{Code::kCorrupt, fmt::format("{}: counted token {} is out of order", where, id)};
    }
    Sampler::Counts c;
    c.prompt = Take<std::uint32_t>(in);
    c.generated = Take<std::uint32_t>(in);
    counts.emplace_hint(counts.end(), id, c);
  }
  state.sampler.set_counts(std::move(counts));
  if (Status s = state.model.Deserialize(in.substr(0, h.model_bytes)); !s.ok()) {
    return Error{s.error().code, fmt::format("{}: {}", where, s.message())};
  }
  const std::int64_t position = state.model.position();
  if (position < 0 || static_cast<std::uint64_t>(position) > h.n_tokens) {
    return Error{Code::kCorrupt, fmt::format("{}: state is at position {} of {} tokens", where,
                                             position, h.n_tokens)};
  }
  return state;
}

Status SaveState(const std::string& path, const SequenceState& state, const TokenModel& model) {
  return WriteFileAtomically(path, SerializeState(state, model.fingerprint()));
}

Result<SequenceState> LoadState(const std::string& path, const TokenModel& model) {
  K3_ASSIGN(const MappedFile file, MappedFile::Open(path));
  return ParseState(file.text(), path, {model.fingerprint(), model.vocab()}, model.NewState());
}

}  // namespace k3
