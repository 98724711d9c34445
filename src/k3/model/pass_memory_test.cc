// The count of a pass's scratch against what passes take, for every golden model.
#include "k3/model/pass_memory.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "k3/model/model.h"
#include "support/golden.h"

namespace k3 {
namespace {

class PassMemory : public ::testing::TestWithParam<const char*> {};

TEST_P(PassMemory, CountsWhatAPassTakes) {
  auto loaded = Model::Load(testing::GoldenDir() + "/" + GetParam());
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  const Model& model = **loaded;
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    for (const std::int64_t T : {1, 3, 64, 129}) {
      for (const LogitRows rows : {LogitRows::kNone, LogitRows::kLast, LogitRows::kAll}) {
        Exec exec(2, math);
        ModelState state = model.NewState();
        const std::vector<TokenId> ids(static_cast<std::size_t>(T), 1);
        const SequenceInput input{ids, &state, rows};
        std::vector<float> logits;
        ASSERT_TRUE(model.Forward({&input, 1}, exec, logits).ok());
        const std::int64_t wanted = rows == LogitRows::kNone ? 0 : rows == LogitRows::kLast ? 1 : T;
        const std::int64_t planned = PassBytes(model.config(), T, wanted);
        const auto taken = static_cast<std::int64_t>(exec.ws.peak_bytes());
        EXPECT_LE(taken, planned) << T << " tokens: the pass outgrew its reservation";
        EXPECT_GE(taken, planned * 95 / 100) << T << " tokens: more is reserved than is used";
        EXPECT_EQ(static_cast<std::int64_t>(exec.ws.reserved_bytes()), planned) << T;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, PassMemory,
                         ::testing::Values("tiny-k3", "tiny-linear", "variants/released",
                                           "variants/plain", "variants/full_attn_res",
                                           "variants/gated", "variants/gated_channel",
                                           "variants/norm_scaled", "variants/scaled",
                                           "variants/router_encoder", "variants/router_latent",
                                           "variants/experts_hidden", "variants/gqa_hybrid",
                                           "variants/gqa_rope", "variants/mqa"),
                         [](const auto& p) {
                           std::string name = p.param;
                           for (char& c : name) {
                             if (c == '/' || c == '-') c = '_';
                           }
                           return name;
                         });

TEST(PassMemoryState, PartsAddUpToWhatAStateTakes) {
  auto loaded = Model::Load(testing::GoldenDir() + "/variants/gqa_hybrid");
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  Exec exec(1);
  ModelState state = (*loaded)->NewState();
  const std::vector<TokenId> ids(70, 2);
  const SequenceInput input{ids, &state, LogitRows::kNone};
  std::vector<float> logits;
  ASSERT_TRUE((*loaded)->Forward({&input, 1}, exec, logits).ok());
  const StateBytes parts = ModelState::PartsFor((*loaded)->config(), 70);
  EXPECT_EQ(parts.total(), state.bytes());
  EXPECT_GT(parts.gqa, 0);
  EXPECT_GT(parts.kda, 0);
}

}  // namespace
}  // namespace k3
