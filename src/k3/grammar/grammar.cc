#include "k3/grammar/grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bitset>

#include "k3/base/check.h"

namespace k3::grammar {
GrammarBuilder::GrammarBuilder() : grammar_(std::make_shared<Grammar>()) {
  nodes_.push_back({Op::kSeq, 0, 0});  // Empty
  nodes_.push_back({Op::kAlt, 0, 0});  // Never
}

Expr GrammarBuilder::Add(Op op, std::int32_t a, std::int32_t b) {
  if (nodes_.size() + parts_.size() + literals_.size() >= kMaxExpressions) {
    over_limit_ = true;
    return Never();
  }
  nodes_.push_back({op, a, b});
  return Int(nodes_.size() - 1);
}

Expr GrammarBuilder::AddList(Op op, const std::vector<Expr>& parts) {
  const std::int32_t first = Int(parts_.size());
  if (parts_.size() + parts.size() >= kMaxExpressions) {
    over_limit_ = true;
    return Never();
  }
  parts_.insert(parts_.end(), parts.begin(), parts.end());
  return Add(op, first, Int(parts.size()));
}

Expr GrammarBuilder::Range(Symbol lo, Symbol hi) {
  K3_CHECK(0 <= lo && lo <= hi && hi < kSymbols, "a range of symbols");
  return Add(Op::kRange, lo, hi);
}

Expr GrammarBuilder::Literal(std::string_view bytes) {
  if (bytes.empty()) return Empty();
  literals_.emplace_back(bytes);
  return Add(Op::kLiteral, Int(literals_.size() - 1), 1);
}

Expr GrammarBuilder::Seq(std::vector<Expr> parts) {
  if (std::find(parts.begin(), parts.end(), Never()) != parts.end()) return Never();
  std::erase(parts, Empty());
  if (parts.empty()) return Empty();
  if (parts.size() == 1) return parts[0];
  return AddList(Op::kSeq, parts);
}

Expr GrammarBuilder::Alt(std::vector<Expr> choices) {
  std::erase(choices, Never());
  if (choices.empty()) return Never();
  if (choices.size() == 1) return choices[0];
  return AddList(Op::kAlt, choices);
}

Expr GrammarBuilder::OneOf(std::vector<std::string> literals) {
  if (literals.empty()) return Never();
  std::sort(literals.begin(), literals.end());
  literals.erase(std::unique(literals.begin(), literals.end()), literals.end());
  const std::int32_t first = Int(literals_.size());
  const std::int32_t count = Int(literals.size());
  if (literals_.size() + literals.size() >= kMaxExpressions) {
    over_limit_ = true;
    return Never();
  }
  for (std::string& s : literals) literals_.push_back(std::move(s));
  return Add(Op::kOneOf, first, count);
}

Expr GrammarBuilder::Star(Expr e) {
  if (e == Empty() || e == Never()) return Empty();
  return Add(Op::kStar, e, 0);
}

Expr GrammarBuilder::Unrolled(Expr e, std::int64_t min, std::int64_t max) {
  const std::int64_t longest = std::max(min, max);
  if (longest > static_cast<std::int64_t>(kMaxStates)) {
    over_limit_ = true;
    return Never();
  }
  std::vector<Expr> parts(Index(static_cast<std::int32_t>(min)), e);
  if (max < 0) {
    parts.push_back(Star(e));
    return Seq(std::move(parts));
  }
  if (max > min && e != Empty() && e != Never()) {
    parts.push_back(Add(Op::kUpTo, e, static_cast<std::int32_t>(max - min)));
  }
  return Seq(std::move(parts));
}

Expr GrammarBuilder::List(const std::vector<ListItem>& items) {
  std::vector<Expr> parts;
  for (const ListItem& item : items) {
    if (item.first == Never() || item.next == Never()) {
      if (!item.optional) return Never();
      continue;
    }
    parts.push_back(item.first);
    parts.push_back(item.next);
    parts.push_back(item.optional ? 1 : 0);
  }
  return AddList(Op::kList, parts);
}

Expr GrammarBuilder::Call(RuleId rule) { return Add(Op::kCall, rule, 0); }

Expr GrammarBuilder::Counted(RuleId rule, std::int64_t min, std::int64_t max) {
  if (max == 0) return min == 0 ? Empty() : Never();
  if (max >= 0 && min > max) return Never();
  if (min > INT32_MAX || max > INT32_MAX) {
    over_limit_ = true;
    return Never();
  }
  auto& all = grammar_->repeats_;
  const auto [it, fresh] = repeat_ids_.try_emplace({rule, min, max}, Int(all.size()));
  if (fresh) {
    all.push_back({rule, static_cast<std::int32_t>(min), static_cast<std::int32_t>(max)});
  }
  return Add(Op::kRepeat, it->second, 0);
}

RuleId GrammarBuilder::Declare(std::string name, bool nests) {
  if (bodies_.size() >= kMaxStates) {
    over_limit_ = true;
    return 0;
  }
  Rule rule;
  rule.name = std::move(name);
  rule.nests = nests;
  grammar_->rules_.push_back(std::move(rule));
  bodies_.push_back(Never());
  return Int(bodies_.size() - 1);
}

void GrammarBuilder::Define(RuleId rule, Expr body) { bodies_[Index(rule)] = body; }

std::int32_t GrammarBuilder::NewState() {
  auto& states = grammar_->states_;
  if (states.size() >= kMaxStates) {
    over_limit_ = true;
    return 0;
  }
  states.emplace_back();
  return Int(states.size() - 1);
}

void GrammarBuilder::AddEdge(std::int32_t from, Edge edge) {
  // Expressions are shared, so few of them can ask for many edges between few states.
  if (pending_.size() >= 8 * kMaxStates) over_limit_ = true;
  if (!over_limit_) pending_.emplace_back(from, edge);
}

void GrammarBuilder::EmitLiteral(std::string_view bytes, std::int32_t from, std::int32_t to) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto byte = static_cast<std::int16_t>(static_cast<unsigned char>(bytes[i]));
    const std::int32_t next = i + 1 == bytes.size() ? to : NewState();
    AddEdge(from, {Edge::Kind::kRead, byte, byte, 0, next});
    from = next;
  }
}

