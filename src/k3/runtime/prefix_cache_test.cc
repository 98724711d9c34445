#include "k3/runtime/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/engine_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using test::HashModel;

std::unique_ptr<PrefixCache> Make(const TokenModel& model, CacheOptions options) {
  auto made = PrefixCache::Create(model, std::move(options));
  EXPECT_TRUE(made.ok()) << made.message();
  return made.ok() ? std::move(*made) : nullptr;
}

std::vector<TokenId> Tokens(std::int64_t n, std::uint64_t seed = 1) {
  Rng rng(seed);
  return test::RandomTokens(rng, n, 60);
}

/// Reads the tokens and keeps snapshots at `at`.
void Fill(PrefixCache& cache, HashModel& model, const std::vector<TokenId>& tokens,
          const std::vector<std::int64_t>& at, bool scores = false) {
  ModelState state = model.NewState();
  std::vector<float> logits;
  for (const std::int64_t end : at) {
    const auto run = std::span(tokens).subspan(static_cast<std::size_t>(state.position()),
                                               static_cast<std::size_t>(end - state.position()));
    const SequenceInput input{run, &state, LogitRows::kLast};
    ASSERT_TRUE(model.Forward({&input, 1}, logits).ok());
    cache.Insert(std::span(tokens).first(static_cast<std::size_t>(end)),
                 {state, scores ? logits : std::vector<float>(), false});
  }
}

std::string ImageAt(HashModel& model, std::span<const TokenId> tokens) {
  ModelState state = model.NewState();
  std::vector<float> logits;
  const SequenceInput input{tokens, &state, LogitRows::kNone};
  EXPECT_TRUE(model.Forward({&input, 1}, logits).ok());
  return state.Serialize();
}

TEST(TokenTree, FindsWhatWasPutInAndForgetsWhatWasDropped) {
  // Against a plain map, with sequences that share beginnings.
  using Tree = TokenTree<int>;
  Tree tree;
  std::map<std::vector<TokenId>, Tree::Node*> want;
  Rng rng(3);
  for (int round = 0; round < 3000; ++round) {
    std::vector<TokenId> tokens(1 + rng.Next() % 7);
    for (TokenId& t : tokens) t = static_cast<TokenId>(rng.Next() % 3);
    if (rng.Next() % 2 == 0 && want.count(tokens) > 0) {
      tree.Drop(want[tokens]);
      want.erase(tokens);
    } else if (want.count(tokens) == 0) {
      Tree::Node* node = tree.Make(tokens);
      ASSERT_FALSE(node->value);
      node->value = std::make_unique<int>(round);
      want[tokens] = node;
    }
    std::vector<TokenId> probe(rng.Next() % 9);
    for (TokenId& t : probe) t = static_cast<TokenId>(rng.Next() % 3);
    const auto walk = tree.Find(probe);
    std::vector<Tree::Node*> found;
    std::size_t matched = 0;
    for (std::size_t n = 0; n <= probe.size(); ++n) {
      const auto at = want.find({probe.begin(), probe.begin() + static_cast<std::ptrdiff_t>(n)});
      if (at != want.end()) found.push_back(at->second);
      for (const auto& [key, node] : want) {
        if (key.size() >= n &&
            std::equal(probe.begin(), probe.begin() + static_cast<std::ptrdiff_t>(n), key.begin()))
          matched = n;
      }
    }
    ASSERT_EQ(walk.found, found);
    ASSERT_EQ(walk.matched, static_cast<std::int64_t>(matched));
    for (const auto& [key, node] : want) ASSERT_EQ(tree.Tokens(node), key);
  }
  while (!want.empty()) {
    tree.Drop(want.begin()->second);
    want.erase(want.begin());
  }
  EXPECT_EQ(tree.bytes(), 0);
}

TEST(PrefixCache, TheDeepestSnapshotAtOrBelowTheMatch) {
  HashModel model;
  auto cache = Make(model, {1 << 20, "", 0});
  const auto tokens = Tokens(300);
  Fill(*cache, model, tokens, {100, 200, 300});
  auto edited = tokens;
  edited[250] = 61;  // the middle of the history
  EXPECT_EQ(cache->Find(edited, true).position, 200);
  EXPECT_EQ(cache->Find(edited, true).matched, 250);
  edited[200] = 61;
  EXPECT_EQ(cache->Find(edited, true).position, 200);
  edited[199] = 61;
  const CacheMatch hit = cache->Find(edited, true);
  EXPECT_EQ(hit.position, 100);
  EXPECT_EQ(hit.state.Serialize(), ImageAt(model, std::span(tokens).first(100)));
  edited[99] = 61;
  EXPECT_EQ(cache->Find(edited, true).position, 0);
  EXPECT_EQ(cache->Find(edited, true).reason, CacheMiss::kNoSnapshot);
  edited[0] = 61;
  EXPECT_EQ(cache->Find(edited, true).reason, CacheMiss::kNothing);
  // At the very end only with its scores, if those are wanted.
  EXPECT_EQ(cache->Find(tokens, false).position, 300);
  EXPECT_EQ(cache->Find(tokens, true).position, 200);
  Fill(*cache, model, tokens, {300}, true);
  EXPECT_EQ(cache->Find(tokens, true).position, 300);
  EXPECT_EQ(cache->Find(tokens, true).logits.size(), 64u);
  EXPECT_EQ(cache->Peek(tokens, true), 300);
}

