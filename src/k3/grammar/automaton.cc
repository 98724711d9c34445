#include "k3/grammar/automaton.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "k3/base/check.h"

namespace k3::grammar {
namespace {

std::uint64_t Mix(std::uint64_t h, std::int32_t v) {
  h = (h ^ static_cast<std::uint32_t>(v)) * 0x9E3779B97F4A7C15u;
  return h ^ (h >> 29);
}

}  // namespace

Automaton::Automaton(std::shared_ptr<const Grammar> grammar,
                     std::shared_ptr<const VocabularyTrie> vocabulary)
    : grammar_(std::move(grammar)), vocabulary_(std::move(vocabulary)) {
  seen_.resize(grammar_->n_states());
  seen_epoch_.resize(grammar_->n_states());
  path_.resize(vocabulary_->longest() + 1, kDead);
  for (Symbol c = 0; c < 256; ++c) class_of_byte_[Index(c)] = grammar_->ClassOf(c);
  InternPlace(false);  // kDead
  const Rule& root = grammar_->rule(grammar_->root());
  std::vector<Return> none;
  const FrameId bottom = InternFrame(none, root.nests ? 1 : 0);
  ++epoch_;
  ended_ = root.nullable;
  Visit(root.start, bottom);
  Drain(true);
  start_ = Settle();
}

bool Automaton::Viable(std::int32_t state, std::int32_t nesting) const {
  return nesting + grammar_->state(state).height <= kMaxNesting;
}

/// Notes a (state, frame) once.
void Automaton::Visit(std::int32_t state, FrameId frame) {
  if (!Viable(state, frames_[Index(frame)].nesting)) return;
  const std::size_t s = Index(state);
  if (seen_epoch_[s] != epoch_) {
    seen_epoch_[s] = epoch_;
    seen_[s] = -1;
  }
  for (std::int32_t i = seen_[s]; i >= 0; i = seen_list_[Index(i)].next) {
    if (seen_list_[Index(i)].frame == frame) return;
  }
  seen_list_.push_back({frame, seen_[s]});
  seen_[s] = Int(seen_list_.size() - 1);
  todo_.push_back({state, frame});
}

/// `fresh`: the rule was entered at this point of the text. Then its end is not one: callers of a
/// rule that matches the empty text have already gone on.
void Automaton::Follow(const Item& item, bool fresh) {
  const Grammar& g = *grammar_;
  const State& state = g.state(item.state);
  const std::int32_t nesting = frames_[Index(item.frame)].nesting;
  if (state.accepts && !fresh) End(item.frame);
  bool reads = false;
  for (const Edge& e : g.edges(state)) {
    switch (e.kind) {
      case Edge::Kind::kRead:
        reads = reads || Viable(e.target, nesting);
        break;
      case Edge::Kind::kEmpty:
        Visit(e.target, item.frame);
        break;
      case Edge::Kind::kCall:
        CallRule(e.callee, {e.target, -1, 0, item.frame});
        if (g.rule(e.callee).nullable) Visit(e.target, item.frame);
        break;
      case Edge::Kind::kRepeat:
        RepeatRule(e.callee, e.target, 1, item.frame);
        if (g.repeat(e.callee).min == 0) Visit(e.target, item.frame);
        break;
    }
  }
  if (reads) result_.push_back(item);
}

/// A rule with this frame has ended.
void Automaton::End(FrameId frame) {
  const Frame f = frames_[Index(frame)];
  if (f.count == 0) ended_ = true;  // nobody called it
  for (std::int32_t i = f.first; i < f.first + f.count; ++i) {
    const Return r = returns_[Index(i)];
    if (r.repeat < 0) {
      Visit(r.target, r.parent);
      continue;
    }
    const Repeat& repeat = grammar_->repeat(r.repeat);
    if (r.count >= repeat.min) Visit(r.target, r.parent);
    if (repeat.max < 0 || r.count < repeat.max) {
      RepeatRule(r.repeat, r.target, r.count + 1, r.parent);
    }
  }
}

void Automaton::RepeatRule(std::int32_t repeat, std::int32_t target, std::int32_t round,
                           FrameId parent) {
  const Repeat& r = grammar_->repeat(repeat);
  // Without a maximum, rounds beyond the minimum are all alike.
  if (r.max < 0) round = std::min(round, std::max(r.min, 1));
  CallRule(r.rule, {target, repeat, round, parent});
}

void Automaton::CallRule(RuleId rule, const Return& after) {
  const Rule& callee = grammar_->rule(rule);
  const std::int32_t outside = frames_[Index(after.parent)].nesting;
  const std::int32_t inside = outside + (callee.nests ? 1 : 0);
  if (!Viable(callee.start, inside) || !Viable(after.target, outside)) return;
  calls_.push_back({callee.order, inside, rule, after});
  std::push_heap(calls_.begin(), calls_.end(), std::greater<>());
}

void Automaton::Drain(bool fresh) {
  while (!todo_.empty()) {
    const Item item = todo_.back();
    todo_.pop_back();
    Follow(item, fresh);
  }
}

/// All calls of one rule share a frame. Rules come in an order in which all calls of one are known
/// before it is entered.
void Automaton::EnterNextRule() {
  const RuleId rule = calls_.front().rule;
  const std::int32_t nesting = calls_.front().nesting;
  std::vector<Return> returns;
  while (!calls_.empty() && calls_.front().rule == rule && calls_.front().nesting == nesting) {
    returns.push_back(calls_.front().after);
    std::pop_heap(calls_.begin(), calls_.end(), std::greater<>());
    calls_.pop_back();
  }
  Visit(grammar_->rule(rule).start, InternFrame(returns, nesting));
  Drain(true);
}

Automaton::Place Automaton::Settle() {
  while (!calls_.empty()) EnterNextRule();
  const Place place = result_.empty() && !ended_ ? kDead : InternPlace(ended_);
  result_.clear();
  seen_list_.clear();
  return place;
}

Automaton::FrameId Automaton::InternFrame(std::vector<Return>& returns, std::int32_t nesting) {
  std::sort(returns.begin(), returns.end());
  returns.erase(std::unique(returns.begin(), returns.end()), returns.end());
  std::uint64_t hash = Mix(1, nesting);
  for (const Return& r : returns) {
    hash = Mix(Mix(Mix(Mix(hash, r.target), r.repeat), r.count), r.parent);
  }
  const auto [begin, end] = frame_by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Frame& f = frames_[Index(it->second)];
    const auto first = returns_.begin() + f.first;
    if (f.nesting == nesting &&
        std::equal(first, first + f.count, returns.begin(), returns.end())) {
      return it->second;
    }
  }
  const FrameId id = Int(frames_.size());
  frames_.push_back({Int(returns_.size()), Int(returns.size()), nesting});
  returns_.insert(returns_.end(), returns.begin(), returns.end());
  frame_by_hash_.emplace(hash, id);
  return id;
}

