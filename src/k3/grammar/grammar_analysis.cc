// What GrammarBuilder::Finish finds out about the rules: which match the empty text, in which order
// they begin with each other, and how much nesting each place still needs.
#include <fmt/format.h>

#include <algorithm>

#include "k3/grammar/grammar.h"
#include "k3/io/json.h"

namespace k3::grammar {
namespace {

/// Edges by target state and calls by called rule, for walking backwards.
struct Reverse {
  explicit Reverse(const Grammar& g) : by_target(g.n_states()), by_callee(g.n_rules()), from(0) {
    for (std::int32_t s = 0; s < Int(g.n_states()); ++s) {
      for (const Edge& e : g.edges(g.state(s))) {
        const std::int32_t id = Int(from.size());
        from.push_back(s);
        edges.push_back(&e);
        by_target[Index(e.target)].push_back(id);
        if (e.kind == Edge::Kind::kCall) by_callee[Index(e.callee)].push_back(id);
        if (e.kind == Edge::Kind::kRepeat) {
          by_callee[Index(g.repeat(e.callee).rule)].push_back(id);
        }
      }
    }
  }
  std::vector<std::vector<std::int32_t>> by_target, by_callee;
  std::vector<std::int32_t> from;
  std::vector<const Edge*> edges;
};

RuleId Callee(const Grammar& g, const Edge& e) {
  return e.kind == Edge::Kind::kCall ? e.callee : g.repeat(e.callee).rule;
}

bool CanSkip(const Grammar& g, const Edge& e) {
  if (e.kind == Edge::Kind::kEmpty) return true;
  if (e.kind == Edge::Kind::kRead) return false;
  if (e.kind == Edge::Kind::kRepeat && g.repeat(e.callee).min == 0) return true;
  return g.rule(Callee(g, e)).nullable;
}

}  // namespace

void GrammarBuilder::FindNullable() {
  Grammar& g = *grammar_;
  const Reverse reverse(g);
  std::vector<RuleId> rule_of_start(g.n_states(), -1);
  for (std::size_t r = 0; r < g.n_rules(); ++r) rule_of_start[Index(g.rules_[r].start)] = Int(r);
  std::vector<bool> empty(g.n_states());  // the rule can end from here reading nothing
  std::vector<std::int32_t> todo;
  const auto mark = [&](std::int32_t s) {
    if (empty[Index(s)]) return;
    empty[Index(s)] = true;
    todo.push_back(s);
  };
  for (std::int32_t s = 0; s < Int(g.n_states()); ++s) {
    if (g.state(s).accepts) mark(s);
  }
  while (!todo.empty()) {
    const std::int32_t s = todo.back();
    todo.pop_back();
    for (const std::int32_t id : reverse.by_target[Index(s)]) {
      if (CanSkip(g, *reverse.edges[Index(id)])) mark(reverse.from[Index(id)]);
    }
    const RuleId rule = rule_of_start[Index(s)];
    if (rule < 0) continue;
    g.rules_[Index(rule)].nullable = true;
    for (const std::int32_t id : reverse.by_callee[Index(rule)]) {
      if (empty[Index(reverse.edges[Index(id)]->target)]) mark(reverse.from[Index(id)]);
    }
  }
}

/// Rules that `rule` can call before it has read anything.
std::vector<RuleId> GrammarBuilder::FirstCalls(RuleId rule, std::vector<std::int32_t>& mark) const {
  const Grammar& g = *grammar_;
  std::vector<RuleId> calls;
  std::vector<std::int32_t> todo{g.rule(rule).start};
  mark[Index(todo[0])] = rule;
  while (!todo.empty()) {
    const std::int32_t s = todo.back();
    todo.pop_back();
    for (const Edge& e : g.edges(g.state(s))) {
      if (e.kind == Edge::Kind::kCall || e.kind == Edge::Kind::kRepeat) {
        calls.push_back(Callee(g, e));
      }
      if (CanSkip(g, e) && mark[Index(e.target)] != rule) {
        mark[Index(e.target)] = rule;
        todo.push_back(e.target);
      }
    }
  }
  std::sort(calls.begin(), calls.end());
  calls.erase(std::unique(calls.begin(), calls.end()), calls.end());
  return calls;
}

Status GrammarBuilder::OrderRules(std::string_view where) {
  Grammar& g = *grammar_;
  std::vector<std::int32_t> mark(g.n_states(), -1);
  std::vector<std::vector<RuleId>> first(g.n_rules());
  for (std::size_t r = 0; r < g.n_rules(); ++r) first[r] = FirstCalls(Int(r), mark);
  std::vector<char> color(g.n_rules(), 0);  // 1: being visited, 2: done
  std::int32_t order = Int(g.n_rules());
  std::vector<std::pair<RuleId, std::size_t>> stack;
  for (std::size_t r = 0; r < g.n_rules(); ++r) {
    if (color[r] != 0) continue;
    stack.emplace_back(Int(r), 0);
    color[r] = 1;
    while (!stack.empty()) {
      auto& [rule, next] = stack.back();
      if (next == first[Index(rule)].size()) {
        color[Index(rule)] = 2;
        g.rules_[Index(rule)].order = --order;
        stack.pop_back();
        continue;
      }
      const RuleId callee = first[Index(rule)][next++];
      if (color[Index(callee)] == 1) {
        return Error{Code::kInvalidArgument,
                     fmt::format("{}: {} refers to itself without anything in between, so it "
                                 "describes no text",
                                 where, Printable(g.rule(callee).name))};
      }
      if (color[Index(callee)] == 0) {
        color[Index(callee)] = 1;
        stack.emplace_back(callee, 0);
      }
    }
  }
  return {};
}

/// Smallest height first, so that every state is settled once.
void GrammarBuilder::FindHeights() {
  Grammar& g = *grammar_;
  const Reverse reverse(g);
  std::vector<RuleId> rule_of_start(g.n_states(), -1);
  for (std::size_t r = 0; r < g.n_rules(); ++r) rule_of_start[Index(g.rules_[r].start)] = Int(r);
  for (State& s : g.states_) s.height = Grammar::kNever;
  std::vector<std::vector<std::int32_t>> buckets(kMaxNesting + 1);
  std::vector<bool> settled(g.n_states());
  const auto lower = [&](std::int32_t s, std::int32_t height) {
    if (height > kMaxNesting || height >= g.state(s).height) return;
    g.states_[Index(s)].height = height;
    buckets[Index(height)].push_back(s);
  };
  const auto relax = [&](std::int32_t id) {
    const Edge& e = *reverse.edges[Index(id)];
    const std::int32_t after = g.state(e.target).height;
    const std::int32_t from = reverse.from[Index(id)];
    const bool calls = e.kind == Edge::Kind::kCall || e.kind == Edge::Kind::kRepeat;
    if (!calls || (e.kind == Edge::Kind::kRepeat && g.repeat(e.callee).min == 0)) {
      lower(from, after);
    }
    if (!calls) return;
    const Rule& rule = g.rule(Callee(g, e));
    lower(from, std::max(after, g.state(rule.start).height + (rule.nests ? 1 : 0)));
  };
  for (std::int32_t s = 0; s < Int(g.n_states()); ++s) {
    if (g.state(s).accepts) lower(s, 0);
  }
  for (std::int32_t height = 0; height <= kMaxNesting; ++height) {
    auto& bucket = buckets[Index(height)];
    for (std::size_t i = 0; i < bucket.size(); ++i) {  // grows while it is read
      const std::int32_t s = bucket[i];
      if (settled[Index(s)]) continue;
      settled[Index(s)] = true;
      for (const std::int32_t id : reverse.by_target[Index(s)]) relax(id);
      if (rule_of_start[Index(s)] < 0) continue;
      for (const std::int32_t id : reverse.by_callee[Index(rule_of_start[Index(s)])]) relax(id);
    }
  }
}

}  // namespace k3::grammar
