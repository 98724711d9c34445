// k3 data prepare: text to token files for training.
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "k3/io/mapped_file.h"
#include "k3/train/token_data.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kDataHelp =
    "Writes OUT/train.tokens and OUT/valid.tokens and copies the tokenizer's files beside them.\n"
    "Documents are separated by NUL bytes, by blank lines, or are lines of JSON; which document\n"
    "goes to the validation part depends on its text alone.\n"
    "\nExamples:\n"
    "  k3 data prepare books.txt --out data\n"
    "  bzcat books.txt.bz2 | k3 data prepare - --out data --tokenizer MODEL\n"
    "  k3 data prepare posts.jsonl --split jsonl --key body --out data";

struct PrepareOptions {
  std::vector<std::string> inputs;
  std::string out, tokenizer, split = "nul", key = "text";
  double valid = 0.01;
};

/// FNV-1a of the text, as a fraction of 1.
double Draw(std::string_view text) {
  std::uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  return static_cast<double>(h >> 11) * 0x1.0p-53;
}

Result<TokenId> EndOfText(const Tokenizer& t) {
  for (const char* name : {"[EOS]", "<|end_of_text|>", "<|endoftext|>", "[EOT]"}) {
    if (const auto id = t.SpecialId(name)) return *id;
  }
  return Error{Code::kNotFound, "the tokenizer has no [EOS] to end documents with"};
}

Status AddFile(const PrepareOptions& o, const std::string& input, const Tokenizer& t, TokenId end,
               TokenFileBuilder& train, TokenFileBuilder& valid) {
  const DocumentSplit how = o.split == "nul"     ? DocumentSplit::kNul
                            : o.split == "blank" ? DocumentSplit::kBlankLine
                                                 : DocumentSplit::kJsonLines;
  std::vector<std::string> documents;
  if (input == "-") {
    K3_ASSIGN(const std::string text, ReadStdin(std::size_t{1} << 32));
    K3_ASSIGN(documents, SplitDocuments(text, how, o.key, "standard input"));
  } else {
    K3_ASSIGN(const MappedFile file, MappedFile::Open(input));
    K3_ASSIGN(documents, SplitDocuments(file.text(), how, o.key, input));
  }
  if (documents.empty()) {
    return Error{Code::kInvalidArgument, fmt::format("{}: holds no document", input)};
  }
  ProgressLine progress;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    if (Interrupted()) return Error{Code::kCancelled, "interrupted"};
    TokenFileBuilder& part = Draw(documents[i]) < o.valid ? valid : train;
    part.AddDocument(t.Encode(documents[i]), end, documents[i].size());
    progress.Show("documents", static_cast<std::int64_t>(i + 1),
                  static_cast<std::int64_t>(documents.size()));
  }
  return {};
}

Status CopyTokenizer(const std::string& from, const std::string& to) {
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
    const std::string path = from + "/" + name;
    if (!std::filesystem::exists(path)) continue;
    K3_ASSIGN(const MappedFile file, MappedFile::Open(path));
    K3_TRY(WriteFileAtomically(to + "/" + name, file.text()));
  }
  return {};
}

Status Prepare(const PrepareOptions& o) {
  K3_ASSIGN(const std::string dir, ResolveModel(o.tokenizer));
  K3_ASSIGN(const Tokenizer tokenizer, Tokenizer::Load(dir));
  K3_ASSIGN(const TokenId end, EndOfText(tokenizer));
  TokenFileBuilder train, valid;
  for (const std::string& input : o.inputs) {
    K3_TRY(AddFile(o, input, tokenizer, end, train, valid));
  }
  if (train.documents() == 0) {
    return Error{Code::kInvalidArgument, "no document is left to train on; lower --valid"};
  }
  std::error_code e;
  std::filesystem::create_directories(o.out, e);
  if (e) return Error{Code::kIo, fmt::format("{}: cannot create: {}", o.out, e.message())};
  const auto vocab = static_cast<std::int64_t>(tokenizer.vocab_size());
  K3_TRY(train.Write(o.out + "/train.tokens", vocab));
  K3_TRY(valid.Write(o.out + "/valid.tokens", vocab));
  K3_TRY(CopyTokenizer(dir, o.out));
  if (valid.documents() == 0) Warn("no document fell into the validation part");
  return WriteOut(fmt::format("train: {} documents, {} tokens\nvalid: {} documents, {} tokens\n",
                              train.documents(), train.tokens(), valid.documents(),
                              valid.tokens()));
}

}  // namespace

void AddData(CLI::App& root, Action& action) {
  auto o = std::make_shared<PrepareOptions>();
  CLI::App* data = root.add_subcommand("data", "Prepare text for training");
  data->require_subcommand(1);
  CLI::App* app = data->add_subcommand("prepare", "Turn texts into token files");
  app->footer(std::string(kDataHelp) + kExitCodesHelp);
  app->add_option("INPUT", o->inputs, "Text files; \"-\" reads standard input")->required();
  app->add_option("-o,--out", o->out, "Folder to write")->required()->type_name("DIR");
  app->add_option("--tokenizer", o->tokenizer, "Model folder whose tokenizer is used [demo model]")
      ->type_name("MODEL");
  app->add_option("--split", o->split, "What separates documents: nul, blank or jsonl")
      ->check(OneOf({"nul", "blank", "jsonl"}));
  app->add_option("--key", o->key, "Key of the text in a JSON line");
  AddReal(*app, "--valid", o->valid, {0.0, 0.9}, "Share of documents kept for validation");
  app->callback([o, &action] {
    action = [o] {
      const Status s = Prepare(*o);
      return s.ok() ? kExitOk : Fail(s.error());
    };
  });
}

}  // namespace k3::app