/// The place of result_.
Automaton::Place Automaton::InternPlace(bool may_end) {
  std::sort(result_.begin(), result_.end());
  std::uint64_t hash = Mix(2, may_end ? 1 : 0);
  for (const Item& item : result_) hash = Mix(Mix(hash, item.state), item.frame);
  const auto [begin, end] = place_by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const PlaceData& p = places_[Index(it->second)];
    const auto first = items_.begin() + p.first;
    if (p.may_end == may_end &&
        std::equal(first, first + p.count, result_.begin(), result_.end())) {
      return it->second;
    }
  }
  const Place id = Int(places_.size());
  places_.push_back({Int(items_.size()), Int(result_.size()), may_end, -1});
  items_.insert(items_.end(), result_.begin(), result_.end());
  steps_.resize(steps_.size() + Index(grammar_->n_classes()), id == kDead ? kDead : -1);
  place_by_hash_.emplace(hash, id);
  return id;
}

Automaton::Place Automaton::Compute(Place place, std::int32_t symbol_class) {
  const Symbol symbol = grammar_->SymbolOfClass(symbol_class);
  const PlaceData p = places_[Index(place)];
  ++epoch_;
  ended_ = false;
  for (std::int32_t i = p.first; i < p.first + p.count; ++i) {
    const Item item = items_[Index(i)];
    for (const Edge& e : grammar_->edges(grammar_->state(item.state))) {
      if (e.kind == Edge::Kind::kRead && e.lo <= symbol && symbol <= e.hi) {
        Visit(e.target, item.frame);
      }
    }
  }
  Drain(false);
  return Settle();
}

Automaton::Place Automaton::StepLocked(Place place, std::int32_t symbol_class) {
  const std::size_t slot = Index(place) * Index(grammar_->n_classes()) + Index(symbol_class);
  if (steps_[slot] >= 0) return steps_[slot];
  const Place next = Compute(place, symbol_class);
  steps_[slot] = next;  // not a reference from before: Compute may have moved the table
  return next;
}

Automaton::Place Automaton::Step(Place place, Symbol symbol) {
  const std::lock_guard lock(mutex_);
  return StepLocked(place, grammar_->ClassOf(symbol));
}

