// k3 chat: a conversation on a terminal or through a pipe.
#include <fmt/format.h>
#include <unistd.h>

#include <limits>

#include "chat_screen.h"
#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/chat/format.h"
#include "k3/chat/openai.h"
#include "k3/io/json.h"
#include "k3/io/mapped_file.h"
#include "k3/runtime/conversation.h"
#include "line_reader.h"
#include "options.h"
#include "output.h"
#include "sampling.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kChatHelp =
    "Each line is one turn. Models with the family's chat format think first, then answer; others\n"
    "continue the text. tokenizer_config.json may decide with \"chat_format\": \"xtml\" or "
    "\"none\";\n"
    "otherwise a model chats that has the format's four control tokens and no add_bos_token.\n"
    "In a pipe only the answers go to standard output, each ended by a line end.\n"
    "Ctrl-C stops a reply and keeps what is there; Ctrl-D or /exit leaves.\n"
    "\nCommands: /retry /undo /reset /system TEXT /save FILE /load FILE /help /exit\n"
    "\nExamples:\n"
    "  k3 chat\n"
    "  k3 chat MODEL --system \"Answer in one sentence.\" --temp 0.7\n"
    "  printf 'Hello\\nAnd now?\\n' | k3 chat MODEL -n 200";

constexpr const char* kCommands =
    "/retry        answer the last question again\n"
    "/undo         take back the last question and its answer\n"
    "/reset        forget the conversation, keep the system text\n"
    "/system TEXT  set the system text (none: remove it); the conversation stays\n"
    "/save FILE    write the conversation as JSON\n"
    "/load FILE    read one back\n"
    "/exit         leave, as does Ctrl-D; Ctrl-C stops a reply\n"
    "A line that begins with // is a question that begins with /.";

constexpr std::size_t kMaxHistory = std::size_t{1} << 26;  // bytes of a file for /load
constexpr std::int64_t kManyTokens = std::numeric_limits<std::int32_t>::max();

struct ChatCommandOptions {
  EngineOptions engine;
  SamplingOptions sampling;
  std::int64_t max_tokens = 512;
  std::string system, effort;
  bool raw = false, chat = false, no_thinking = false;
  std::optional<bool> think_output;
};

class Chat {
 public:
  Chat(Conversation conversation, ChatScreen screen)
      : conversation_(std::move(conversation)), screen_(screen) {}

  int Run();

 private:
  enum class Next { kGoOn, kLeave };

  Result<Next> Handle(const std::string& line);
  Result<Next> Command(std::string_view name, const std::string& rest);
  Status Ask(const std::string& text, bool again);
  Status Save(const std::string& path);
  Status Load(const std::string& path);
  Status Shown(Status status);

  Conversation conversation_;
  ChatScreen screen_;
};

/// In a pipe the first error ends the program; at a terminal it is shown and the talk goes on.
Status Chat::Shown(Status status) {
  if (status.ok() || !screen_.interactive() || status.message().empty()) return status;
  screen_.Note(status.message());
  return {};
}

Status Chat::Ask(const std::string& text, bool again) {
  ProgressLine progress;
  ReplyEvents events;
  events.on_prefill = [&](std::int64_t done, std::int64_t total) {
    progress.Show("reading", done, total);
  };
  events.on_reasoning = [&](std::string_view piece) {
    progress.Clear();
    return screen_.Reasoning(piece);
  };
  events.on_content = [&](std::string_view piece) {
    progress.Clear();
    return screen_.Content(piece);
  };
  const auto reply = again ? conversation_.Retry(events) : conversation_.Send(text, events);
  progress.Clear();
  if (!reply.ok()) {
    (void)screen_.EndReply(false).ok();
    return Shown(reply.status());
  }
  for (const chat::ToolCall& call : reply->tool_calls) {
    K3_TRY(screen_.Content(fmt::format("\n[{} {}]", call.name, call.arguments)));
  }
  K3_TRY(screen_.EndReply(true));
  if (!screen_.interactive()) return {};
  if (reply->finish == FinishReason::kCancelled) screen_.Note("(stopped)");
  if (reply->finish == FinishReason::kLength) screen_.Note("(the limit of tokens is reached)");
  return {};
}