/// `sorted` agree in their first `depth` bytes and are all different. The largest group goes on in
/// the loop, so the recursion is at most log2 of their number deep.
void GrammarBuilder::EmitTrie(std::span<const std::string> sorted, std::size_t depth,
                              std::int32_t from, std::int32_t to) {
  while (!over_limit_) {
    if (sorted[0].size() == depth) {
      AddEdge(from, {Edge::Kind::kEmpty, 0, 0, 0, to});
      sorted = sorted.subspan(1);
      if (sorted.empty()) return;
    }
    if (sorted.size() == 1) return EmitLiteral(std::string_view(sorted[0]).substr(depth), from, to);
    std::span<const std::string> largest;
    std::int32_t largest_state = 0;
    while (!sorted.empty()) {
      const char byte = sorted[0][depth];
      std::size_t n = 1;
      while (n < sorted.size() && sorted[n][depth] == byte) ++n;
      auto group = sorted.first(n);
      sorted = sorted.subspan(n);
      const auto symbol = static_cast<std::int16_t>(static_cast<unsigned char>(byte));
      std::int32_t next = NewState();
      AddEdge(from, {Edge::Kind::kRead, symbol, symbol, 0, next});
      if (group.size() > largest.size()) {
        std::swap(group, largest);
        std::swap(next, largest_state);
      }
      if (!group.empty()) EmitTrie(group, depth + 1, next, to);
    }
    sorted = largest;
    from = largest_state;
    ++depth;
  }
}

/// `none` is reached while no item was written, `some` afterwards.
void GrammarBuilder::EmitList(const Node& node, std::int32_t from, std::int32_t to) {
  std::int32_t none = from, some = NewState();
  for (std::int32_t i = 0; i < node.b && !over_limit_; i += 3) {
    const std::int32_t next_none = NewState(), next_some = NewState();
    Emit(parts_[Index(node.a + i)], none, next_some);
    Emit(parts_[Index(node.a + i + 1)], some, next_some);
    if (parts_[Index(node.a + i + 2)] != 0) {
      AddEdge(none, {Edge::Kind::kEmpty, 0, 0, 0, next_none});
      AddEdge(some, {Edge::Kind::kEmpty, 0, 0, 0, next_some});
    }
    none = next_none;
    some = next_some;
  }
  AddEdge(none, {Edge::Kind::kEmpty, 0, 0, 0, to});
  AddEdge(some, {Edge::Kind::kEmpty, 0, 0, 0, to});
}

