// The training loop: resume, interruption, damaged checkpoints, bad configs and data.
#include "k3/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "k3/base/rng.h"
#include "k3/train/train_state.h"
#include "support/golden.h"
#include "support/temp_dir.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using ::testing::HasSubstr;
using testing::ReadBytes;
using testing::RunToEnd;
using testing::SmallRun;
using testing::TempDir;
using testing::Weights;
using testing::WriteBytes;
using testing::WriteTrainData;

TEST(Trainer, AnInterruptedRunEndsWithTheSameBits) {
  TempDir dir;
  WriteTrainData(dir / "data");
  const std::vector<float> want = RunToEnd(SmallRun(dir, "whole"));
  TrainConfig one_thread = SmallRun(dir, "one_thread");
  one_thread.threads = 1;
  EXPECT_EQ(RunToEnd(one_thread), want) << "threads change nothing";

  const TrainConfig c = SmallRun(dir, "parts");
  std::atomic<bool> stop{false};
  {
    auto t = Trainer::Open(c);
    ASSERT_TRUE(t.ok()) << t.message();
    const auto r = (*t)->Run({0, &stop, [&](const StepReport& s) { stop = s.step == 3; }});
    ASSERT_TRUE(r.ok()) << r.message();
    EXPECT_FALSE(*r);
    EXPECT_EQ((*t)->step(), 3);
  }
  {
    auto t = Trainer::Open(c);
    ASSERT_TRUE(t.ok()) << t.message();
    EXPECT_EQ((*t)->step(), 3);
    ASSERT_EQ((*t)->notes().size(), 1u);
    const auto r = (*t)->Run({});
    ASSERT_TRUE(r.ok() && *r);
    EXPECT_EQ(Weights(**t), want);
  }
  const std::string csv = ReadBytes(c.out + "/log.csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 7) << "a head and six steps:\n" << csv;
  auto model = Model::Load(c.out + "/model");
  EXPECT_TRUE(model.ok()) << model.message();
}

TEST(Trainer, AKilledRunRepeatsFromItsLastCheckpointAndADamagedOneIsPassedOver) {
  TempDir dir;
  WriteTrainData(dir / "data");
  const std::vector<float> want = RunToEnd(SmallRun(dir, "whole"));
  const TrainConfig c = SmallRun(dir, "killed");
  {  // what a kill after step 5 leaves: checkpoints of steps 2 and 4, logs of five steps
    TrainConfig part = c;
    part.steps = 6;
    auto t = Trainer::Open(part);
    ASSERT_TRUE(t.ok());
    std::atomic<bool> stop{false};
    ASSERT_TRUE((*t)->Run({0, &stop, [&](const StepReport& s) { stop = s.step == 5; }}).ok());
    std::filesystem::remove(StatePath(c.out + "/checkpoints", 5));
  }
  const std::string newest = StatePath(c.out + "/checkpoints", 4);
  const std::string image = ReadBytes(newest);
  ASSERT_GT(image.size(), 1000u);
  for (const bool truncate : {true, false}) {
    std::string bad = truncate ? image.substr(0, image.size() - 100) : image;
    if (!truncate) bad[bad.size() - 50] = static_cast<char>(bad[bad.size() - 50] ^ 1);
    WriteBytes(newest, bad);
    auto t = Trainer::Open(c);
    ASSERT_TRUE(t.ok()) << t.message();
    EXPECT_EQ((*t)->step(), 2);
    EXPECT_THAT((*t)->notes().at(0), HasSubstr(newest));
  }
  EXPECT_EQ(RunToEnd(c), want);
}

TEST(Trainer, RefusesASecondRunInTheSameFolderAndAnotherModel) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  {
    auto first = Trainer::Open(c);
    ASSERT_TRUE(first.ok()) << first.message();
    const auto second = Trainer::Open(c);
    ASSERT_FALSE(second.ok());
    EXPECT_THAT(second.message(), HasSubstr("another run"));
    ASSERT_TRUE((*first)->Run({}).ok());
  }
  c.sequence = 20;
  const auto other = Trainer::Open(c);
  ASSERT_FALSE(other.ok());
  EXPECT_THAT(other.message(), HasSubstr("another model"));
}

TEST(Trainer, StopsAtTheTimeLimitWithACheckpoint) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.steps = 1'000'000;
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok());
  const auto done = (*t)->Run({0.2, nullptr, nullptr});
  ASSERT_TRUE(done.ok());
  EXPECT_FALSE(*done);
  EXPECT_EQ(ListStates(c.out + "/checkpoints").front(),
            StatePath(c.out + "/checkpoints", (*t)->step()));
}

