// A small training run for tests.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "k3/train/trainer.h"
#include "support/golden.h"
#include "support/temp_dir.h"

namespace k3::testing {

/// A data folder with documents that follow a simple rule, so that the loss falls.
inline void WriteTrainData(const std::string& dir) {
  std::filesystem::create_directories(dir);
  for (const char* name : {"/train.tokens", "/valid.tokens"}) {
    TokenFileBuilder b;
    for (int doc = 0; doc < 20; ++doc) {
      std::vector<TokenId> ids;
      for (int i = 0; i < 50; ++i) ids.push_back(1 + (doc + 3 * i) % 40);
      b.AddDocument(ids, 0, 150);
    }
    ASSERT_TRUE(b.Write(dir + name, 512).ok());
  }
}

inline TrainConfig SmallRun(const TempDir& dir, const std::string& out) {
  TrainConfig c;
  c.model_config = GoldenDir() + "/variants/released/config.json";
  c.data = dir / "data", c.out = dir / out;
  c.steps = 6, c.batch = 2, c.sequence = 16, c.accumulate = 2, c.threads = 2, c.seed = 5;
  c.checkpoint_every = 2, c.keep = 3;
  c.lr = 3e-3, c.muon.enabled = true;
  c.schedule = {ScheduleKind::kCosine, 2, 6, 0, 0.1};
  return c;
}

inline std::vector<float> Weights(Trainer& t) {
  return {t.params().values(), t.params().values() + t.params().total()};
}

inline std::vector<float> RunToEnd(const TrainConfig& c) {
  auto t = Trainer::Open(c);
  EXPECT_TRUE(t.ok()) << (t.ok() ? "" : t.message());
  if (!t.ok()) return {};
  const auto done = (*t)->Run({});
  EXPECT_TRUE(done.ok() && *done) << (done.ok() ? "" : done.message());
  return Weights(**t);
}

/// The released variant with experts whose rows are whole blocks of 32.
inline std::string PackableConfig() {
  std::string json = ReadBytes(GoldenDir() + "/variants/released/config.json");
  for (const std::string key : {"\"moe_intermediate_size\": ", "\"routed_expert_hidden_size\": "}) {
    json.replace(json.find(key) + key.size(), 2, "32");
  }
  return json;
}

}  // namespace k3::testing