void GrammarBuilder::Emit(Expr e, std::int32_t from, std::int32_t to) {
  if (over_limit_) return;
  const Node node = nodes_[Index(e)];
  switch (node.op) {
    case Op::kRange:
      return AddEdge(from, {Edge::Kind::kRead, static_cast<std::int16_t>(node.a),
                            static_cast<std::int16_t>(node.b), 0, to});
    case Op::kLiteral:
      return EmitLiteral(literals_[Index(node.a)], from, to);
    case Op::kOneOf:
      return EmitTrie(std::span(literals_).subspan(Index(node.a), Index(node.b)), 0, from, to);
    case Op::kSeq:
      if (node.b == 0) return AddEdge(from, {Edge::Kind::kEmpty, 0, 0, 0, to});
      for (std::int32_t i = 0; i < node.b; ++i) {
        const std::int32_t next = i + 1 == node.b ? to : NewState();
        Emit(parts_[Index(node.a + i)], from, next);
        from = next;
      }
      return;
    case Op::kAlt:
      for (std::int32_t i = 0; i < node.b; ++i) Emit(parts_[Index(node.a + i)], from, to);
      return;
    case Op::kUpTo:
      for (std::int32_t i = 0; i < node.b && !over_limit_; ++i) {
        const std::int32_t next = NewState();
        Emit(node.a, from, next);
        AddEdge(from, {Edge::Kind::kEmpty, 0, 0, 0, to});
        from = next;
      }
      return AddEdge(from, {Edge::Kind::kEmpty, 0, 0, 0, to});
    case Op::kStar: {
      const std::int32_t loop = NewState();
      AddEdge(from, {Edge::Kind::kEmpty, 0, 0, 0, loop});
      Emit(node.a, loop, loop);
      return AddEdge(loop, {Edge::Kind::kEmpty, 0, 0, 0, to});
    }
    case Op::kList:
      return EmitList(node, from, to);
    case Op::kCall:
      return AddEdge(from, {Edge::Kind::kCall, 0, 0, node.a, to});
    case Op::kRepeat:
      return AddEdge(from, {Edge::Kind::kRepeat, 0, 0, node.a, to});
  }
}

Result<std::shared_ptr<const Grammar>> GrammarBuilder::Finish(RuleId root, std::string_view where) {
  Grammar& g = *grammar_;
  g.root_ = root;
  for (std::size_t r = 0; r < bodies_.size() && !over_limit_; ++r) {
    g.rules_[r].start = NewState();
    const std::int32_t end = NewState();
    if (over_limit_) break;
    g.states_[Index(end)].accepts = true;
    Emit(bodies_[r], g.rules_[r].start, end);
  }
  if (over_limit_) {
    return Error{Code::kUnsupported,
                 fmt::format("{}: the schema is too large, a grammar has at most {} states", where,
                             kMaxStates)};
  }
  SortEdges();
  MakeClasses();
  FindNullable();
  for (const Repeat& r : g.repeats_) {
    K3_CHECK(!g.rule(r.rule).nullable, "a counted rule reads something");
  }
  K3_TRY(OrderRules(where));
  FindHeights();
  if (g.state(g.rule(root).start).height > kMaxNesting) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: no text of at most {} nested objects and arrays satisfies it",
                             where, kMaxNesting)};
  }
  return std::shared_ptr<const Grammar>(std::move(grammar_));
}

void GrammarBuilder::SortEdges() {
  Grammar& g = *grammar_;
  for (const auto& [from, edge] : pending_) ++g.states_[Index(from)].count;
  std::int32_t first = 0;
  for (State& s : g.states_) {
    s.first = first;
    first += s.count;
    s.count = 0;
  }
  g.edges_.resize(pending_.size());
  for (const auto& [from, edge] : pending_) {
    State& s = g.states_[Index(from)];
    g.edges_[Index(s.first + s.count++)] = edge;
    s.reads = s.reads || edge.kind == Edge::Kind::kRead;
  }
  pending_ = {};
}

void GrammarBuilder::MakeClasses() {
  Grammar& g = *grammar_;
  std::bitset<kSymbols + 1> starts;
  starts[0] = true;
  for (const Edge& e : g.edges_) {
    if (e.kind != Edge::Kind::kRead) continue;
    starts[static_cast<std::size_t>(e.lo)] = true;
    starts[static_cast<std::size_t>(e.hi) + 1] = true;
  }
  g.class_of_.resize(kSymbols);
  for (Symbol s = 0; s < kSymbols; ++s) {
    if (starts[Index(s)]) g.class_symbol_.push_back(s);
    g.class_of_[Index(s)] = g.n_classes() - 1;
  }
}

}  // namespace k3::grammar
