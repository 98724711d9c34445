#include "options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "k3/base/memory.h"
#include "k3/io/mapped_file.h"

namespace k3::app {
namespace {

template <class T>
bool ParseAll(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

/// Insertions, deletions, replacements and swaps of neighbours that turn a into b.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({row[j - 1] + 1, last[j] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

/// Turns an Error into what CLI11 expects of a refused value.
[[noreturn]] void Refuse(const std::string& name, const std::string& message) {
  throw CLI::ValidationError(name, message);
}

/// "-n,--max-tokens" -> "--max-tokens"
std::string LongName(const std::string& name) { return name.substr(name.rfind(',') + 1); }

}  // namespace

Result<std::int64_t> ParseInteger(std::string_view text, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  if (ParseAll(text, value) && value >= low && value <= high) return value;
  return Error{Code::kInvalidArgument,
               fmt::format("found \"{}\", expected an integer from {} to {}", text, low, high)};
}

Result<double> ParseReal(std::string_view text, double low, double high) {
  double value = 0;
  if (ParseAll(text, value) && std::isfinite(value) && value >= low && value <= high) return value;
  return Error{Code::kInvalidArgument,
               fmt::format("found \"{}\", expected a number from {} to {}", text, low, high)};
}

CLI::Option* AddInteger(CLI::App& app, const std::string& name, std::int64_t& value, IntRange range,
                        const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [&value, range, name](const std::string& text) {
            auto parsed = ParseInteger(text, range.low, range.high);
            if (!parsed.ok()) Refuse(LongName(name), parsed.message());
            value = *parsed;
          },
          help)
      ->type_name("N");
}

CLI::Option* AddReal(CLI::App& app, const std::string& name, double& value, RealRange range,
                     const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [&value, range, name](const std::string& text) {
            auto parsed = ParseReal(text, range.low, range.high);
            if (!parsed.ok()) Refuse(LongName(name), parsed.message());
            value = *parsed;
          },
          help)
      ->type_name("X");
}

CLI::Option* AddBytes(CLI::App& app, const std::string& name, std::int64_t& value,
                      const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [&value, name](const std::string& text) {
            auto parsed = ParseBytes(text);
            if (!parsed.ok()) Refuse(name, parsed.message());
            value = *parsed;
          },
          help)
      ->type_name("BYTES");
}

CLI::Option* AddMemory(CLI::App& app, std::int64_t& value) {
  return AddBytes(app, "--memory", value,
                  "Memory to plan with, such as 512M, 64G or 64Gi (default: what the machine or "
                  "the control group has left)");
}

CLI::Option* AddSeed(CLI::App& app, std::uint64_t& value) {
  return app
      .add_option_function<std::string>(
          "--seed",
          [&value](const std::string& text) {
            if (ParseAll(text, value)) return;
            Refuse("--seed", fmt::format("found \"{}\", expected an integer from 0 to {}", text,
                                         std::numeric_limits<std::uint64_t>::max()));
          },
          "Start of the random stream; the same seed gives the same text (default 0)")
      ->type_name("N");
}

CLI::Validator OneOf(std::vector<std::string> words) {
  const std::string listed = fmt::format("{{{}}}", fmt::join(words, ","));
  return CLI::Validator(
      [words = std::move(words)](std::string& text) {
        if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
        return fmt::format("found \"{}\", expected {}", text, fmt::join(words, " or "));
      },
      listed);
}

void RefuseEmptyPaths(CLI::App& app) {
  for (CLI::App* sub : app.get_subcommands([](CLI::App*) { return true; })) RefuseEmptyPaths(*sub);
  for (CLI::Option* option : app.get_options([](CLI::Option*) { return true; })) {
    const std::string type = option->get_type_name();
    if (type != "FILE" && type != "DIR") continue;
    option->check([type](const std::string& text) {
      return text.empty()
                 ? fmt::format("found \"\", expected a {}", type == "DIR" ? "folder" : "file")
                 : std::string();
    });
  }
}

