// k3 data prepare: text to token files for training.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "k3/base/memory.h"
#include "k3/io/decompress.h"
#include "k3/io/mapped_file.h"
#include "k3/tokenizer/bpe_train.h"
#include "k3/train/token_data.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kDataHelp =
    "Writes OUT/train.tokens and OUT/valid.tokens and copies the tokenizer's files beside them.\n"
    "Inputs compressed with gzip, bzip2, xz or zstd are unpacked, whatever they are called.\n"
    "--train-tokenizer learns N ranks from the part to train on; the model's config.json then\n"
    "needs vocab_size N + 256, for the control tokens, bos_token_id N and eos_token_id N + 1.\n"
    "Documents are separated by NUL bytes, by blank lines, or are lines of JSON; which document\n"
    "goes to the validation part depends on its text alone.\n"
    "\nExamples:\n"
    "  k3 data prepare books.txt --out data\n"
    "  k3 data prepare books.txt.bz2 --out data --tokenizer MODEL\n"
    "  k3 data prepare books.txt.zst --out data --train-tokenizer 3840\n"
    "  k3 data prepare posts.jsonl --split jsonl --key body --out data";

struct PrepareOptions {
  std::vector<std::string> inputs;
  std::string out, tokenizer, split = "nul", key = "text";
  double valid = 0.01;
  std::int64_t train_tokenizer = 0;  // ranks; 0: use one that exists
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

/// Of one input, unpacked.
std::size_t MostBytes() {
  const std::int64_t memory = UsableMemory().bytes;
  return memory > 0 ? static_cast<std::size_t>(memory) / 2 : std::size_t{1} << 36;
}

Result<std::vector<std::string>> Documents(const PrepareOptions& o, const std::string& input) {
  const DocumentSplit how = o.split == "nul"     ? DocumentSplit::kNul
                            : o.split == "blank" ? DocumentSplit::kBlankLine
                                                 : DocumentSplit::kJsonLines;
  const std::string where = input == "-" ? "standard input" : input;
  std::string text;
  MappedFile file;
  if (input == "-") {
    K3_ASSIGN(text, ReadStdin(std::size_t{1} << 32));
  } else {
    K3_ASSIGN(file, MappedFile::Open(input));
  }
  std::string_view view = input == "-" ? std::string_view(text) : file.text();
  std::string unpacked;
  if (!CompressionOf(view).empty()) {
    K3_ASSIGN(unpacked, Decompress(view, MostBytes(), where));
    view = unpacked;
  }
  if (how != DocumentSplit::kJsonLines && where.find(".jsonl") != where.npos) {
    Warn(where + " is not read as lines of JSON; --split jsonl does that");
  }
  K3_ASSIGN(auto documents, SplitDocuments(view, how, o.key, where));
  if (documents.empty()) {
    return Error{Code::kInvalidArgument, fmt::format("{}: holds no document", where)};
  }
  return documents;
}

/// Calls fn(document, is for validation) for all documents, with a progress line. Texts are kept in
/// `kept` when it is set: standard input can be read once only.
template <class F>
Status ForEachDocument(const PrepareOptions& o, const char* doing,
                       std::vector<std::vector<std::string>>& kept, F&& fn) {
  ProgressLine progress;
  for (std::size_t f = 0; f < o.inputs.size(); ++f) {
    std::vector<std::string> read;
    if (f >= kept.size()) {
      K3_ASSIGN(read, Documents(o, o.inputs[f]));
      if (o.train_tokenizer > 0) kept.push_back(std::move(read));
    }
    const std::vector<std::string>& documents = f < kept.size() ? kept[f] : read;
    for (std::size_t i = 0; i < documents.size(); ++i) {
      if (Interrupted()) return Error{Code::kCancelled, "interrupted"};
      fn(documents[i], Draw(documents[i]) < o.valid);
      progress.Show(doing, static_cast<std::int64_t>(i + 1),
                    static_cast<std::int64_t>(documents.size()));
    }
  }
  return {};
}

constexpr const char *kRanks = "tiktoken.model", *kConfig = "tokenizer_config.json";

Result<TokenizerFiles> LearnTokenizer(const PrepareOptions& o,
                                      std::vector<std::vector<std::string>>& kept) {
  BpeTrainer trainer;
  K3_TRY(ForEachDocument(o, "pieces of documents", kept, [&](const std::string& text, bool valid) {
    if (!valid) trainer.Add(text);
  }));
  return trainer.Train(static_cast<std::size_t>(o.train_tokenizer));
}

Result<TokenizerFiles> ReadTokenizer(const std::string& dir) {
  TokenizerFiles files;
  K3_ASSIGN(files.ranks, ReadTextFile(dir + "/" + kRanks));
  const std::string config = dir + "/" + kConfig;
  if (std::filesystem::exists(config)) {
    K3_ASSIGN(files.config, ReadTextFile(config));
  }
  return files;
}

Status WriteTokenizer(const TokenizerFiles& files, const std::string& to) {
  K3_TRY(WriteFileAtomically(to + "/" + kRanks, files.ranks));
  if (files.config.empty()) return {};
  return WriteFileAtomically(to + "/" + kConfig, files.config);
}

Status Prepare(const PrepareOptions& o) {
  std::vector<std::vector<std::string>> kept;
  TokenizerFiles files;
  std::optional<Tokenizer> tokenizer;
  if (o.train_tokenizer > 0) {
    if (!o.tokenizer.empty()) {
      return Error{Code::kInvalidArgument, "--train-tokenizer and --tokenizer exclude each other"};
    }
    K3_ASSIGN(files, LearnTokenizer(o, kept));
    K3_ASSIGN(tokenizer, Tokenizer::Parse(files.ranks, files.config, "the learned tokenizer"));
  } else {
    K3_ASSIGN(const std::string dir, ResolveModel(o.tokenizer));
    K3_ASSIGN(tokenizer, Tokenizer::Load(dir));
    K3_ASSIGN(files, ReadTokenizer(dir));
  }
  K3_ASSIGN(const TokenId end, EndOfText(*tokenizer));
  // What k3 run and k3 eval put in front of a text has to be learned.
  std::optional<TokenId> begin;
  if (tokenizer->add_bos()) begin = tokenizer->SpecialId("[BOS]");
  TokenFileBuilder train, valid;
  K3_TRY(ForEachDocument(o, "documents", kept, [&](const std::string& text, bool is_valid) {
    std::vector<TokenId> ids = tokenizer->Encode(text);
    if (begin) ids.insert(ids.begin(), *begin);
    (is_valid ? valid : train).AddDocument(ids, end, text.size());
  }));
  if (train.documents() == 0) {
    return Error{Code::kInvalidArgument, "no document is left to train on; lower --valid"};
  }
  std::error_code e;
  std::filesystem::create_directories(o.out, e);
  if (e) return Error{Code::kIo, fmt::format("{}: cannot create: {}", o.out, e.message())};
  const auto vocab = static_cast<std::int64_t>(tokenizer->vocab_size());
  K3_TRY(train.Write(o.out + "/train.tokens", vocab));
  K3_TRY(valid.Write(o.out + "/valid.tokens", vocab));
  K3_TRY(WriteTokenizer(files, o.out));
  if (valid.documents() == 0) Warn("no document fell into the validation part");
  return WriteOut(
      fmt::format("train: {} documents, {} tokens\nvalid: {} documents, {} tokens\nvocabulary: {}\n"
                  "documents begin with {} and end with {}\n",
                  train.documents(), train.tokens(), valid.documents(), valid.tokens(), vocab,
                  begin ? fmt::format("token {}", *begin) : "their text", end));
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
  AddInteger(*app, "--train-tokenizer", o->train_tokenizer,
             {static_cast<std::int64_t>(BpeTrainer::kMinRanks),
              static_cast<std::int64_t>(BpeTrainer::kMaxRanks)},
             "Learn a tokenizer of so many ranks from the text");
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