TEST(PrefixCache, AHitIsACopy) {
  HashModel model;
  auto cache = Make(model, {1 << 20, "", 0});
  const auto tokens = Tokens(70);
  Fill(*cache, model, tokens, {70});
  CacheMatch a = cache->Find(tokens, false);
  std::vector<float> logits;
  const SequenceInput input{tokens, &a.state, LogitRows::kNone};
  ASSERT_TRUE(model.Forward({&input, 1}, logits).ok());
  EXPECT_EQ(cache->Find(tokens, false).state.Serialize(), ImageAt(model, tokens));
}

TEST(PrefixCache, WholeOnlySnapshotsContinueNothingLonger) {
  HashModel model;
  auto cache = Make(model, {1 << 20, "", 0});
  const auto tokens = Tokens(90);
  ModelState state = model.NewState();
  cache->Insert(std::span(tokens).first(70), {state, std::vector<float>(64), true});
  EXPECT_EQ(cache->Find(tokens, true).position, 0);
  EXPECT_EQ(cache->Find(std::span(tokens).first(70), true).position, 70);
}

TEST(PrefixCache, SharedPagesCountOnceAndTheBudgetHolds) {
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  auto roomy = Make(model, {1 << 20, "", 0});
  Fill(*roomy, model, Tokens(640), {64, 128, 192, 256, 320, 384, 448, 512, 576, 640});
  EXPECT_LT(roomy->stats().bytes, size.At(640) + 10 * size.fixed + 10 * 192 + 4 * 640 + 1);

  const std::int64_t budget = 5 * size.At(640);
  auto cache = Make(model, {budget, "", 0});
  Rng rng(1);
  for (std::uint64_t i = 0; i < 500; ++i) {
    const auto tokens = Tokens(1 + static_cast<std::int64_t>(rng.Next() % 640), rng.Next() % 40);
    Fill(*cache, model, tokens,
         {(static_cast<std::int64_t>(tokens.size()) + 1) / 2,
          static_cast<std::int64_t>(tokens.size())},
         i % 2 == 0);
    ASSERT_LE(cache->stats().bytes, budget);
    const CacheMatch m = cache->Find(tokens, false);
    if (m.position > 0) {
      ASSERT_EQ(m.state.Serialize(),
                ImageAt(model, std::span(tokens).first(static_cast<std::size_t>(m.position))));
    }
    if (i == 250) cache->Reserve(budget / 2);
    ASSERT_LE(cache->stats().bytes, i >= 250 ? budget - budget / 2 : budget);
  }
  EXPECT_GT(cache->stats().evicted, 10u);
  cache->Reserve(budget);
  EXPECT_EQ(cache->stats().bytes, 0);
  EXPECT_EQ(cache->stats().snapshots, 0);
}

TEST(PrefixCache, WhatIsCheapToReadAgainGoesFirst) {
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  const auto big = Tokens(600, 1);
  auto cache = Make(model, {size.At(600) + 2 * size.At(64) + 2 * size.fixed + 6000, "", 0});
  Fill(*cache, model, big, {590, 600});
  ASSERT_EQ(cache->stats().snapshots, 2);
  for (std::uint64_t i = 2; i < 8; ++i) Fill(*cache, model, Tokens(60, i), {60});
  // Ten tokens above 590 are the least that can be lost.
  EXPECT_EQ(cache->Peek(big, false), 590);
  EXPECT_GT(cache->stats().evicted, 0u);
}

TEST(PrefixCache, SpillsAndFindsItsFilesAgain) {
  const testing::TempDir dir;
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  const CacheOptions options{2 * size.At(128) + 3000, dir.path(), 1 << 20};
  std::vector<std::vector<TokenId>> texts;
  {
    auto cache = Make(model, options);
    for (std::uint64_t i = 0; i < 6; ++i) {
      texts.push_back(Tokens(100, 10 + i));
      Fill(*cache, model, texts.back(), {100}, true);
    }
    EXPECT_GT(cache->stats().spilled, 0u);
    for (const auto& t : texts) {
      CacheMatch m = cache->Find(t, true);
      EXPECT_EQ(m.position, 100);
      EXPECT_EQ(m.state.Serialize(), ImageAt(model, t));
      ASSERT_LE(cache->stats().bytes, options.bytes);
    }
    cache->SpillAll();
  }
  auto cache = Make(model, options);
  EXPECT_EQ(cache->stats().spilled_snapshots, 6);
  for (const auto& t : texts) {
    CacheMatch m = cache->Find(t, true);
    EXPECT_TRUE(m.spilled);
    EXPECT_EQ(m.position, 100);
    EXPECT_EQ(m.logits.size(), 64u);
    EXPECT_EQ(m.state.Serialize(), ImageAt(model, t));
  }
  // Another model, or the other arithmetic, reads none of them.
  model.mode = MathMode::kFast;
  EXPECT_EQ(Make(model, options)->Find(texts[0], true).position, 0);
  model.mode = MathMode::kExact;
  model.print = 2;
  EXPECT_EQ(Make(model, options)->Find(texts[0], true).position, 0);
  EXPECT_EQ(dir.count(), 6) << "and deletes none";
  EXPECT_FALSE(PrefixCache::Create(model, {100, dir / "nowhere", 100}).ok());
}