TEST(Trainer, SkipsStepsWhoseGradientsAreNotFinite) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.steps = 2;
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok());
  Parameter* w = (*t)->params().Find("model.norm.weight");
  w->value[0] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> before = Weights(**t);
  std::int64_t skipped = 0;
  const auto done =
      (*t)->Run({0, nullptr, [&](const StepReport& s) { skipped = s.skipped_total; }});
  ASSERT_TRUE(done.ok()) << done.message();
  EXPECT_EQ(skipped, 2);
  const std::vector<float> after = Weights(**t);
  EXPECT_EQ(std::memcmp(before.data(), after.data(), 4 * before.size()), 0);

  t->reset();
  c.steps = 3;  // counters go on where they were
  auto resumed = Trainer::Open(c);
  ASSERT_TRUE(resumed.ok()) << resumed.message();
  std::int64_t tokens = 0;
  ASSERT_TRUE(
      (*resumed)
          ->Run({0, nullptr,
                 [&](const StepReport& s) { skipped = s.skipped_total, tokens = s.tokens; }})
          .ok());
  EXPECT_EQ(skipped, 3);
  EXPECT_GT(tokens, 2 * 4 * 16) << "of three steps of four rows, less the ends of documents";
}

TEST(Trainer, EvaluatesAndTheLossFalls) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.steps = 60, c.eval_every = 30, c.checkpoint_every = 1000;
  c.lr = 1e-2, c.muon.lr = 2e-2, c.schedule.total = 60;
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok());
  double first = 0, last = 0, eval = -1, violation = 0;
  const auto done = (*t)->Run({0, nullptr, [&](const StepReport& s) {
                                 if (s.step == 1) first = s.loss;
                                 last = s.loss;
                                 if (s.eval_loss >= 0) eval = s.eval_loss;
                                 for (const auto& b : s.balance) violation = b.max_violation;
                               }});
  ASSERT_TRUE(done.ok()) << done.message();
  EXPECT_NEAR(first, std::log(512.0), 0.1);
  EXPECT_LT(last, 2.0);
  EXPECT_NEAR(eval, last, 1.0);
  EXPECT_GE(violation, 0);
}

TEST(Trainer, BitsAByteDoNotChargeForTheBosInFront) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.steps = 1, c.eval_every = 1, c.schedule = {ScheduleKind::kConstant, 0, 1, 0, 0};
  const auto config = ParseModelConfig(ReadBytes(c.model_config), "config.json");
  ASSERT_TRUE(config.ok() && config->bos.has_value());
  TokenFileBuilder b;
  for (int i = 0; i < 10; ++i) b.AddDocument(std::vector<TokenId>{*config->bos, 5, 6}, 0, 20);
  ASSERT_TRUE(b.Write(c.data + "/valid.tokens", 512).ok());
  for (const bool across : {false, true}) {  // across documents a BOS is predicted as any token
    c.across_documents = across, c.out = dir / (across ? "across" : "cut");
    auto t = Trainer::Open(c);
    ASSERT_TRUE(t.ok()) << t.message();
    double tokens = 0;
    ASSERT_TRUE((*t)->Run({0, nullptr,
                           [&](const StepReport& r) {
                             tokens = r.eval_bits_per_byte * std::log(2.0) / r.eval_loss * 200;
                           }})
                    .ok());
    EXPECT_NEAR(tokens, across ? 40 : 30, 1e-9);
  }
}

TEST(Trainer, RefusesBadData) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.sequence = 2000;
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("expected at least one row"));
  c = SmallRun(dir, "out");
  c.data = dir / "none";
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("none/train.tokens"));
  c = SmallRun(dir, "out");
  c.out = "/proc/out";
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("/proc/out"));
  WriteBytes(dir / "data/tiktoken.model", "no ranks");
  EXPECT_THAT(Trainer::Open(SmallRun(dir, "out")).message(), HasSubstr("tiktoken.model"));
  WriteBytes(dir / "data/tiktoken.model", ReadBytes(GoldenDir() + "/tiny-k3/tiktoken.model"));
  EXPECT_THAT(Trainer::Open(SmallRun(dir, "out")).message(),
              HasSubstr("512 ids, that of the tokenizer beside it"));
  std::filesystem::remove(dir / "data/tiktoken.model");
  std::string wide = ReadBytes(SmallRun(dir, "out").model_config);
  wide.replace(wide.find("\"hidden_size\": 32"), 17, "\"hidden_size\": 16777216");
  WriteBytes(dir / "wide.json", wide);
  c = SmallRun(dir, "out");
  c.model_config = dir / "wide.json";
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("weights, gradients and optimizer need"));
  TokenFileBuilder b;
  b.AddDocument(std::vector<TokenId>(100, 599), 0, 5);
  ASSERT_TRUE(b.Write(dir / "data/train.tokens", 600).ok());
  c = SmallRun(dir, "out");
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("vocabulary has 600 ids, the model's 512"));
}

