// k3: dispatch to the commands. Everything a command does lives in its own file or in the library.
#include <fmt/format.h>

#include <new>
#include <sstream>
#include <vector>

#include "commands.h"
#include "exit_codes.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  k3 run -p \"Once upon a time\" -n 60\n"
    "  k3 chat MODEL\n"
    "  k3 serve MODEL --port 8080\n"
    "  k3 tokenize -p \"Hello, world\"\n"
    "  k3 eval ppl --text books.txt --docs 8\n"
    "Without MODEL a command uses the demo model, or the folder that K3_MODEL names.";

std::vector<std::string> CommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(sub->get_name());
  }
  return names;
}

/// No first word, or one that is no command: says so and names the nearest one.
bool UnknownCommand(const CLI::App& app, int argc, char** argv) {
  const std::string word = argc < 2 ? "" : argv[1];
  if (word == "-h" || word == "--help" || word == "--version") return false;
  if (argc < 2 || word.starts_with('-')) {
    Complain(argc < 2
                 ? "no command given; k3 --help lists them"
                 : fmt::format("found \"{}\", expected a command; k3 --help lists them", word));
    return true;
  }
  const auto names = CommandNames(app);
  for (const std::string& name : names) {
    if (name == word) return false;
  }
  const std::string nearest = Nearest(word, names);
  Complain(fmt::format("no command \"{}\"{}; k3 --help lists them", word,
                       nearest.empty() ? "" : fmt::format(", did you mean \"{}\"?", nearest)));
  return true;
}

/// For an option that does not exist: the nearest one that does.
std::string OptionHint(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  for (const std::string& word : app.remaining()) {
    const std::string nearest = word.starts_with("--") ? Nearest(word, names) : "";
    if (!nearest.empty()) return fmt::format(", did you mean {}?", nearest);
  }
  return {};
}

int Usage(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream out, err;
  if (error.get_exit_code() == 0) {  // --help, --version
    app.exit(error, out, err);
    const Status written = WriteOut(out.str());
    return written.ok() ? kExitOk : Fail(written.error());
  }
  const CLI::App* used = &app;
  std::string words;
  while (!used->get_subcommands().empty()) {
    used = used->get_subcommands().front();
    words += used->get_name() + " ";
  }
  Complain(UsageWords(error.what()) + OptionHint(*used));
  Say(fmt::format("Try: k3 {}--help\n", words));
  return kExitUsage;
}

int Main(int argc, char** argv) {
  OpenStandardFiles();
  InstallSignalHandlers();
  CLI::App app("Runs, checks and measures models of the Kimi K3 family.", "k3");
  app.set_version_flag("--version", "k3 " K3_VERSION, "Print the version");
  app.set_help_flag("-h,--help", "Print this help");
  app.require_subcommand(1);
  app.footer(std::string(kFooter) + kExitCodesHelp);
  Action action;
  AddRun(app, action);
  AddChat(app, action);
  AddServe(app, action);
  AddTokenize(app, action);
  AddEval(app, action);
  AddTrace(app, action);
  AddBench(app, action);
  AddInspect(app, action);
  AddPlan(app, action);
  AddCheck(app, action);
  AddQuantize(app, action);
  AddInfo(app, action);
  AddData(app, action);
  AddTrain(app, action);
  AddAblate(app, action);
  RefuseEmptyPaths(app);
  if (UnknownCommand(app, argc, argv)) return kExitUsage;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return Usage(app, error);
  }
  return action();
}

}  // namespace
}  // namespace k3::app

int main(int argc, char** argv) {
  try {
    return k3::app::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    k3::app::Complain("not enough memory");
    return k3::app::kExitResource;
  } catch (const std::exception& e) {
    k3::app::Complain(e.what());
    return k3::app::kExitFailed;
  }
}
