// Command line options with strict values: no rounding, no wrapping, no trailing text.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"

namespace k3::app {

/// A decimal integer in [low, high]; the message names what was found and expected.
Result<std::int64_t> ParseInteger(std::string_view text, std::int64_t low, std::int64_t high);
/// A finite decimal number in [low, high].
Result<double> ParseReal(std::string_view text, double low, double high);

struct IntRange {
  std::int64_t low, high;
};
struct RealRange {
  double low, high;
};

/// Options whose bad values end the program with exit status 2 and a message naming the option.
CLI::Option* AddInteger(CLI::App& app, const std::string& name, std::int64_t& value, IntRange range,
                        const std::string& help);
CLI::Option* AddReal(CLI::App& app, const std::string& name, double& value, RealRange range,
                     const std::string& help);
/// A number of bytes with or without a unit.
CLI::Option* AddBytes(CLI::App& app, const std::string& name, std::int64_t& value,
                      const std::string& help);
/// --memory BYTES with units; 0 stays when it is not given.
CLI::Option* AddMemory(CLI::App& app, std::int64_t& value);
CLI::Option* AddSeed(CLI::App& app, std::uint64_t& value);

/// A check that the value is one of `words`.
CLI::Validator OneOf(std::vector<std::string> words);

/// Makes an empty value of every option of type FILE or DIR, here and in subcommands, a refusal: it
/// is a shell variable that was not set, and must not mean "not given".
void RefuseEmptyPaths(CLI::App& app);

/// What CLI11 says of a missing or repeated value, in our words; any other text as it is.
std::string UsageWords(const std::string& what);

/// A list of token ids for ParseIds; one given on the command line is checked at once.
CLI::Option* AddIds(CLI::App& app, const std::string& name, std::optional<std::string>& value,
                    const std::string& help, const std::string& item = "token id");

/// "1,2,3", or "@FILE" with such a list; blanks and line ends separate too. Ids are not compared
/// with a vocabulary here. Messages call an entry `item`.
Result<std::vector<TokenId>> ParseIds(const std::string& text, std::string_view item = "token id");
/// "ID=VALUE"
Result<std::pair<TokenId, double>> ParseBias(std::string_view text);

/// The candidate closest to `word` if a slip of the keyboard explains it, else "".
std::string Nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace k3::app
