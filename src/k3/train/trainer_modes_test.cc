// Runs in bf16, with rounded experts and with a teacher: learning, resuming, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "k3/train/trainer.h"
#include "support/golden.h"
#include "support/temp_dir.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using ::testing::HasSubstr;
using testing::PackableConfig;
using testing::RunToEnd;
using testing::SmallRun;
using testing::TempDir;
using testing::Weights;
using testing::WriteBytes;
using testing::WriteTrainData;

struct Outcome {
  double loss = 0, eval = 0, first_kl = -1, last_kl = -1;
};

Outcome Learn(TrainConfig c, std::int64_t steps) {
  c.steps = steps, c.eval_every = steps, c.checkpoint_every = 1000;
  c.lr = 1e-2, c.muon.lr = 2e-2, c.schedule.total = steps;
  Outcome o;
  auto t = Trainer::Open(c);
  EXPECT_TRUE(t.ok()) << (t.ok() ? "" : t.message());
  const auto done = (*t)->Run({0, nullptr, [&](const StepReport& r) {
                                 if (r.step == 1) o.first_kl = r.divergence;
                                 o.loss = r.loss, o.last_kl = r.divergence;
                                 if (r.eval_loss >= 0) o.eval = r.eval_loss;
                               }});
  EXPECT_TRUE(done.ok() && *done);
  return o;
}

TEST(TrainerModes, Bf16LearnsAsF32Does) {
  TempDir dir;
  WriteTrainData(dir / "data");
  const Outcome f32 = Learn(SmallRun(dir, "f32"), 40);
  TrainConfig c = SmallRun(dir, "bf16");
  c.bf16 = true;
  const Outcome bf16 = Learn(c, 40);
  EXPECT_LT(bf16.loss, 3.0) << "from 6.2";
  // Two runs whose products differ by 2^-9 part ways; what they learn stays as far as seeds do.
  EXPECT_NEAR(bf16.loss, f32.loss, 0.25);
  EXPECT_NE(bf16.loss, f32.loss);
}

TEST(TrainerModes, AnInterruptedRunEndsWithTheSameBits) {
  TempDir dir;
  WriteTrainData(dir / "data");
  WriteBytes(dir / "config.json", PackableConfig());
  auto config = [&](const std::string& out) {
    TrainConfig c = SmallRun(dir, out);
    c.model_config = dir / "config.json";
    c.bf16 = true, c.mxfp4_from = 0.5;
    c.distill = {GoldenDir() + "/variants/plain", 0.5, 2.0};
    return c;
  };
  const std::vector<float> want = RunToEnd(config("whole"));
  for (const std::int64_t at : {1, 3, 5}) {  // before, at and after the switch to rounded experts
    const TrainConfig c = config("parts" + std::to_string(at));
    std::atomic<bool> stop{false};
    {
      auto t = Trainer::Open(c);
      ASSERT_TRUE(t.ok()) << t.message();
      ASSERT_TRUE((*t)->Run({0, &stop, [&](const StepReport& s) { stop = s.step == at; }}).ok());
    }
    EXPECT_EQ(RunToEnd(c), want) << at;
  }
}

TEST(TrainerModes, ExpertsAreRoundedFromTheChosenShareOn) {
  TempDir dir;
  WriteTrainData(dir / "data");
  WriteBytes(dir / "config.json", PackableConfig());
  TrainConfig c = SmallRun(dir, "out");
  c.model_config = dir / "config.json", c.mxfp4_from = 0.5;
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok()) << t.message();
  std::vector<bool> rounded;
  ASSERT_TRUE((*t)->Run({0, nullptr,
                         [&](const StepReport&) {
                           bool differs = false;
                           for (const Parameter& p : (*t)->params().list()) {
                             differs |= !std::equal(p.used, p.used + p.size(), p.value);
                           }
                           rounded.push_back(differs);
                         }})
                  .ok());
  EXPECT_EQ(rounded, (std::vector<bool>{false, false, false, true, true, true}));
}

TEST(TrainerModes, AStudentComesCloserToItsTeacher) {
  TempDir dir;
  WriteTrainData(dir / "data");
  const Outcome taught_by = Learn(SmallRun(dir, "teacher"), 40);
  TrainConfig c = SmallRun(dir, "student");
  c.seed = 6, c.distill = {dir / "teacher/model", 1.0, 1.0};
  const Outcome student = Learn(c, 40);
  EXPECT_GT(student.first_kl, 1.0);
  EXPECT_LT(student.last_kl, 0.5 * student.first_kl);
  EXPECT_NEAR(student.loss, taught_by.loss, 1.0) << "cross-entropy falls though it has no weight";
}