TEST(TokenData, HostileFilesAreRefused) {
  TempDir dir;
  TokenFileBuilder b;
  b.AddDocument(std::vector<TokenId>{1, 2, 3}, 0, 5);
  b.AddDocument(std::vector<TokenId>{}, 0, 0);
  const std::string path = dir / "t";
  ASSERT_TRUE(b.Write(path, 10).ok());
  const auto good = TokenFile::Open(path);
  ASSERT_TRUE(good.ok()) << good.message();
  EXPECT_EQ(good->tokens().size(), 5u);
  EXPECT_EQ(good->documents(), 2);
  EXPECT_EQ(good->text_bytes(), 5);
  const std::string image = ReadBytes(path);
  for (std::size_t n = 0; n < image.size(); ++n) {
    WriteBytes(path, image.substr(0, n));
    EXPECT_FALSE(TokenFile::Open(path).ok()) << n;
  }
  auto patch = [&](std::size_t at, std::uint64_t value, std::size_t bytes) {
    std::string bad = image;
    std::memcpy(bad.data() + at, &value, bytes);
    WriteBytes(path, bad);
    EXPECT_FALSE(TokenFile::Open(path).ok()) << at;
  };
  patch(8, ~std::uint64_t{0}, 8);        // tokens
  patch(16, std::uint64_t{1} << 61, 8);  // documents: 8 (docs + 1) wraps
  patch(24, 0, 8);                       // vocabulary
  patch(32, ~std::uint64_t{0}, 8);       // text bytes
  patch(48, 9, 8);                       // index out of order
  patch(image.size() - 4, 10, 4);        // token outside the vocabulary
  patch(image.size() - 4, ~0u, 4);       // negative token
}

TEST(TokenData, Documents) {
  auto split = [](std::string_view text, DocumentSplit how) {
    return SplitDocuments(text, how, "text", "in");
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(*split(std::string_view("a\0\0b\n\0", 6), DocumentSplit::kNul), (Texts{"a", "b\n"}));
  EXPECT_EQ(*split("a\nb\n\n\n\nc", DocumentSplit::kBlankLine), (Texts{"a\nb", "c"}));
  EXPECT_EQ(*split("", DocumentSplit::kNul), Texts{});
  EXPECT_EQ(*split("{\"text\":\"x\"}\n\n{\"text\":\"y\"}", DocumentSplit::kJsonLines),
            (Texts{"x", "y"}));
  EXPECT_THAT(split("{\"text\":\"x\"}\n{\"t\":1}", DocumentSplit::kJsonLines).message(),
              HasSubstr("in: line 2: no text under \"text\""));
}

TEST(TokenData, RowsAreCutAtDocumentEnds) {
  const std::vector<TokenId> tokens{1, 2, 0, 0, 3, 4, 5, 0};
  const std::vector<std::uint64_t> starts{0, 3, 4, 8};
  const std::span<const TokenId> all(tokens);
  auto lengths = [&](std::size_t begin, std::size_t n) {
    std::vector<std::size_t> sizes;
    for (const auto p : SplitAtDocuments(all.subspan(begin, n), all, starts)) {
      sizes.push_back(p.size());
    }
    return sizes;
  };
  EXPECT_EQ(lengths(0, 8), (std::vector<std::size_t>{3, 4}));
  EXPECT_EQ(lengths(1, 5), (std::vector<std::size_t>{2, 2}));
  EXPECT_EQ(lengths(5, 2), (std::vector<std::size_t>{2}));
  EXPECT_EQ(lengths(2, 2), (std::vector<std::size_t>{}));
}

TEST(Trainer, ADocumentDoesNotSeeTheOnePackedBeforeIt) {
  auto p = Parameters::Load(GoldenDir() + "/variants/released");
  ASSERT_TRUE(p.ok());
  GradientPass pass(**p, 2);
  const std::vector<TokenId> a{5, 6, 7, 8, 9, 10}, other{99, 98, 97, 96}, b{50, 51, 60, 52, 53};
  auto row = [](const std::vector<TokenId>& v) {
    return TrainRow{std::span(v).first(v.size() - 1), std::span(v).subspan(1)};
  };
  auto gradients_of_b = [&](std::vector<TrainRow> rows) {
    (*p)->ZeroGrads();
    const auto sum = pass.Run(rows, 1.0);
    EXPECT_TRUE(sum.ok());
    return std::make_pair(sum->nats,
                          std::vector<float>((*p)->grads(), (*p)->grads() + (*p)->total()));
  };
  const double alone = gradients_of_b({row(b)}).first;
  const auto behind = gradients_of_b({row(a), row(b)});
  const auto first = gradients_of_b({row(a)});
  EXPECT_NEAR(behind.first - first.first, alone, 1e-4);
  EXPECT_NEAR(gradients_of_b({row(other), row(b)}).first - gradients_of_b({row(other)}).first,
              alone, 1e-4);
}

TEST(TokenData, EveryRowOnceAnEpochAndSeekable) {
  std::vector<TokenId> tokens(101);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i);
  auto r = RowReader::Create(tokens, 10, 3, "t");
  ASSERT_TRUE(r.ok());
  std::vector<TokenId> firsts, again;
  for (int i = 0; i < 10; ++i) {
    const auto row = r->Next();
    ASSERT_EQ(row.size(), 11u);
    firsts.push_back(row[0]);
  }
  const DataCursor end = r->cursor();
  for (int i = 0; i < 5; ++i) again.push_back(r->Next()[0]);
  ASSERT_TRUE(r->Seek(end).ok());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(r->Next()[0], again[static_cast<std::size_t>(i)]);
  EXPECT_FALSE(r->Seek({0, 11}).ok());
  EXPECT_NE(std::vector<TokenId>(firsts.begin(), firsts.begin() + 5), again) << "another order";
  auto fresh = RowReader::Create(tokens, 10, 3, "t");
  ASSERT_TRUE(fresh.ok());
  ASSERT_TRUE(fresh->Seek({1, 2}).ok());
  EXPECT_EQ(fresh->Next()[0], again[2]) << "into an epoch that was never begun";
  ASSERT_TRUE(fresh->Seek({0, 0}).ok());
  EXPECT_EQ(fresh->Next()[0], firsts[0]);
  std::sort(firsts.begin(), firsts.end());
  for (int i = 0; i < 10; ++i) EXPECT_EQ(firsts[static_cast<std::size_t>(i)], 10 * i);
}

