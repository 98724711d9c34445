// Token files with a document index, and the order in which training reads them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/io/mapped_file.h"

namespace k3 {

/// A file of token ids, documents one after the other, each ended by the end-of-text token.
/// Little-endian: "K3TOKEN1", u64 tokens, u64 documents, u64 vocabulary, u64 text bytes, then
/// documents + 1 starts (u64), then the ids (i32). Everything is checked when it is opened.
class TokenFile {
 public:
  static Result<TokenFile> Open(const std::string& path);

  std::span<const TokenId> tokens() const { return tokens_; }
  std::span<const std::uint64_t> starts() const { return starts_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(starts_.size()) - 1; }
  std::int64_t vocab() const { return vocab_; }
  std::int64_t text_bytes() const { return text_bytes_; }
  const std::string& path() const { return file_.path(); }

 private:
  MappedFile file_;
  std::span<const TokenId> tokens_;
  std::span<const std::uint64_t> starts_;
  std::int64_t vocab_ = 0, text_bytes_ = 0;
};

/// What TokenFile reads, built in memory.
class TokenFileBuilder {
 public:
  void AddDocument(std::span<const TokenId> ids, TokenId end, std::size_t text_bytes);
  std::int64_t documents() const { return static_cast<std::int64_t>(starts_.size()) - 1; }
  std::int64_t tokens() const { return static_cast<std::int64_t>(ids_.size()); }
  Status Write(const std::string& path, std::int64_t vocab) const;

 private:
  std::vector<std::uint64_t> starts_{0};
  std::vector<TokenId> ids_;
  std::uint64_t text_bytes_ = 0;
};

enum class DocumentSplit : std::uint8_t { kNul, kBlankLine, kJsonLines };

/// The documents of a text; empty ones are left out. kJsonLines takes the string under `key` of
/// every line and refuses lines without one.
Result<std::vector<std::string>> SplitDocuments(std::string_view text, DocumentSplit split,
                                                std::string_view key, std::string_view where);

/// The parts of `row`, a stretch of `tokens`, that lie in one document each; documents start at
/// `starts` (sorted). Parts of a single token, which predict nothing, are left out.
std::vector<std::span<const TokenId>> SplitAtDocuments(std::span<const TokenId> row,
                                                       std::span<const TokenId> tokens,
                                                       std::span<const std::uint64_t> starts);

/// Where training stands in its data.
struct DataCursor {
  std::int64_t epoch = 0, row = 0;
};

/// Cuts a token stream into rows of `sequence` + 1 tokens (the last one is only a target) and reads
/// them in an order shuffled anew every epoch. The order is a function of seed, epoch and data
/// alone.
class RowReader {
 public:
  static Result<RowReader> Create(std::span<const TokenId> tokens, std::int64_t sequence,
                                  std::uint64_t seed, std::string_view where);
  std::span<const TokenId> Next();
  std::int64_t rows() const { return static_cast<std::int64_t>(order_.size()); }
  DataCursor cursor() const { return cursor_; }
  Status Seek(DataCursor cursor);

 private:
  void Shuffle();

  std::span<const TokenId> tokens_;
  std::int64_t sequence_ = 0;
  std::uint64_t seed_ = 0;
  DataCursor cursor_;
  std::vector<std::int64_t> order_;
};

}  // namespace k3
