#include "k3/quant/encode.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "k3/base/rng.h"
#include "k3/quant/decode_row.h"
#include "k3/tensor/dtype.h"

namespace k3 {
namespace {

/// A matrix in one of the written formats, with its bytes.
struct Encoded {
  std::vector<std::uint8_t> codes, scales;
  WeightRef w;

  Encoded(WeightFormat f, const std::vector<float>& values, std::int64_t rows, std::int64_t cols)
      : codes(static_cast<std::size_t>(CodeBytes(f, rows, cols))),
        scales(static_cast<std::size_t>(ScaleBytes(f, rows, cols))) {
    EncodeRows(f, values.data(), rows, cols, codes.data(), scales.data());
    w = {f, rows, cols, codes.data(), scales.data()};
  }
  std::vector<float> Decode() const {
    std::vector<float> out(static_cast<std::size_t>(w.rows * w.cols));
    for (std::int64_t r = 0; r < w.rows; ++r) DecodeRow(w, r, out.data() + r * w.cols);
    return out;
  }
  float scale_f32(std::size_t i) const {
    float s;
    std::memcpy(&s, &scales[4 * i], 4);
    return s;
  }
  float scale_bf16(std::size_t i) const {
    BF16 s;
    std::memcpy(&s, &scales[2 * i], 2);
    return ToFloat(s);
  }
};

std::vector<float> Uniform(std::uint64_t seed, std::int64_t n, double size = 1) {
  Rng rng(seed);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = static_cast<float>(size * (2 * rng.Uniform() - 1));
  return v;
}

/// The value of an e4m3 code from its definition, in double.
double E4m3(unsigned code) {
  const unsigned exponent = code >> 3 & 15u, mantissa = code & 7u;
  const double sign = code >= 128 ? -1 : 1;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * mantissa / 8.0 * std::pow(2.0, -6);
  return sign * (1 + mantissa / 8.0) * std::pow(2.0, static_cast<int>(exponent) - 7);
}

TEST(E4m3, All256Codes) {
  for (unsigned code = 0; code < 256; ++code) {
    const float got = ToFloat(F8E4M3{static_cast<std::uint8_t>(code)});
    const double want = E4m3(code);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
      continue;
    }
    EXPECT_EQ(static_cast<double>(got), want) << code;
    EXPECT_EQ(std::signbit(got), code >= 128) << code;
    EXPECT_EQ(ToF8E4M3(got).bits, code);
  }
  EXPECT_EQ(E4m3(0x7E), 448.0);
}

TEST(E4m3, RoundsToTheNearestCodeAndTiesToTheEvenOne) {
  for (unsigned code = 0; code < 0x7E; ++code) {
    const auto low = static_cast<float>(E4m3(code)), high = static_cast<float>(E4m3(code + 1));
    const float middle = (low + high) / 2;  // exact
    const unsigned even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(ToF8E4M3(middle).bits, even) << code;
    EXPECT_EQ(ToF8E4M3(std::nextafter(middle, 0.f)).bits, code);
    EXPECT_EQ(ToF8E4M3(std::nextafter(middle, 1000.f)).bits, code + 1);
    EXPECT_EQ(ToF8E4M3(-middle).bits, even | 128u);
  }
  for (const float big : {449.f, 464.f, 480.f, 1e30f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(ToF8E4M3(big).bits, 0x7E);
    EXPECT_EQ(ToF8E4M3(-big).bits, 0xFE);
  }
  EXPECT_EQ(ToF8E4M3(std::numeric_limits<float>::quiet_NaN()).bits & 127, 127);
  EXPECT_EQ(ToF8E4M3(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(ToF8E4M3(-0.f).bits, 0x80);
}

TEST(Fp8, ScalesArePowersOfTwoAndFitTheBlock) {
  // 130 x 200: four blocks, three of them cut.
  auto values = Uniform(1, 130 * 200);
  values[0] = 448.f;     // block (0, 0): scale 1 exactly
  values[150] = 448.1f;  // block (0, 1): scale 2
  for (std::int64_t r = 128; r < 130; ++r) {
    for (std::int64_t c = 0; c < 128; ++c) values[static_cast<std::size_t>(r * 200 + c)] = 0;
  }
  const Encoded e(WeightFormat::kFp8, values, 130, 200);
  ASSERT_EQ(e.scales.size(), 16u);
  EXPECT_EQ(e.scale_f32(0), 1.f);
  EXPECT_EQ(e.scale_f32(1), 2.f);
  EXPECT_EQ(e.scale_f32(2), 1.f);      // zeros
  EXPECT_EQ(e.scale_f32(3), 0x1p-8f);  // values below 1: 0.99.. / 2^-8 is below 256
  const auto got = e.Decode();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t r = i / 200, c = i % 200;
    const float scale = e.scale_f32(r / 128 * 2 + c / 128);
    // Half a unit of the last of three mantissa bits, or of the smallest subnormal.
    const float bound = std::max(std::abs(values[i]) / 16, 0x1p-10f * scale);
    ASSERT_LE(std::abs(got[i] - values[i]), bound) << i;
  }
}

TEST(Fp8, SlicesFindTheirScales) {
  const auto values = Uniform(2, 300 * 70, 3.0);
  const Encoded e(WeightFormat::kFp8, values, 300, 70);
  const auto all = e.Decode();
  EXPECT_EQ(e.w.bytes(), 300 * 70 + 4 * 3);
  for (const std::int64_t first : {0, 1, 127, 128, 129, 255, 299}) {
    const WeightRef outer = e.w.RowSlice(first, 300 - first);
    for (const std::int64_t second : {std::int64_t{0}, std::int64_t{1}, 299 - first}) {
      if (second >= outer.rows) continue;
      const WeightRef inner = outer.RowSlice(second, outer.rows - second);
      std::vector<float> row(70);
      DecodeRow(inner, inner.rows - 1, row.data());
      EXPECT_EQ(std::memcmp(row.data(), &all[299 * 70], 280), 0) << first << " " << second;
      DecodeRow(inner, 0, row.data());
      const auto at = static_cast<std::size_t>((first + second) * 70);
      EXPECT_EQ(std::memcmp(row.data(), &all[at], 280), 0) << first << " " << second;
    }
  }
}

TEST(Int8, TiesZeroBlocksAndExtremes) {
  std::vector<float> v(96, 0.f);
  v[0] = 127, v[1] = 0.5f, v[2] = 1.5f, v[3] = 2.5f, v[4] = -0.5f, v[5] = -1.5f, v[6] = -127;
  v[64] = 1e30f, v[65] = -1e30f, v[66] = 1e20f;
  const Encoded e(WeightFormat::kInt8, v, 1, 96);
  EXPECT_EQ(e.scale_bf16(0), 1.f);
  const int want[] = {127, 0, 2, 2, 0, -2, -127};
  for (std::size_t i = 0; i < 7; ++i) EXPECT_EQ(static_cast<std::int8_t>(e.codes[i]), want[i]);
  EXPECT_EQ(e.scale_bf16(1), 1.f);  // a zero block has a scale a loader accepts
  for (std::size_t i = 32; i < 64; ++i) EXPECT_EQ(e.codes[i], 0);
  const auto got = e.Decode();
  EXPECT_NEAR(got[64], 1e30f, 1e30f / 200);
  EXPECT_EQ(got[65], -got[64]);
  EXPECT_EQ(got[66], 0.f);
}

TEST(Int8, ErrorIsHalfAStepAndDecodingExact) {
  const auto v = Uniform(3, 20 * 64, 0.02);
  const Encoded e(WeightFormat::kInt8, v, 20, 64);
  EXPECT_EQ(e.w.bytes(), 20 * 64 + 2 * 20 * 2);
  const auto got = e.Decode();
  for (std::size_t i = 0; i < v.size(); ++i) {
    const double step = e.scale_bf16(i / 32);
    const double exact = static_cast<std::int8_t>(e.codes[i]) * step;
    EXPECT_EQ(static_cast<double>(got[i]), exact);
    // The scale is rounded to 8 bits: the largest code may miss by 127/2^9 of a step more. All
    // others are chosen for the rounded scale.
    const bool largest = std::abs(static_cast<std::int8_t>(e.codes[i])) == 127;
    EXPECT_LE(std::abs(got[i] - v[i]), (largest ? 0.75 : 0.500001) * step) << i;
  }
}

TEST(Encode, TinyAndHugeValuesKeepUsableScales) {
  for (const float size : {std::numeric_limits<float>::denorm_min(), 1e-40f, 1e-38f, 1e30f,
                           std::numeric_limits<float>::max()}) {
    const std::vector<float> v(32, size);
    const Encoded fp8(WeightFormat::kFp8, v, 1, 32), int8(WeightFormat::kInt8, v, 1, 32);
    for (const float scale : {fp8.scale_f32(0), int8.scale_bf16(0)}) {
      EXPECT_GE(scale, std::numeric_limits<float>::min()) << size;
      EXPECT_LE(scale, 0x1p120f) << size;
    }
    if (size > 1e-30f && size < 1e38f) {
      EXPECT_NEAR(fp8.Decode()[0] / size, 1, 1 / 16.0);
      EXPECT_NEAR(int8.Decode()[0] / size, 1, 1 / 200.0);
    }
    EXPECT_TRUE(std::isfinite(fp8.Decode()[0]) && std::isfinite(int8.Decode()[0])) << size;
  }
}

TEST(Encode, WidthsAndNames) {
  EXPECT_TRUE(FitsWidth(WeightFormat::kFp8, 33));
  EXPECT_TRUE(FitsWidth(WeightFormat::kBF16, 1));
  EXPECT_FALSE(FitsWidth(WeightFormat::kInt8, 33));
  EXPECT_FALSE(FitsWidth(WeightFormat::kMxfp4, 48));
  for (const char* name : {"f32", "bf16", "f16", "mxfp4", "fp8-e4m3", "int8"}) {
    ASSERT_TRUE(ParseWeightFormat(name).has_value()) << name;
    EXPECT_EQ(Name(*ParseWeightFormat(name)), name);
  }
  EXPECT_FALSE(ParseWeightFormat("fp8").has_value());
  EXPECT_FALSE(ParseWeightFormat("").has_value());
}

TEST(RoundingError, SumsAndMerges) {
  const float a[] = {3, 4}, b[] = {3, 4.5f}, zero[] = {0, 0};
  RoundingError e, other;
  EXPECT_EQ(e.relative_l2(), 0.0);
  e.Add(a, b, 2);
  EXPECT_DOUBLE_EQ(e.relative_l2(), 0.1);
  EXPECT_EQ(e.max_abs, 0.5);
  other.Add(zero, zero, 2);
  e.Merge(other);
  EXPECT_DOUBLE_EQ(e.relative_l2(), 0.1);
}

}  // namespace
}  // namespace k3
