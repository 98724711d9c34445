#include "k3/runtime/stop.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

bool IsUtf8(std::string_view text) {
  Utf8Stream stream;
  std::string round_trip = stream.Push(text);
  round_trip += stream.Finish();
  return round_trip == text;
}

std::vector<std::size_t> Borders(const std::string& text) {
  std::vector<std::size_t> border(text.size(), 0);
  std::size_t k = 0;
  for (std::size_t i = 1; i < text.size(); ++i) {
    while (k > 0 && text[i] != text[k]) k = border[k - 1];
    if (text[i] == text[k]) ++k;
    border[i] = k;
  }
  return border;
}

}  // namespace

Result<StopMatcher> StopMatcher::Create(std::vector<std::string> stops) {
  StopMatcher matcher;
  for (std::size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty()) {
      return Error{Code::kInvalidArgument, fmt::format("stop string {} is empty", i + 1)};
    }
    if (!IsUtf8(stops[i])) {
      return Error{Code::kInvalidArgument, fmt::format("stop string {} is not UTF-8", i + 1)};
    }
    Pattern p;
    p.border = Borders(stops[i]);
    p.text = std::move(stops[i]);
    matcher.patterns_.push_back(std::move(p));
  }
  return matcher;
}

std::string StopMatcher::Push(std::string_view text) {
  if (stopped_) return {};
  if (patterns_.empty()) return std::string(text);
  for (const char c : text) {
    held_ += c;
    const Pattern* match = nullptr;
    for (Pattern& p : patterns_) {
      while (p.length > 0 && p.text[p.length] != c) p.length = p.border[p.length - 1];
      if (p.text[p.length] == c) ++p.length;
      if (p.length < p.text.size()) continue;
      if (match == nullptr || p.text.size() > match->text.size()) match = &p;
    }
    if (match != nullptr) {
      stopped_ = true;
      matched_ = match->text;
      held_.resize(held_.size() - match->text.size());
      return std::exchange(held_, {});
    }
  }
  std::size_t keep = 0;
  for (const Pattern& p : patterns_) keep = std::max(keep, p.length);
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopMatcher::Finish() { return std::exchange(held_, {}); }

}  // namespace k3
