// States after the beginnings of texts, kept so that they need not be read again.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/model/model_state.h"
#include "k3/runtime/engine_stats.h"
#include "k3/runtime/snapshot_file.h"
#include "k3/runtime/token_model.h"
#include "k3/runtime/token_tree.h"

namespace k3 {

struct CacheOptions {
  std::int64_t bytes = 0;
  std::string spill_dir;  // empty: what is evicted is lost
  std::int64_t spill_bytes = 0;
};

struct CacheMatch {
  std::int64_t position = 0;  // tokens that need not be read; 0: none, see `reason`
  ModelState state;
  std::vector<float> logits;  // set when all tokens matched and their scores were wanted
  std::int64_t matched = 0;   // tokens that some known text begins with, snapshot or not
  CacheMiss reason = CacheMiss::kNothing;  // of a position of 0
  bool spilled = false;                    // read from the disk
};

/// A radix tree over tokens whose nodes carry snapshots. Belongs to one model and one arithmetic:
/// fingerprint and mode are in the names and headers of spilled files, and others are not read.
///
/// The bytes count each MLA page once however many snapshots share it, pages shared with running
/// sequences included, and never exceed the budget. What goes first is what costs the least to read
/// again for its size, and was not used for long (GreedyDual: the worth of a snapshot is the tokens
/// from the next one above it over its bytes, on top of the worth of what was evicted before its
/// last use). A hit is a copy, so nothing in use can be evicted.
///
/// With a folder, evicted snapshots become files there, with a checksum, and are found again after
/// a restart. A file that is damaged, cut or missing is a miss, is counted and deleted. Not
/// thread-safe.
class PrefixCache {
 public:
  /// Reads the folder, if one is given; it must exist. `model` outlives the cache.
  static Result<std::unique_ptr<PrefixCache>> Create(const TokenModel& model, CacheOptions options);

  /// The deepest snapshot along `tokens`. One at the very end counts only if it has scores when
  /// `need_logits` is set. Counts nothing; the engine counts hits and misses once a request.
  CacheMatch Find(std::span<const TokenId> tokens, bool need_logits);
  /// The position Find would give, without copying, and without looking at files.
  std::int64_t Peek(std::span<const TokenId> tokens, bool need_logits) const;

  /// Copies of the snapshots along `tokens`, the deepest first: at most `n`, and after the first as
  /// long as all together take at most `bytes` (a shared page counts for each, as in a file). Those
  /// that cannot be read from the disk are left out.
  std::vector<SavedSnapshot> Along(std::span<const TokenId> tokens, std::size_t n,
                                   std::int64_t bytes);

  /// Keeps a copy of `snapshot`, whose state is after all `tokens`. One that is there already
  /// stays, and gains the scores. Dropped when it is larger than the budget.
  void Insert(std::span<const TokenId> tokens, Snapshot snapshot);

  /// The budget less `bytes`, which somebody else needs for now.
  void Reserve(std::int64_t bytes);
  /// Writes what is only in memory to the folder, as far as its budget goes; before an exit.
  void SpillAll();

  CacheStats& stats() { return stats_; }
  std::int64_t budget() const { return options_.bytes - reserved_; }

 private:
  struct Entry {
    Snapshot snapshot;  // without state and scores while only on disk
    bool in_memory = false;
    bool has_scores = false;  // in the snapshot, or in the file
    std::string file;         // empty: not on disk
    std::int64_t file_bytes = 0;
    std::int64_t own_bytes = 0;    // of the state without its pages, and of the scores
    std::int64_t total_bytes = 0;  // with the pages
    double floor = 0;              // GreedyDual's clock when it was last used
  };
  using Tree = TokenTree<Entry>;
  using Node = Tree::Node;
  struct Page {
    std::int64_t users = 0, bytes = 0;
  };

  PrefixCache(const TokenModel& model, CacheOptions options);
  bool Usable(const Node& node, std::size_t n_tokens, bool need_logits) const;
  double Worth(const Node& node) const;
  void CountPages(const ModelState& state, std::int64_t sign);
  std::int64_t NewBytes(const Snapshot& snapshot) const;
  bool MakeRoom(const Snapshot& snapshot, std::int64_t more);
  bool EvictOne();
  void PutInMemory(Node* node, Snapshot snapshot);
  void DropFromMemory(Entry& entry);
  void AddScores(Entry& entry, std::vector<float> logits);
  Node* LeastWorth(bool in_memory) const;
  void Forget(Node* node);
  void Update();

  // prefix_cache_files.cc
  bool Spill(Node* node);
  Result<SavedSnapshot> ReadFile(const std::string& path) const;
  bool Load(Node* node, Snapshot& snapshot);
  Status ScanFolder();
  void AddFile(const std::string& path);
  void DeleteFile(Entry& entry);
  std::string FilePrefix() const;

  const TokenModel& model_;
  CacheOptions options_;
  std::int64_t reserved_ = 0;
  Tree tree_;
  std::vector<Node*> holders_;      // nodes with an entry
  const Node* pinned_ = nullptr;    // being filled: not evicted now
  const Node* spilling_ = nullptr;  // being written: the same
  std::unordered_map<const float*, Page> pages_;
  std::int64_t bytes_ = 0;  // of snapshots in memory
  std::int64_t file_bytes_ = 0;
  double clock_ = 0;
  CacheStats stats_;
};

}  // namespace k3