Status Chat::Save(const std::string& path) {
  const std::string text =
      fmt::format("{{\"messages\": {}}}\n", chat::MessagesText(conversation_.messages()));
  return WriteFileAtomically(path, text);
}

Status Chat::Load(const std::string& path) {
  K3_ASSIGN(const std::string text, ReadTextFile(path, kMaxHistory));
  K3_ASSIGN(const nlohmann::json json, ParseJson(text, path));
  const bool wrapped = json.is_object() && json.contains("messages");
  const nlohmann::json& list = wrapped ? json["messages"] : json;
  std::vector<chat::Message> messages;
  if (!list.is_array() || !list.empty()) {  // an empty conversation can be saved
    if (const auto error = chat::ParseMessages(list, messages)) {
      return Error{error->code, fmt::format("{}: {}: {}", path, error->param, error->message)};
    }
  }
  const Status loaded = conversation_.Load(std::move(messages));
  return loaded.ok() ? loaded : Status(Error{loaded.error().code, path + ": " + loaded.message()});
}

Result<Chat::Next> Chat::Command(std::string_view name, const std::string& rest) {
  const bool needs_file = name == "/save" || name == "/load";
  if (needs_file && rest.empty()) {
    K3_TRY(Shown(Error{Code::kInvalidArgument, fmt::format("{} needs a file name", name)}));
  } else if (name == "/exit" || name == "/quit") {
    return Next::kLeave;
  } else if (name == "/help") {
    screen_.Note(kCommands);
  } else if (name == "/retry") {
    K3_TRY(Ask("", true));
  } else if (name == "/undo") {
    const bool undone = conversation_.Undo();
    if (!undone) {
      K3_TRY(Shown(Error{Code::kInvalidArgument, "/undo: there is nothing to take back"}));
    } else if (screen_.interactive()) {
      screen_.Note(fmt::format("(taken back; {} turns are left)", conversation_.n_turns()));
    }
  } else if (name == "/reset") {
    K3_TRY(Shown(conversation_.Reset()));
  } else if (name == "/system") {
    K3_TRY(Shown(conversation_.SetSystem(rest)));
  } else if (name == "/save") {
    K3_TRY(Shown(Save(rest)));
  } else if (name == "/load") {
    K3_TRY(Shown(Load(rest)));
  } else {
    const std::vector<std::string> names{"/retry", "/undo", "/reset", "/system",
                                         "/save",  "/load", "/help",  "/exit"};
    const std::string nearest = Nearest(name, names);
    K3_TRY(Shown(
        Error{Code::kInvalidArgument,
              fmt::format("no command \"{}\"{}; /help lists them", name,
                          nearest.empty() ? "" : fmt::format(", did you mean {}?", nearest))}));
  }
  return Next::kGoOn;
}

Result<Chat::Next> Chat::Handle(const std::string& line) {
  if (line.find_first_not_of(" \t") == line.npos) return Next::kGoOn;
  if (line[0] == '/' && line.starts_with("//")) {
    K3_TRY(Ask(line.substr(1), false));
    return Next::kGoOn;
  }
  if (line[0] != '/') {
    K3_TRY(Ask(line, false));
    return Next::kGoOn;
  }
  const std::size_t space = line.find(' ');
  std::string rest = space == line.npos ? "" : line.substr(space + 1);
  rest.erase(0, rest.find_first_not_of(' '));
  rest.erase(rest.find_last_not_of(' ') + 1);
  return Command(line.substr(0, space), rest);
}

