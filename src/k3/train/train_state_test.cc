// Checkpoints on a bad day: flipped bits, files a killed run left, a config that changed.
#include "k3/train/train_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "k3/train/trainer.h"
#include "support/temp_dir.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using testing::ReadBytes;
using testing::RunToEnd;
using testing::SmallRun;
using testing::TempDir;
using testing::WriteBytes;
using testing::WriteTrainData;

void RunUntil(const TrainConfig& c, std::int64_t step) {
  std::atomic<bool> stop{false};
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok()) << t.message();
  ASSERT_TRUE((*t)->Run({0, &stop, [&](const StepReport& s) { stop = s.step == step; }}).ok());
}

TEST(TrainState, AFlippedBitAnywhereInTheHeadIsNoticed) {
  TempDir dir;
  WriteTrainData(dir / "data");
  const TrainConfig c = SmallRun(dir, "out");
  RunUntil(c, 3);
  const std::string newest = StatePath(c.out + "/checkpoints", 3);
  std::string image = ReadBytes(newest);
  std::uint64_t head = 0;
  std::memcpy(&head, image.data(), sizeof head);
  ASSERT_LT(head, 2000u);
  auto params = Parameters::Create((*Trainer::Open(c))->params().config());
  ASSERT_TRUE(params.ok());
  Optimizer optimizer(**params, c.adamw, c.muon);
  Balancer balancer(**params, c.balance);
  for (std::size_t at = 0; at < 8 + head; ++at) {
    const int bit = at % 2 == 0 ? 1 : 16;
    image[at] = static_cast<char>(image[at] ^ bit);
    WriteBytes(newest, image);
    const auto r = LoadState(newest, 0, **params, optimizer, balancer);
    ASSERT_FALSE(r.ok());
    // Anything else would end the run instead of going to the checkpoint before.
    EXPECT_NE(r.error().code, Code::kInvalidArgument) << at << ": " << r.message();
    image[at] = static_cast<char>(image[at] ^ bit);
  }
  const std::string step = "\"step\":\"3\"";
  image.replace(image.find(step), step.size(), "\"step\":\"1\"");
  WriteBytes(newest, image);
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok()) << t.message();
  EXPECT_EQ((*t)->step(), 2) << "the checkpoint before";
  EXPECT_THAT((*t)->notes().at(0), HasSubstr("do not match their hash"));
}

TEST(TrainState, ADamagedCheckpointDoesNotPushOutThoseThatFollow) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.keep = 1;
  RunUntil(c, 3);
  EXPECT_EQ(ListStates(c.out + "/checkpoints").size(), 1u);
  WriteBytes(StatePath(c.out + "/checkpoints", 3), "cut");
  RunUntil(c, 1);
  const auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok()) << t.message();
  EXPECT_EQ((*t)->step(), 1);
}

TEST(TrainState, WhatAKilledRunLeftHalfWrittenIsRemoved) {
  TempDir dir;
  WriteTrainData(dir / "data");
  const TrainConfig c = SmallRun(dir, "out");
  RunUntil(c, 2);
  const std::string half = StatePath(c.out + "/checkpoints", 4) + ".tmp-123-0";
  WriteBytes(half, "half");
  WriteBytes(c.out + "/log.csv.tmp-123-1", "half");
  WriteBytes(c.out + "/notes.txt", "mine");
  const auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok()) << t.message();
  EXPECT_FALSE(std::filesystem::exists(half));
  EXPECT_FALSE(std::filesystem::exists(c.out + "/log.csv.tmp-123-1"));
  EXPECT_TRUE(std::filesystem::exists(c.out + "/notes.txt"));
}

TEST(TrainState, AChangedConfigIsTold) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.text = "lr = 1";
  RunUntil(c, 2);
  EXPECT_EQ((*Trainer::Open(c))->notes().size(), 1u);
  c.text = "lr = 2";
  for (int i = 0; i < 2; ++i) {
    const auto t = Trainer::Open(c);
    ASSERT_TRUE(t.ok()) << t.message();
    ASSERT_EQ((*t)->notes().size(), 2u);
    EXPECT_THAT((*t)->notes()[1], HasSubstr("config file has changed"));
  }
  RunUntil(c, 3);
  EXPECT_EQ((*Trainer::Open(c))->notes().size(), 1u) << "the new checkpoint is of the new config";
}

}  // namespace
}  // namespace k3