TEST(TrainConfigFile, ReadsAndRefuses) {
  TempDir dir;
  const std::string good =
      "[model]\nconfig = \"c.json\"\n[data]\ndir = \"/d\"\n[train]\nout = \"o\"\nsteps = 300\n"
      "[optimizer]\nlr = 1\nmuon = true\n[balance]\nmethod = \"sign\"\nstep = 1e-2\n";
  auto read = [&](const std::string& text) {
    WriteBytes(dir / "t.toml", text);
    return ReadTrainConfig(dir / "t.toml");
  };
  const auto c = read(good);
  ASSERT_TRUE(c.ok()) << c.message();
  EXPECT_EQ(c->model_config, dir / "c.json");
  EXPECT_EQ(c->data, "/d");
  EXPECT_EQ(c->schedule.warmup, 3);
  EXPECT_EQ(c->schedule.total, 300);
  EXPECT_EQ(c->balance.method, BalanceMethod::kSign);
  EXPECT_DOUBLE_EQ(c->lr, 1.0);
  EXPECT_THAT(read(good + "x = 1\n").message(), HasSubstr("unknown key balance.x"));
  EXPECT_THAT(read(good + "[other]\n").message(), HasSubstr("unknown key other"));
  EXPECT_THAT(read("steps = \n").message(), HasSubstr("line 1"));
  EXPECT_THAT(read("[train]\nsteps = 0\n").message(), HasSubstr("bad value train.steps"));
  EXPECT_THAT(read("[train]\nsteps = 1.5\n").message(), HasSubstr("bad value train.steps"));
  EXPECT_THAT(read("train = 3\n").message(), HasSubstr("bad value train"));
  EXPECT_THAT(read("[optimizer]\nlr = nan\n").message(), HasSubstr("bad value optimizer.lr"));
  EXPECT_THAT(read("[balance]\nmethod = \"best\"\n").message(), HasSubstr("one of none, quantile"));
  EXPECT_THAT(read("[train]\nsteps = 1\n").message(),
              HasSubstr("either model.config or model.init_from, found neither"));
  EXPECT_THAT(read("[model]\nconfig = \"a\"\ninit_from = \"b\"\n").message(), HasSubstr("both"));
  EXPECT_THAT(read("[train]\nsteps = -2\n").message(), HasSubstr("found -2"));
  EXPECT_THAT(read("[train]\nout = \"a\\u0000b\"\n").message(), HasSubstr("train.out"));
  EXPECT_THAT(read("[train]\nstpes = 1\n").message(),
              HasSubstr("train.stpes, did you mean steps?"));
  EXPECT_THAT(read("[optimiser]\n").message(), HasSubstr("optimiser, did you mean optimizer?"));
}

}  // namespace
}  // namespace k3
