// The automaton of a grammar: which symbols and tokens may come next, and where one of them leads.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "k3/base/ids.h"
#include "k3/grammar/grammar.h"
#include "k3/grammar/vocabulary.h"

namespace k3::grammar {

/// A pushdown automaton that follows all readings of a text at once and remembers what it found.
///
/// A *place* is the set of all pairs (state, frame) the text so far can have led to. A *frame*
/// says where a rule goes on when it ends: a set of (state, frame of the caller), so calls of one
/// rule at one point of the text share a frame and the number of readings stays bounded by the size
/// of the grammar. Places and frames are numbered, and steps and token masks of a place are kept;
/// most texts visit few places.
///
/// The mask of a place is put together from its states: what can follow in a rule does not depend
/// on who called it, so a walk through the vocabulary is made once per state and nesting, with an
/// empty frame. Tokens that go on after the end of the rule are finished with the real frame; they
/// are few.
///
/// Safe from many threads (one lock). Everything is a function of the text alone: what is
/// remembered changes the time only.
class Automaton {
 public:
  using Place = std::int32_t;
  static constexpr Place kDead = 0;  // no text goes on from here

  Automaton(std::shared_ptr<const Grammar> grammar,
            std::shared_ptr<const VocabularyTrie> vocabulary);

  Place start() const { return start_; }
  const VocabularyTrie& vocabulary() const { return *vocabulary_; }

  Place Step(Place place, Symbol symbol);
  Place Walk(Place place, std::string_view bytes);
  /// The text may end here.
  bool MayEnd(Place place);
  /// Something may follow.
  bool MayGoOn(Place place);
  /// Sets `mask` to the ordinary tokens that may follow; words beyond the vocabulary become 0.
  ///
  /// A walk through the vocabulary that meets very many readings is cut short (kMaxMaskWork): then
  /// some tokens of two and more bytes are missing, always the same ones, and single bytes are not.
  void Mask(Place place, std::span<std::uint64_t> mask);

  /// Bytes that are remembered. Grows with use; when it is over kMaxBytes, go on in a fresh one.
  std::size_t bytes() const;
  static constexpr std::size_t kMaxBytes = std::size_t{64} << 20;
  static constexpr std::size_t kMaxMaskWork = std::size_t{32} << 20;
  /// A new automaton without memories, and `place` (changed to its number there).
  std::shared_ptr<Automaton> Fresh(Place& place);

 private:
  using FrameId = std::int32_t;

  /// Where a rule, or a repetition of it, goes on.
  struct Return {
    std::int32_t target = -1;
    std::int32_t repeat = -1;  // -1: a plain call
    std::int32_t count = 0;    // this is round number `count`
    FrameId parent = 0;
    auto operator<=>(const Return&) const = default;
  };
  struct Frame {
    std::int32_t first = 0, count = 0;  // in returns_
    std::int32_t nesting = 0;
  };
  struct Item {
    std::int32_t state = 0;
    FrameId frame = 0;
    auto operator<=>(const Item&) const = default;
  };
  struct PlaceData {
    std::int32_t first = 0, count = 0;  // in items_
    bool may_end = false;
    std::int32_t mask = -1;  // in masks_
  };
  struct PendingCall {
    std::int32_t order = 0;
    std::int32_t nesting = 0;  // inside the rule
    RuleId rule = 0;
    Return after;
    auto operator<=>(const PendingCall&) const = default;
  };

  // With the lock held:
  Place StepLocked(Place place, std::int32_t symbol_class);
  Place Compute(Place place, std::int32_t symbol_class);
  void Visit(std::int32_t state, FrameId frame);
  void Follow(const Item& item, bool fresh);
  void End(FrameId frame);
  void CallRule(RuleId rule, const Return& after);
  bool Viable(std::int32_t state, std::int32_t nesting) const;
  void RepeatRule(std::int32_t repeat, std::int32_t target, std::int32_t round, FrameId parent);
  void Drain(bool fresh);
  Place Settle();
  void EnterNextRule();
  Place InternPlace(bool may_end);
  FrameId InternFrame(std::vector<Return>& returns, std::int32_t nesting);

  /// What a walk through the vocabulary finds: see WalkTokens.
  struct Found {
    std::vector<std::uint64_t> mask;
    std::vector<std::uint32_t> ends;  // nodes at which the rule ends
  };
  std::vector<std::uint64_t> ComputeMask(Place place);
  void WalkTokens(Place from, std::span<const VocabularyTrie::Node> nodes, std::uint32_t begin,
                  std::uint32_t end, std::size_t& work, std::vector<std::uint64_t>& mask,
                  std::vector<std::uint32_t>* ends);
  const Found& FoundFrom(Place local, std::size_t part);
  Place LocalPlace(const Item& item, std::size_t longest, FrameId& rest);
  void AddTokens(const Item& item, std::size_t part, std::size_t& work,
                 std::vector<std::uint64_t>& mask);
  Place PlaceAfter(FrameId frame);
  std::size_t BytesLocked() const;

  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<const VocabularyTrie> vocabulary_;
  Place start_ = kDead;

  mutable std::mutex mutex_;
  std::vector<PlaceData> places_;
  std::vector<Item> items_;
  std::vector<Place> steps_;  // [place, class]; -1: not known yet
  std::vector<Frame> frames_;
  std::vector<Return> returns_;
  std::vector<std::vector<std::uint64_t>> masks_;
  std::array<std::unordered_map<Place, Found>, 2> found_;  // by part of the vocabulary, local place
  std::size_t found_ends_ = 0;
  std::array<std::int32_t, 256> class_of_byte_{};
  std::vector<Place> path_;  // of WalkTokens, by depth
  std::unordered_multimap<std::uint64_t, Place> place_by_hash_;
  std::unordered_multimap<std::uint64_t, FrameId> frame_by_hash_;

  // Of the step being computed.
  struct Seen {
    FrameId frame = 0;
    std::int32_t next = -1;
  };
  std::vector<std::int32_t> seen_;  // by state: its last entry in seen_list_, if its epoch is now
  std::vector<std::uint64_t> seen_epoch_;
  std::vector<Seen> seen_list_;
  std::uint64_t epoch_ = 0;
  std::vector<Item> todo_, result_;
  std::vector<PendingCall> calls_;
  bool ended_ = false;
};

/// One text. A copy goes on independently; used from one thread at a time.
class Matcher {
 public:
  explicit Matcher(std::shared_ptr<Automaton> automaton)
      : automaton_(std::move(automaton)), place_(automaton_->start()) {}

  /// false: it cannot follow, and nothing changed.
  bool Accept(Symbol symbol);
  bool Accept(std::string_view bytes);
  bool CanAccept(Symbol symbol) const {
    return automaton_->Step(place_, symbol) != Automaton::kDead;
  }
  bool MayEnd() const { return automaton_->MayEnd(place_); }
  bool MayGoOn() const { return automaton_->MayGoOn(place_); }
  void Mask(std::span<std::uint64_t> mask);
  const VocabularyTrie& vocabulary() const { return automaton_->vocabulary(); }
  std::size_t bytes() const { return automaton_->bytes(); }

 private:
  void Refresh();
  bool Go(Automaton::Place next);

  std::shared_ptr<Automaton> automaton_;
  Automaton::Place place_;
};

}  // namespace k3::grammar
