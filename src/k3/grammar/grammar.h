// A grammar over bytes and control symbols, as the automaton needs it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "k3/base/status.h"

namespace k3::grammar {

/// What a text consists of: bytes 0..255 and, in a chat reply, control tokens.
using Symbol = std::int32_t;
inline constexpr Symbol kControlOpen = 256, kControlClose = 257, kControlSep = 258,
                        kControlEnd = 259;
inline constexpr Symbol kSymbols = 260;

/// What one grammar may take. A schema that needs more is refused.
inline constexpr std::size_t kMaxStates = 200'000;
inline constexpr std::size_t kMaxExpressions = 1'000'000;
/// Objects and arrays inside each other; deeper is never generated, as nothing here would read it
/// back (kMaxJsonDepth).
inline constexpr int kMaxNesting = 64;

/// Numbers of states, rules and edges are 32 bits wide; containers count in size_t.
inline std::int32_t Int(std::size_t n) { return static_cast<std::int32_t>(n); }
inline std::size_t Index(std::int32_t n) { return static_cast<std::size_t>(n); }

using Expr = std::int32_t;
using RuleId = std::int32_t;

/// A place in a rule. Its edges are Grammar::edges().subspan(first, count).
struct State {
  std::int32_t first = 0, count = 0;
  std::int32_t height = 0;  // nestings that are still needed to end the rule; kNever: it cannot
  bool accepts = false;     // the rule may end here
  bool reads = false;       // has an edge of kind kRead
};

struct Edge {
  enum class Kind : std::uint8_t {
    kEmpty,   // to `target`, reading nothing
    kRead,    // to `target`, reading one symbol in [lo, hi]
    kCall,    // to the start of rule `callee`; after its end to `target`
    kRepeat,  // the same, repeats()[callee] times
  };
  Kind kind = Kind::kEmpty;
  std::int16_t lo = 0, hi = 0;
  std::int32_t callee = 0;
  std::int32_t target = 0;
};

/// `rule`, min to max times. Its text must show where one round ends (rounds never overlap).
struct Repeat {
  RuleId rule = 0;
  std::int32_t min = 0;
  std::int32_t max = 0;  // -1: any number
};

struct Rule {
  std::string name;  // for messages, e.g. a JSON pointer
  std::int32_t start = 0;
  std::int32_t order = 0;  // a rule that begins with a call of another comes before that one
  bool nests = false;      // counts against kMaxNesting
  bool nullable = false;
};

/// Immutable; safe from many threads.
class Grammar {
 public:
  static constexpr std::int32_t kNever = 1 << 20;

  const State& state(std::int32_t i) const { return states_[static_cast<std::size_t>(i)]; }
  const Rule& rule(RuleId i) const { return rules_[static_cast<std::size_t>(i)]; }
  const Repeat& repeat(std::int32_t i) const { return repeats_[static_cast<std::size_t>(i)]; }
  std::span<const Edge> edges(const State& s) const {
    return std::span(edges_).subspan(static_cast<std::size_t>(s.first),
                                     static_cast<std::size_t>(s.count));
  }
  std::size_t n_states() const { return states_.size(); }
  std::size_t n_rules() const { return rules_.size(); }
  RuleId root() const { return root_; }

  /// Symbols that no edge tells apart share a class.
  std::int32_t n_classes() const { return static_cast<std::int32_t>(class_symbol_.size()); }
  std::int32_t ClassOf(Symbol s) const { return class_of_[static_cast<std::size_t>(s)]; }
  Symbol SymbolOfClass(std::int32_t c) const { return class_symbol_[static_cast<std::size_t>(c)]; }

 private:
  friend class GrammarBuilder;

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<Rule> rules_;
  std::vector<Repeat> repeats_;
  std::vector<std::int32_t> class_of_;
  std::vector<Symbol> class_symbol_;
  RuleId root_ = 0;
};

/// Puts a grammar together from expressions. An expression may be used any number of times. What
/// goes over a limit is remembered and refused by Finish, so the calls between need no checks. One
/// thread.
class GrammarBuilder {
 public:
  GrammarBuilder();

  Expr Empty() const { return 0; }
  Expr Never() const { return 1; }  // matches nothing
  Expr Range(Symbol lo, Symbol hi);
  Expr Literal(std::string_view bytes);
  Expr Seq(std::vector<Expr> parts);
  Expr Alt(std::vector<Expr> choices);
  /// One of the literals; shared beginnings are stored once.
  Expr OneOf(std::vector<std::string> literals);
  Expr Star(Expr e);
  Expr Plus(Expr e) { return Seq({e, Star(e)}); }
  Expr Optional(Expr e) { return Alt({e, Empty()}); }
  /// Written out `max` times: for small bounds. max -1: any number.
  Expr Unrolled(Expr e, std::int64_t min, std::int64_t max);
  Expr Call(RuleId rule);
  /// Counted without being written out. See Repeat; the rule must not match the empty text. max -1:
  /// any number.
  Expr Counted(RuleId rule, std::int64_t min, std::int64_t max);

  /// Some of `items` in their order. The first that is there is written as `first`, others as
  /// `next` (usually with a separator in front).
  struct ListItem {
    Expr first = 0, next = 0;
    bool optional = false;
  };
  Expr List(const std::vector<ListItem>& items);

  RuleId Declare(std::string name, bool nests = false);
  void Define(RuleId rule, Expr body);

  bool over_limit() const { return over_limit_; }

  /// Refuses what is over a limit (kUnsupported), a rule that can call itself without reading
  /// anything and a root that matches no text (kInvalidArgument). The builder is used up.
  Result<std::shared_ptr<const Grammar>> Finish(RuleId root, std::string_view where);

 private:
  enum class Op : std::uint8_t {
    kRange,
    kLiteral,
    kSeq,
    kAlt,
    kOneOf,
    kStar,
    kUpTo,
    kList,
    kCall,
    kRepeat
  };
  struct Node {
    Op op = Op::kSeq;
    std::int32_t a = 0, b = 0;  // range, rule, or first and count in parts_ or literals_
  };

  Expr Add(Op op, std::int32_t a, std::int32_t b);
  Expr AddList(Op op, const std::vector<Expr>& parts);
  std::int32_t NewState();
  void AddEdge(std::int32_t from, Edge edge);
  void Emit(Expr e, std::int32_t from, std::int32_t to);
  void EmitList(const Node& node, std::int32_t from, std::int32_t to);
  void EmitLiteral(std::string_view bytes, std::int32_t from, std::int32_t to);
  /// Needs at least one literal.
  void EmitTrie(std::span<const std::string> sorted, std::size_t depth, std::int32_t from,
                std::int32_t to);
  void SortEdges();
  void MakeClasses();
  void FindNullable();
  void FindHeights();
  Status OrderRules(std::string_view where);
  std::vector<RuleId> FirstCalls(RuleId rule, std::vector<std::int32_t>& mark) const;

  std::vector<Node> nodes_;
  std::vector<Expr> parts_;
  std::vector<std::string> literals_;
  std::vector<Expr> bodies_;
  std::map<std::tuple<RuleId, std::int64_t, std::int64_t>, std::int32_t> repeat_ids_;
  std::vector<std::pair<std::int32_t, Edge>> pending_;  // from, edge
  bool over_limit_ = false;
  std::shared_ptr<Grammar> grammar_;
};

}  // namespace k3::grammar