TEST(TrainerModes, APlantedNoiseLayerLosesItsScale) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.model_config = GoldenDir() + "/variants/scaled/config.json";
  c.steps = 60, c.schedule.total = 60, c.lr = 1e-2, c.checkpoint_every = 1000;
  auto alphas = [](Trainer& t) {
    std::map<std::int64_t, double> found;
    for (const Parameter& p : t.params().list()) {
      if (p.spec.name.ends_with("self_attention_res_alpha")) found[p.spec.layer] = p.value[0];
    }
    return found;
  };
  auto trained = [&](std::int64_t layer, const std::string& out) {
    c.plant_noise = layer, c.out = dir / out;
    auto t = Trainer::Open(c);
    EXPECT_TRUE(t.ok()) << (t.ok() ? "" : t.message());
    EXPECT_TRUE((*t)->Run({}).ok());
    return alphas(**t);
  };
  const auto plain = trained(-1, "plain"), noisy = trained(1, "noisy");
  EXPECT_LT(std::abs(noisy.at(1)), 0.25) << "from 0.5";
  EXPECT_GT(std::abs(plain.at(1)), 2 * std::abs(noisy.at(1)));
  for (const auto& [layer, alpha] : noisy) {
    EXPECT_TRUE(layer == 1 || std::abs(alpha) > std::abs(noisy.at(1))) << layer;
  }
  c.plant_noise = 99;
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("plant_noise is 99, expected a layer below"));
}

TEST(TrainerModes, Refusals) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.mxfp4_from = 0.5;
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("no routed expert whose rows"));
  c.pack_experts = false;
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("expected train.pack_experts = true"));
  c = SmallRun(dir, "out");
  c.distill.teacher = dir / "none";
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("none"));
  std::string other = testing::ReadBytes(c.model_config);
  other.replace(other.find("\"vocab_size\": 512"), 17, "\"vocab_size\": 768");
  WriteBytes(dir / "config.json", other);
  c.model_config = dir / "config.json", c.distill.teacher = GoldenDir() + "/variants/plain";
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("has 512 ids, expected 768"));
  EXPECT_FALSE(std::filesystem::exists(c.out)) << "nothing was started";
}

TEST(TrainerModes, ATeacherOfAnotherTokenizerIsRefused) {
  TempDir dir;
  WriteTrainData(dir / "data");
  std::filesystem::create_directory(dir / "teacher");
  for (const auto& file : std::filesystem::directory_iterator(GoldenDir() + "/variants/plain")) {
    const std::string file_name = file.path().filename().string();
    if (file_name.starts_with("tok") || file_name.starts_with("tik")) continue;
    std::filesystem::copy(file.path(), dir / ("teacher/" + file_name));
  }
  auto ranks = [](unsigned first) {
    std::string text;
    constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (unsigned i = 0; i < 256; ++i) {
      const unsigned b = (first + i) % 256;
      text += {kAlphabet[b >> 2], kAlphabet[(b & 3) << 4], '=', '='};
      text += " " + std::to_string(i) + "\n";
    }
    return text;
  };
  TrainConfig c = SmallRun(dir, "out");
  c.distill.teacher = dir / "teacher";
  WriteBytes(dir / "data/tiktoken.model", ranks(0));
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("no tokenizer"));
  WriteBytes(dir / "teacher/tiktoken.model", ranks(1));
  EXPECT_THAT(Trainer::Open(c).message(), HasSubstr("differs from that of"));
  WriteBytes(dir / "teacher/tiktoken.model", ranks(0));
  const auto same = Trainer::Open(c);
  EXPECT_TRUE(same.ok()) << same.message();
}

TEST(TrainerModes, KeysOfTheConfig) {
  const std::string head =
      "[model]\nconfig = \"c.json\"\n[data]\ndir = \"/d\"\n[train]\nout = \"o\"\nsteps = 300\n";
  auto parse = [&](const std::string& rest) { return ParseTrainConfig(head + rest, "/x/t.toml"); };
  const auto c = parse(
      "compute = \"bf16\"\nmxfp4_from = 0.5\n[distill]\nteacher = \"m\"\nweight = 1\n"
      "temperature = 2.0\n");
  ASSERT_TRUE(c.ok()) << c.message();
  EXPECT_TRUE(c->bf16);
  EXPECT_EQ(c->mxfp4_from, 0.5);
  EXPECT_EQ(c->distill.teacher, "/x/m");
  EXPECT_EQ(c->distill.temperature, 2.0);
  EXPECT_FALSE(parse("")->bf16);
  EXPECT_THAT(parse("compute = \"fp8\"\n").message(), HasSubstr("train.compute, expected one of"));
  EXPECT_THAT(parse("mxfp4_from = 1.5\n").message(), HasSubstr("train.mxfp4_from"));
  EXPECT_THAT(parse("mxfp4_from = -0.1\n").message(), HasSubstr("train.mxfp4_from"));
  EXPECT_THAT(parse("[distill]\nweight = 0.5\n").message(),
              HasSubstr("missing key distill.teacher"));
  EXPECT_THAT(parse("[distill]\nteacher = \"m\"\nweight = 2\n").message(),
              HasSubstr("distill.weight"));
  EXPECT_THAT(parse("[distill]\nteacher = \"m\"\ntemperature = 0\n").message(),
              HasSubstr("distill.temperature"));
  EXPECT_THAT(parse("[distill]\nteachers = \"m\"\n").message(),
              HasSubstr("unknown key distill.teachers"));
}

}  // namespace
}  // namespace k3