Automaton::Place Automaton::Walk(Place place, std::string_view bytes) {
  const std::lock_guard lock(mutex_);
  for (const char c : bytes) {
    place = StepLocked(place, grammar_->ClassOf(static_cast<unsigned char>(c)));
    if (place == kDead) break;
  }
  return place;
}

bool Automaton::MayEnd(Place place) {
  const std::lock_guard lock(mutex_);
  return places_[Index(place)].may_end;
}

bool Automaton::MayGoOn(Place place) {
  const std::lock_guard lock(mutex_);
  return places_[Index(place)].count > 0;
}

void Automaton::Mask(Place place, std::span<std::uint64_t> mask) {
  const std::lock_guard lock(mutex_);
  if (places_[Index(place)].mask < 0) {
    masks_.push_back(ComputeMask(place));
    places_[Index(place)].mask = Int(masks_.size() - 1);
  }
  const auto& found = masks_[Index(places_[Index(place)].mask)];
  const std::size_t n = std::min(mask.size(), found.size());
  std::copy_n(found.begin(), n, mask.begin());
  std::fill(mask.begin() + static_cast<std::ptrdiff_t>(n), mask.end(), 0u);
}

/// Walks the nodes [begin, end) of a part of the vocabulary from `from`. With `ends`, `from` is a
/// local place: a token belongs into the mask when it stays in the rule, and `ends` gets the nodes
/// at which the rule ends. Without, every token that can follow belongs into the mask.
void Automaton::WalkTokens(Place from, std::span<const VocabularyTrie::Node> nodes,
                           std::uint32_t begin, std::uint32_t end, std::size_t& work,
                           std::vector<std::uint64_t>& mask, std::vector<std::uint32_t>* ends) {
  if (begin == end) return;
  path_[nodes[begin].depth] = from;
  for (std::uint32_t i = begin; i < end;) {
    const VocabularyTrie::Node& node = nodes[i];
    const bool skip = work > kMaxMaskWork && node.depth > 0;
    const Place next = skip ? kDead : StepLocked(path_[node.depth], class_of_byte_[node.byte]);
    if (next == kDead) {
      i = node.end;
      continue;
    }
    const PlaceData& data = places_[Index(next)];
    work += 1 + Index(data.count);
    if (ends != nullptr && data.may_end) ends->push_back(i);
    if (ends != nullptr && data.count == 0) {
      i = node.end;
      continue;
    }
    if (node.token >= 0) mask[Index(node.token) / 64] |= std::uint64_t{1} << (node.token % 64);
    path_[node.depth + 1u] = next;
    ++i;
  }
}

/// The item with an empty frame in place of the real one, `rest`. Of a repetition the count is
/// kept, as far as a token can tell: else every character of a string would end its rule.
Automaton::Place Automaton::LocalPlace(const Item& item, std::size_t longest, FrameId& rest) {
  const Frame frame = frames_[Index(item.frame)];
  std::vector<Return> returns;
  rest = item.frame;
  if (frame.count == 1 && returns_[Index(frame.first)].repeat >= 0) {
    Return round = returns_[Index(frame.first)];
    rest = round.parent;
    const Repeat& repeat = grammar_->repeat(round.repeat);
    const auto rounds = static_cast<std::int64_t>(longest);  // that a token can take at most
    const std::int32_t enough = std::max(repeat.min, 1);
    if (std::int64_t{repeat.min} - round.count > rounds) {
      round.count = 1;
    } else if (round.count > enough && std::int64_t{repeat.max} - round.count > rounds) {
      round.count = enough;
    }
    std::vector<Return> none;
    round.parent = InternFrame(none, frames_[Index(rest)].nesting);
    returns.push_back(round);
  }
  result_.push_back({item.state, InternFrame(returns, frame.nesting)});
  const Place place = InternPlace(false);
  result_.clear();
  return place;
}

const Automaton::Found& Automaton::FoundFrom(Place local, std::size_t part) {
  const auto [it, fresh] = found_[part].try_emplace(local);
  Found& found = it->second;
  if (!fresh) return found;
  found.mask.resize(vocabulary_->mask_words());
  std::size_t work = 0;
  const std::span<const VocabularyTrie::Node> nodes = vocabulary_->parts()[part].nodes;
  WalkTokens(local, nodes, 0, static_cast<std::uint32_t>(nodes.size()), work, found.mask,
             &found.ends);
  found_ends_ += found.ends.size();
  return found;
}

/// Where a text goes on when the rule with this frame has just ended.
Automaton::Place Automaton::PlaceAfter(FrameId frame) {
  ++epoch_;
  ended_ = false;
  End(frame);
  Drain(false);
  return Settle();
}

