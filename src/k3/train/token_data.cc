#include "k3/train/token_data.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "k3/base/rng.h"
#include "k3/io/atomic_file.h"
#include "k3/io/json.h"

namespace k3 {
namespace {

constexpr char kMagic[9] = "K3TOKEN1";
constexpr std::uint64_t kHeader = 40;

}  // namespace

Result<TokenFile> TokenFile::Open(const std::string& path) {
  TokenFile f;
  K3_ASSIGN(f.file_, MappedFile::Open(path));
  auto corrupt = [&](std::string_view what) {
    return Error{Code::kCorrupt, fmt::format("{}: {}", path, what)};
  };
  const std::uint64_t size = f.file_.size();
  if (size < kHeader || std::memcmp(f.file_.data(), kMagic, 8) != 0) {
    return corrupt("no token file (it does not begin with K3TOKEN1)");
  }
  std::uint64_t head[4];
  std::memcpy(head, f.file_.data() + 8, sizeof head);
  const auto [n, docs, vocab, text_bytes] = head;
  // Bounds first: products of hostile counts must not wrap.
  if (n > size / 4 || docs >= size / 8 || kHeader + 8 * (docs + 1) + 4 * n != size) {
    return corrupt(
        fmt::format("{} tokens and {} documents do not fit its {} bytes", n, docs, size));
  }
  if (vocab == 0 || vocab > (std::uint64_t{1} << 31)) return corrupt("impossible vocabulary");
  if (text_bytes > std::uint64_t{1} << 60) return corrupt("impossible number of text bytes");
  f.starts_ = {reinterpret_cast<const std::uint64_t*>(f.file_.data() + kHeader), docs + 1};
  f.tokens_ = {reinterpret_cast<const TokenId*>(f.file_.data() + kHeader + 8 * (docs + 1)), n};
  f.vocab_ = static_cast<std::int64_t>(vocab);
  f.text_bytes_ = static_cast<std::int64_t>(text_bytes);
  if (f.starts_.front() != 0 || f.starts_.back() != n ||
      !std::is_sorted(f.starts_.begin(), f.starts_.end())) {
    return corrupt("its document index is not in order");
  }
  for (const TokenId t : f.tokens_) {
    if (t < 0 || t >= f.vocab_) {
      return corrupt(fmt::format("token {}: expected 0..{}", t, f.vocab_ - 1));
    }
  }
  return f;
}

void TokenFileBuilder::AddDocument(std::span<const TokenId> ids, TokenId end,
                                   std::size_t text_bytes) {
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ids_.push_back(end);
  starts_.push_back(ids_.size());
  text_bytes_ += text_bytes;
}

Status TokenFileBuilder::Write(const std::string& path, std::int64_t vocab) const {
  K3_ASSIGN(AtomicFile file, AtomicFile::Create(path));
  const std::uint64_t head[4] = {ids_.size(), starts_.size() - 1, static_cast<std::uint64_t>(vocab),
                                 text_bytes_};
  K3_TRY(file.Write(kMagic, 8));
  K3_TRY(file.Write(head, sizeof head));
  K3_TRY(file.Write(starts_.data(), 8 * starts_.size()));
  K3_TRY(file.Write(ids_.data(), 4 * ids_.size()));
  return file.Commit();
}

namespace {

Result<std::vector<std::string>> JsonDocuments(std::string_view text, std::string_view key,
                                               std::string_view where) {
  std::vector<std::string> documents;
  std::int64_t number = 0;
  for (std::size_t at = 0; at < text.size(); ++number) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = fmt::format("{}: line {}", where, number + 1);
    K3_ASSIGN(const nlohmann::json j, ParseJson(line, place));
    const auto it = j.is_object() ? j.find(key) : j.end();
    if (it == j.end() || !it->is_string()) {
      return Error{Code::kCorrupt, fmt::format("{}: no text under \"{}\"", place, key)};
    }
    if (!it->get_ref<const std::string&>().empty()) documents.push_back(it->get<std::string>());
  }
  return documents;
}

}  // namespace

Result<std::vector<std::string>> SplitDocuments(std::string_view text, DocumentSplit split,
                                                std::string_view key, std::string_view where) {
  if (split == DocumentSplit::kJsonLines) return JsonDocuments(text, key, where);
  const std::string_view mark = split == DocumentSplit::kNul ? std::string_view("\0", 1) : "\n\n";
  std::vector<std::string> documents;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(mark, at), text.size());
    const std::string_view document = text.substr(at, end - at);
    if (document.find_first_not_of(" \t\r\n") != std::string_view::npos) {
      documents.emplace_back(document);
    }
    at = end + mark.size();
  }
  return documents;
}

Result<RowReader> RowReader::Create(std::span<const TokenId> tokens, std::int64_t sequence,
                                    std::uint64_t seed, std::string_view where) {
  const auto n = static_cast<std::int64_t>(tokens.size());
  if (sequence < 1 || n < sequence + 1) {
    return Error{
        Code::kInvalidArgument,
        fmt::format("{}: {} tokens, expected at least one row of {} + 1", where, n, sequence)};
  }
  RowReader r;
  r.tokens_ = tokens, r.sequence_ = sequence, r.seed_ = seed;
  r.order_.resize(static_cast<std::size_t>((n - 1) / sequence));
  r.Shuffle();
  return r;
}

void RowReader::Shuffle() {
  std::iota(order_.begin(), order_.end(), 0);
  Rng rng(seed_ * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(cursor_.epoch));
  for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[rng.Next() % i]);
}

std::span<const TokenId> RowReader::Next() {
  if (cursor_.row == rows()) {
    cursor_ = {cursor_.epoch + 1, 0};
    Shuffle();
  }
  const std::int64_t row = order_[static_cast<std::size_t>(cursor_.row++)];
  return tokens_.subspan(static_cast<std::size_t>(row * sequence_),
                         static_cast<std::size_t>(sequence_ + 1));
}

Status RowReader::Seek(DataCursor cursor) {
  if (cursor.epoch < 0 || cursor.row < 0 || cursor.row > rows()) {
    return Error{Code::kCorrupt,
                 fmt::format("data cursor: row {} of epoch {}, but the data has {} rows",
                             cursor.row, cursor.epoch, rows())};
  }
  cursor_ = cursor;
  Shuffle();
  return {};
}

std::vector<std::span<const TokenId>> SplitAtDocuments(std::span<const TokenId> row,
                                                       std::span<const TokenId> tokens,
                                                       std::span<const std::uint64_t> starts) {
  const auto begin = static_cast<std::uint64_t>(row.data() - tokens.data());
  const std::uint64_t end = begin + row.size();
  std::vector<std::span<const TokenId>> parts;
  auto next = std::upper_bound(starts.begin(), starts.end(), begin);
  for (std::uint64_t at = begin; at < end; ++next) {
    const std::uint64_t stop = next == starts.end() ? end : std::min(*next, end);
    if (stop - at > 1) parts.push_back(row.subspan(at - begin, stop - at));
    at = stop;
  }
  return parts;
}

}  // namespace k3
