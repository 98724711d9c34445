#include "k3/runtime/prefix_cache.h"

#include <algorithm>
#include <utility>

namespace k3 {
namespace {

/// Calls f(page, bytes) for every page of rows that the state refers to.
template <class F>
void ForEachPage(const ModelState& state, F&& f) {
  for (std::int64_t i = 0; i < state.n_layers(); ++i) {
    for (const PagedRows* rows : {&state.layer(i).rows, &state.layer(i).value_rows}) {
      for (const float* page : rows->PageTable()) f(page, PagedRows::kPageRows * rows->width() * 4);
    }
  }
}

std::int64_t ScoreBytes(const Snapshot& s) {
  return static_cast<std::int64_t>(4 * s.logits.size());
}

/// The state without its pages, and the scores.
std::int64_t OwnBytes(const Snapshot& s) {
  std::int64_t pages = 0;
  ForEachPage(s.state, [&](const float*, std::int64_t bytes) { pages += bytes; });
  return s.state.bytes() - pages + ScoreBytes(s);
}

}  // namespace

PrefixCache::PrefixCache(const TokenModel& model, CacheOptions options)
    : model_(model), options_(std::move(options)) {}

Result<std::unique_ptr<PrefixCache>> PrefixCache::Create(const TokenModel& model,
                                                         CacheOptions options) {
  std::unique_ptr<PrefixCache> cache(new PrefixCache(model, std::move(options)));
  K3_TRY(cache->ScanFolder());
  return cache;
}

bool PrefixCache::Usable(const Node& node, std::size_t n_tokens, bool need_logits) const {
  const Snapshot& s = node.value->snapshot;
  const bool at_end = node.depth == static_cast<std::int64_t>(n_tokens);
  if (at_end) return !need_logits || node.value->has_scores;
  return !s.whole_only;
}

CacheMatch PrefixCache::Find(std::span<const TokenId> tokens, bool need_logits) {
  CacheMatch match;
  const Tree::Walk walk = tree_.Find(tokens);
  match.matched = walk.matched;
  match.reason = walk.matched > 0 ? CacheMiss::kNoSnapshot : CacheMiss::kNothing;
  for (auto at = walk.found.rbegin(); at != walk.found.rend(); ++at) {
    Node* node = *at;
    if (!Usable(*node, tokens.size(), need_logits)) continue;
    if (node->value->in_memory) {
      match.state = node->value->snapshot.state;
      match.logits = node->value->snapshot.logits;
    } else {
      Snapshot loaded;
      if (!Load(node, loaded)) {
        match.reason = CacheMiss::kDamaged;
        Forget(node);
        continue;
      }
      match.state = loaded.state;
      match.logits = loaded.logits;
      match.spilled = true;
      pinned_ = node;
      if (MakeRoom(loaded, 0)) PutInMemory(node, std::move(loaded));
      pinned_ = nullptr;
    }
    node->value->floor = clock_;
    match.position = node->depth;
    if (match.position < static_cast<std::int64_t>(tokens.size())) match.logits.clear();
    break;
  }
  Update();
  return match;
}

std::int64_t PrefixCache::Peek(std::span<const TokenId> tokens, bool need_logits) const {
  const Tree::Walk walk = tree_.Find(tokens);
  for (auto at = walk.found.rbegin(); at != walk.found.rend(); ++at) {
    if (Usable(**at, tokens.size(), need_logits)) return (*at)->depth;
  }
  return 0;
}

std::vector<SavedSnapshot> PrefixCache::Along(std::span<const TokenId> tokens, std::size_t n,
                                              std::int64_t bytes) {
  std::vector<SavedSnapshot> list;
  std::int64_t sum = 0;
  const Tree::Walk walk = tree_.Find(tokens);
  for (auto at = walk.found.rbegin(); at != walk.found.rend() && list.size() < n; ++at) {
    sum += (*at)->value->total_bytes + 4 * (*at)->depth;
    if (sum > bytes && !list.empty()) break;
    Snapshot copy;
    if ((*at)->value->in_memory) {
      copy = (*at)->value->snapshot;
    } else if (!Load(*at, copy)) {
      continue;  // and is forgotten when somebody looks for it
    }
    list.push_back({tree_.Tokens(*at), std::move(copy)});
  }
  return list;
}

void PrefixCache::Insert(std::span<const TokenId> tokens, Snapshot snapshot) {
  if (tokens.empty()) return;
  const Tree::Walk walk = tree_.Find(tokens);
  Node* node = nullptr;
  if (!walk.found.empty() && walk.found.back()->depth == static_cast<std::int64_t>(tokens.size())) {
    node = walk.found.back();
    node->value->floor = clock_;
    if (node->value->in_memory) {
      AddScores(*node->value, std::move(snapshot.logits));
      return Update();
    }
  }
  pinned_ = node;
  // A new leaf, and perhaps a node where it parts from another text.
  const std::int64_t nodes = 4 * static_cast<std::int64_t>(tokens.size()) + 2 * Tree::kNodeBytes;
  const bool room = MakeRoom(snapshot, node == nullptr ? nodes : 0);
  pinned_ = nullptr;
  if (!room) {
    ++stats_.refused;
    return Update();
  }
  if (node == nullptr) {
    node = tree_.Make(tokens);
    node->value = std::make_unique<Entry>();
    holders_.push_back(node);
  }
  PutInMemory(node, std::move(snapshot));
  node->value->floor = clock_;
  ++stats_.inserted;
  Update();
}

/// The scores after a snapshot that is there already, if they fit.
void PrefixCache::AddScores(Entry& entry, std::vector<float> logits) {
  if (logits.empty() || !entry.snapshot.logits.empty()) return;
  const auto more = static_cast<std::int64_t>(4 * logits.size());
  if (bytes_ + tree_.bytes() + more > budget()) return;
  DeleteFile(entry);  // which lacks them
  entry.snapshot.logits = std::move(logits);
  entry.has_scores = true;
  entry.own_bytes += more;
  entry.total_bytes += more;
  bytes_ += more;
}

void PrefixCache::Reserve(std::int64_t bytes) {
  reserved_ = std::clamp<std::int64_t>(bytes, 0, options_.bytes);
  while (bytes_ + tree_.bytes() > budget() && EvictOne()) {
  }
  Update();
}

void PrefixCache::SpillAll() {
  if (options_.spill_dir.empty()) return;
  std::vector<Node*> order = holders_;
  std::sort(order.begin(), order.end(), [&](Node* a, Node* b) { return Worth(*a) > Worth(*b); });
  for (Node* node : order) {
    // The best first, so that nothing has to be deleted for something worse.
    if (node->value->in_memory && file_bytes_ < options_.spill_bytes) Spill(node);
  }
  Update();
}

double PrefixCache::Worth(const Node& node) const {
  const auto tokens = static_cast<double>(node.depth - Tree::DepthAbove(&node));
  const auto bytes = static_cast<double>(std::max<std::int64_t>(1, node.value->total_bytes));
  return node.value->floor + tokens / bytes;
}

void PrefixCache::CountPages(const ModelState& state, std::int64_t sign) {
  ForEachPage(state, [&](const float* address, std::int64_t bytes) {
    Page& page = pages_[address];
    page.users += sign;
    page.bytes = bytes;
    if (sign > 0 ? page.users == 1 : page.users == 0) bytes_ += sign * bytes;
    if (page.users == 0) pages_.erase(address);
  });
}

/// What the snapshot would add to bytes_ now.
std::int64_t PrefixCache::NewBytes(const Snapshot& snapshot) const {
  std::int64_t sum = OwnBytes(snapshot);
  ForEachPage(snapshot.state, [&](const float* address, std::int64_t bytes) {
    if (pages_.find(address) == pages_.end()) sum += bytes;
  });
  return sum;
}

/// False when the snapshot and `more` bytes do not fit however much is evicted.
bool PrefixCache::MakeRoom(const Snapshot& snapshot, std::int64_t more) {
  if (snapshot.state.bytes() + ScoreBytes(snapshot) + more > budget()) return false;
  // Evicting what shares pages with the snapshot makes it larger, so it is measured every time.
  while (bytes_ + tree_.bytes() + NewBytes(snapshot) + more > budget()) {
    if (!EvictOne()) return false;
  }
  return true;
}

void PrefixCache::PutInMemory(Node* node, Snapshot snapshot) {
  Entry& e = *node->value;
  e.own_bytes = OwnBytes(snapshot);
  e.total_bytes = snapshot.state.bytes() + ScoreBytes(snapshot);
  e.snapshot = std::move(snapshot);
  e.in_memory = true;
  e.has_scores = !e.snapshot.logits.empty();
  bytes_ += e.own_bytes;
  CountPages(e.snapshot.state, +1);
}

void PrefixCache::DropFromMemory(Entry& e) {
  if (!e.in_memory) return;
  bytes_ -= e.own_bytes;
  CountPages(e.snapshot.state, -1);
  e.snapshot.state = ModelState();
  e.snapshot.logits = {};
  e.in_memory = false;
}

PrefixCache::Node* PrefixCache::LeastWorth(bool in_memory) const {
  Node* least = nullptr;
  double worth = 0;
  for (Node* node : holders_) {
    const Entry& e = *node->value;
    if (node == pinned_ || node == spilling_) continue;
    if (in_memory ? !e.in_memory : e.file.empty()) continue;
    const double w = Worth(*node);
    if (least == nullptr || w < worth) least = node, worth = w;
  }
  return least;
}

bool PrefixCache::EvictOne() {
  Node* node = LeastWorth(true);
  if (node == nullptr) {
    // Only the tree itself is left in memory: forget a file and its tokens.
    node = LeastWorth(false);
    if (node == nullptr) return false;
    Forget(node);
    return true;
  }
  clock_ = std::max(clock_, Worth(*node));
  ++stats_.evicted;
  if (!node->value->file.empty() || Spill(node)) {
    DropFromMemory(*node->value);
  } else {
    Forget(node);
  }
  return true;
}

void PrefixCache::Forget(Node* node) {
  DropFromMemory(*node->value);
  DeleteFile(*node->value);
  holders_.erase(std::find(holders_.begin(), holders_.end(), node));
  tree_.Drop(node);
}

void PrefixCache::Update() {
  stats_.snapshots = std::count_if(holders_.begin(), holders_.end(),
                                   [](const Node* n) { return n->value->in_memory; });
  stats_.spilled_snapshots = std::count_if(holders_.begin(), holders_.end(),
                                           [](const Node* n) { return !n->value->file.empty(); });
  stats_.bytes = bytes_ + tree_.bytes();
  stats_.spilled_bytes = file_bytes_;
}

}  // namespace k3
