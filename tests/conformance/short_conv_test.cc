// The short convolution of many sequences at once, as a decoding step has them.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "k3/base/rng.h"
#include "support/backends.h"
#include "support/golden.h"

namespace k3 {
namespace {

std::vector<float> ConvInputs(std::uint64_t seed, std::int64_t n) {
  Rng rng(seed);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = static_cast<float>(2 * rng.Uniform() - 1);
  return v;
}

TEST(ShortConv, ManySequencesOfAllLengths) {
  // Long ones are cut by channels, short ones are shared out as a whole; empty ones change nothing.
  const std::int64_t P = 451, k = 4;
  std::vector<SequenceRange> ranges;
  std::int64_t T = 0;
  for (std::int64_t s = 0; s < 40; ++s) {
    const std::int64_t count = s % 7 == 3 ? 0 : s % 11 == 5 ? 20 : 1 + s % 3;
    ranges.push_back({T, count});
    T += count;
  }
  const auto n = static_cast<std::int64_t>(ranges.size());
  const auto x = ConvInputs(1, T * P), w = ConvInputs(2, P * k),
             history = ConvInputs(3, n * (k - 1) * P);
  std::vector<float> reference, first;
  for (const auto& b : testing::Backends(true)) {
    std::vector<float> y(x.size()), h = history;
    std::vector<float*> pointers;
    for (std::int64_t s = 0; s < n; ++s) pointers.push_back(h.data() + s * (k - 1) * P);
    b.make()->ShortConv(
        {CMat(x.data(), {T, P}), CMat(w.data(), {P, k}), ranges, pointers, Mat(y.data(), {T, P})});
    y.insert(y.end(), h.begin(), h.end());
    if (b.name == "ref") {
      reference = y;
      continue;
    }
    EXPECT_LE(testing::RelativeL2(y, reference), 1e-6) << b.name;
    if (first.empty()) first = y;
    EXPECT_EQ(std::memcmp(y.data(), first.data(), 4 * y.size()), 0) << b.name;
  }
}

}  // namespace
}  // namespace k3