TEST(PrefixCache, ADamagedCutOrMissingFileIsAMiss) {
  HashModel model;
  const auto text = Tokens(40);
  const auto damaged = [&](const std::function<void(const std::string&)>& damage, bool restart) {
    const testing::TempDir dir;
    const CacheOptions options{1 << 16, dir.path(), 1 << 20};
    auto cache = Make(model, options);
    Fill(*cache, model, text, {40}, true);
    cache->SpillAll();
    cache->Reserve(options.bytes - 1000);  // out of memory, its tokens stay
    EXPECT_EQ(cache->stats().snapshots, 0);
    EXPECT_EQ(cache->stats().spilled_snapshots, 1);
    std::string path;
    for (const auto& e : std::filesystem::directory_iterator(dir.path())) path = e.path();
    damage(path);
    if (restart) cache = Make(model, options);
    const CacheMatch m = cache->Find(text, true);
    EXPECT_EQ(m.position, 0);
    EXPECT_EQ(m.reason, restart ? CacheMiss::kNothing : CacheMiss::kDamaged);
    EXPECT_EQ(cache->stats().spilled_snapshots, 0);
    EXPECT_EQ(dir.count(), 0);
    return cache->stats().damaged;
  };
  for (const bool restart : {false, true}) {
    const std::uint64_t none = restart ? 0 : 1;
    EXPECT_EQ(damaged([](const std::string& p) { std::remove(p.c_str()); }, restart), none);
    for (const std::size_t cut : {0u, 7u, 31u, 100u, 400u}) {
      EXPECT_EQ(damaged(
                    [&](const std::string& p) {
                      testing::WriteBytes(p, testing::ReadBytes(p).substr(0, cut));
                    },
                    restart),
                1u);
    }
    for (const std::size_t at : {0u, 8u, 12u, 16u, 24u, 40u, 60u, 90u, 300u, 500u}) {
      EXPECT_EQ(damaged(
                    [&](const std::string& p) {
                      std::string bytes = testing::ReadBytes(p);
                      bytes[at] = static_cast<char>(bytes[at] ^ 0x40);
                      testing::WriteBytes(p, bytes);
                    },
                    restart),
                1u)
          << at;
    }
  }
}

TEST(PrefixCache, AlongGivesTheDeepestFirstAndNoMoreThanAskedFor) {
  const testing::TempDir dir;
  HashModel model;
  const CacheOptions options{1 << 20, dir.path(), 1 << 20};
  const auto text = Tokens(200);
  const auto lengths = [](const std::vector<SavedSnapshot>& list) {
    std::vector<std::size_t> n;
    for (const SavedSnapshot& s : list) n.push_back(s.tokens.size());
    return n;
  };
  using Lengths = std::vector<std::size_t>;
  auto cache = Make(model, options);
  Fill(*cache, model, text, {64, 128, 200}, true);
  for (const bool on_disk : {false, true}) {
    const auto all = cache->Along(text, 10, 1 << 20);
    ASSERT_EQ(lengths(all), (Lengths{200, 128, 64}));
    EXPECT_EQ(all[1].snapshot.state.Serialize(), ImageAt(model, std::span(text).first(128)));
    EXPECT_EQ(lengths(cache->Along(text, 2, 1 << 20)), (Lengths{200, 128}));
    EXPECT_EQ(lengths(cache->Along(std::span(text).first(150), 9, 1 << 20)), (Lengths{128, 64}));
    EXPECT_EQ(lengths(cache->Along(text, 9, 1)), (Lengths{200})) << "the deepest whatever it takes";
    const std::int64_t two = all[0].snapshot.state.bytes() + all[1].snapshot.state.bytes();
    EXPECT_EQ(lengths(cache->Along(text, 9, two + 2000)), (Lengths{200, 128})) << on_disk;
    cache->SpillAll();
    cache = Make(model, options);
    EXPECT_EQ(cache->stats().snapshots, 0);
  }
}

TEST(PrefixCache, FilesStayWithinTheirBudget) {
  const testing::TempDir dir;
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  auto cache = Make(model, {2 * size.At(64) + 2000, dir.path(), 9000});
  for (std::uint64_t i = 0; i < 40; ++i) {
    Fill(*cache, model, Tokens(60, i), {60});
    std::int64_t bytes = 0;
    for (const auto& e : std::filesystem::directory_iterator(dir.path()))
      bytes += static_cast<std::int64_t>(e.file_size());
    ASSERT_LE(bytes, 9000);
    ASSERT_EQ(bytes, cache->stats().spilled_bytes);
  }
  EXPECT_GT(cache->stats().spilled_snapshots, 1);
}

}  // namespace
}  // namespace k3