std::string UsageWords(const std::string& what) {
  const std::size_t colon = what.find(": ");
  if (colon == what.npos) return what;
  const std::string option = what.substr(0, colon + 2), rest = what.substr(colon + 2);
  constexpr std::string_view kOnce = "At Most 1 required but received ", kMissing = "1 required ";
  if (rest.starts_with(kOnce)) {
    return fmt::format("{}found {} times, expected once", option, rest.substr(kOnce.size()));
  }
  if (rest.starts_with(kMissing) && rest.ends_with(" missing")) {
    const std::string type = rest.substr(kMissing.size(), rest.rfind(' ') - kMissing.size());
    return fmt::format("{}found nothing, expected {}", option, type);
  }
  return what;
}

CLI::Option* AddIds(CLI::App& app, const std::string& name, std::optional<std::string>& value,
                    const std::string& help, const std::string& item) {
  return app
      .add_option_function<std::string>(
          name,
          [&value, name, item](const std::string& text) {
            // A file's content is bad input, not a bad command line: it is read later.
            if (text == "@") Refuse(LongName(name), "found \"@\", expected a file behind it");
            if (!text.starts_with('@')) {
              const auto ids = ParseIds(text, item);
              if (!ids.ok()) Refuse(LongName(name), ids.message());
            }
            value = text;
          },
          help + ": 1,2,3 or @FILE with such a list")
      ->type_name("IDS");
}

Result<std::vector<TokenId>> ParseIds(const std::string& text, std::string_view item) {
  std::string list = text;
  std::string where;
  if (text.starts_with('@')) {
    where = text.substr(1) + ": ";
    K3_ASSIGN(list, ReadTextFile(text.substr(1)));
  }
  constexpr std::string_view kSeparators = ", \t\r\n";
  std::vector<TokenId> ids;
  std::string_view rest = list;
  while (!rest.empty()) {
    const std::size_t start = rest.find_first_not_of(kSeparators);
    if (start == std::string_view::npos) break;
    const auto commas = std::count(rest.begin(), rest.begin() + static_cast<long>(start), ',');
    if (commas > (ids.empty() ? 0 : 1)) {
      return Error{Code::kInvalidArgument, fmt::format("{}{} {}: found nothing before a comma",
                                                       where, item, ids.size() + 1)};
    }
    rest.remove_prefix(start);
    const std::size_t end = std::min(rest.find_first_of(kSeparators), rest.size());
    const auto id = ParseInteger(rest.substr(0, std::min<std::size_t>(end, 40)), 0,
                                 std::numeric_limits<TokenId>::max());
    if (!id.ok()) {
      return Error{Code::kInvalidArgument,
                   fmt::format("{}{} {}: {}", where, item, ids.size() + 1, id.message())};
    }
    ids.push_back(static_cast<TokenId>(*id));
    rest.remove_prefix(end);
  }
  return ids;
}

Result<std::pair<TokenId, double>> ParseBias(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos) {
    return Error{Code::kInvalidArgument, fmt::format("found \"{}\", expected ID=VALUE", text)};
  }
  K3_ASSIGN(const std::int64_t id,
            ParseInteger(text.substr(0, equals), 0, std::numeric_limits<TokenId>::max()));
  K3_ASSIGN(const double value, ParseReal(text.substr(equals + 1), -100, 100));
  return std::pair{static_cast<TokenId>(id), value};
}

std::string Nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance =
      std::max<std::size_t>(1, std::min<std::size_t>(3, word.size() / 2)) + 1;
  for (const std::string& c : candidates) {
    std::size_t d = EditDistance(word, c);
    if (word.size() >= 2 && c.starts_with(word)) d = std::min<std::size_t>(d, 1);
    if (d < best_distance) best_distance = d, best = c;
  }
  return best;
}

}  // namespace k3::app