int Chat::Run() {
  LineReader reader;
  std::string line;
  for (;;) {
    if (const Status s = screen_.Prompt(); !s.ok()) return Fail(s.error());
    const auto event = reader.Next(line);
    if (!event.ok()) return Fail(event.error());
    if (*event == LineReader::Event::kEnd) {
      if (screen_.interactive()) (void)WriteOut("\n").ok();
      return kExitOk;
    }
    if (*event == LineReader::Event::kInterrupted) {
      if (!screen_.interactive() || Terminated()) return kExitInterrupted;
      ForgetInterrupt();
      screen_.Note("\n(Ctrl-D or /exit leaves)");
      continue;
    }
    const auto next = Handle(line);
    if (!next.ok()) return Fail(next.error());
    if (*next == Next::kLeave) return kExitOk;
    if (Interrupted().load() && (!screen_.interactive() || Terminated())) return kExitInterrupted;
    ForgetInterrupt();
  }
}

Result<Conversation> Start(const ChatCommandOptions& o, Engine& engine) {
  ConversationOptions c;
  K3_ASSIGN(c.generate, BaseGenerateOptions(o.sampling, o.engine, engine));
  c.generate.max_tokens = o.max_tokens;
  c.seed = o.sampling.params.seed;
  c.thinking = !o.no_thinking;
  K3_ASSIGN(const bool speaks, chat::SpeaksChat(*engine.tokenizer, engine.dir));
  c.chat_format = o.chat || (speaks && !o.raw);
  if (!o.effort.empty()) c.effort = chat::ParseEffort(o.effort);
  if (c.chat_format) {
    K3_ASSIGN(c.bodies, chat::LoadBodies(engine.dir));
  } else if (engine.tokenizer->add_bos()) {
    c.bos = engine.bos;
    if (c.bos.has_value()) K3_TRY(CheckIds({*c.bos}, engine.model->config().vocab));
  }
  K3_ASSIGN(Conversation conversation,
            Conversation::Create(*engine.runner, *engine.tokenizer, std::move(c)));
  if (!o.system.empty()) K3_TRY(conversation.SetSystem(o.system));
  return conversation;
}

int Run(const ChatCommandOptions& o) {
  int exit_code = kExitOk;
  const auto engine = LoadEngine(o.engine, exit_code);
  if (engine == nullptr) return exit_code;
  auto conversation = Start(o, *engine);
  if (!conversation.ok()) return Fail(conversation.error());
  const bool interactive = isatty(STDIN_FILENO) == 1 && StdoutIsTerminal();
  ChatScreen screen(interactive, o.think_output.value_or(interactive));
  if (interactive) {
    screen.Note(fmt::format("{}: {}. /help lists the commands.", engine->dir,
                            conversation->chat_format() ? "chat" : "plain text, continued"));
  }
  return Chat(std::move(conversation).value(), screen).Run();
}

}  // namespace

void AddChat(CLI::App& root, Action& action) {
  auto o = std::make_shared<ChatCommandOptions>();
  CLI::App* app = root.add_subcommand("chat", "Talk with a model");
  app->footer(std::string(kChatHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  app->add_option("--system", o->system, "System text in front of the conversation")
      ->type_name("TEXT");
  AddInteger(*app, "-n,--max-tokens", o->max_tokens, {1, kManyTokens},
             "Most tokens of one reply, thoughts included (default 512)");
  auto* at_once =
      app->add_flag("--no-thinking", o->no_thinking, "Answer at once, without a think element");
  app->add_option("--effort", o->effort, "How much to think: low, medium, high or max")
      ->check(OneOf({"low", "medium", "high", "max"}))
      ->type_name("LEVEL")
      ->excludes(at_once);
  auto* shown = app->add_flag_callback(
      "--think-output", [o] { o->think_output = true; },
      "Print the thoughts (default: on a terminal only)");
  app->add_flag_callback(
         "--no-think-output", [o] { o->think_output = false; }, "Print no thoughts")
      ->excludes(shown);
  auto* raw = app->add_flag("--raw", o->raw, "Continue plain text, whatever the model");
  app->add_flag("--chat", o->chat, "Use the chat format, whatever the model")->excludes(raw);
  AddSamplingOptions(*app, o->sampling);
  AddEngineOptions(*app, o->engine, true);
  app->callback([o, &action] { action = [o] { return Run(*o); }; });
}

}  // namespace k3::app