void Automaton::AddTokens(const Item& item, std::size_t part, std::size_t& work,
                          std::vector<std::uint64_t>& mask) {
  FrameId rest = 0;
  const VocabularyTrie::Part& tokens = vocabulary_->parts()[part];
  const Found& found = FoundFrom(LocalPlace(item, tokens.longest, rest), part);
  for (std::size_t w = 0; w < mask.size(); ++w) mask[w] |= found.mask[w];
  const Place after = found.ends.empty() ? kDead : PlaceAfter(rest);
  if (after == kDead) return;
  for (const std::uint32_t n : found.ends) {
    const VocabularyTrie::Node& node = tokens.nodes[n];
    if (node.token >= 0) mask[Index(node.token) / 64] |= std::uint64_t{1} << (node.token % 64);
    WalkTokens(after, tokens.nodes, n + 1, node.end, work, mask, nullptr);
  }
}

std::vector<std::uint64_t> Automaton::ComputeMask(Place place) {
  constexpr std::int32_t kMaxItems = 16;  // with more, one walk for all is cheaper
  std::vector<std::uint64_t> mask(vocabulary_->mask_words());
  const PlaceData p = places_[Index(place)];
  std::size_t work = 0;
  for (std::size_t part = 0; part < 2; ++part) {
    const auto& nodes = vocabulary_->parts()[part].nodes;
    if (p.count > kMaxItems) {
      WalkTokens(place, nodes, 0, static_cast<std::uint32_t>(nodes.size()), work, mask, nullptr);
      continue;
    }
    for (std::int32_t i = p.first; i < p.first + p.count; ++i) {
      const Item item = items_[Index(i)];
      AddTokens(item, part, work, mask);
    }
  }
  return mask;
}

std::size_t Automaton::BytesLocked() const {
  return places_.size() * (sizeof(PlaceData) + 32) + items_.size() * sizeof(Item) +
         steps_.size() * sizeof(Place) + frames_.size() * (sizeof(Frame) + 32) +
         returns_.size() * sizeof(Return) + found_ends_ * sizeof(std::uint32_t) +
         (masks_.size() + found_[0].size() + found_[1].size()) * vocabulary_->mask_words() * 8;
}

std::size_t Automaton::bytes() const {
  const std::lock_guard lock(mutex_);
  return BytesLocked();
}

std::shared_ptr<Automaton> Automaton::Fresh(Place& place) {
  const std::lock_guard lock(mutex_);
  auto fresh = std::make_shared<Automaton>(grammar_, vocabulary_);
  const PlaceData p = places_[Index(place)];
  // A frame's parents are older, so they have smaller numbers.
  std::vector<bool> needed(frames_.size());
  for (std::int32_t i = p.first; i < p.first + p.count; ++i) {
    needed[Index(items_[Index(i)].frame)] = true;
  }
  for (std::size_t f = frames_.size(); f-- > 1;) {
    for (std::int32_t i = 0; needed[f] && i < frames_[f].count; ++i) {
      needed[Index(returns_[Index(frames_[f].first + i)].parent)] = true;
    }
  }
  std::vector<FrameId> moved(frames_.size(), 0);
  for (std::size_t f = 1; f < frames_.size(); ++f) {
    if (!needed[f]) continue;
    std::vector<Return> returns;
    for (std::int32_t i = 0; i < frames_[f].count; ++i) {
      returns.push_back(returns_[Index(frames_[f].first + i)]);
      returns.back().parent = moved[Index(returns.back().parent)];
    }
    moved[f] = fresh->InternFrame(returns, frames_[f].nesting);
  }
  for (std::int32_t i = p.first; i < p.first + p.count; ++i) {
    const Item item = items_[Index(i)];
    fresh->result_.push_back({item.state, moved[Index(item.frame)]});
  }
  place = p.count == 0 && !p.may_end ? kDead : fresh->InternPlace(p.may_end);
  fresh->result_.clear();
  return fresh;
}

bool Matcher::Go(Automaton::Place next) {
  if (next == Automaton::kDead) return false;
  place_ = next;
  return true;
}

/// What was remembered is shared by all texts of the grammar and may have grown too large.
void Matcher::Refresh() {
  if (automaton_->bytes() > Automaton::kMaxBytes) automaton_ = automaton_->Fresh(place_);
}

bool Matcher::Accept(Symbol symbol) {
  Refresh();
  return Go(automaton_->Step(place_, symbol));
}

bool Matcher::Accept(std::string_view bytes) {
  Refresh();
  return Go(automaton_->Walk(place_, bytes));
}

void Matcher::Mask(std::span<std::uint64_t> mask) {
  Refresh();
  automaton_->Mask(place_, mask);
}

}  // namespace k3::grammar
