// The CUDA backend as its header promises it. The ops themselves are compared with the reference by
// the op probe and by bench/gpu.
#include "k3/kernels/cuda_backend.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "k3/base/rng.h"
#include "k3/kernels/devices.h"

namespace k3 {
namespace {

/// A backend on the first GPU, or null with the reason to skip.
std::unique_ptr<CudaBackend> Gpu(std::string& why) {
  auto made = MakeCudaBackend(0);
  if (made.ok()) return std::move(*made);
  why = made.message();
  return nullptr;
}

TEST(CudaBackendTest, SaysWhyThereIsNone) {
  const auto made = MakeCudaBackend(99);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code, BuiltWithCuda() ? Code::kResource : Code::kUnsupported);
  EXPECT_NE(made.message().find(BuiltWithCuda() ? "GPU 99" : "no CUDA"), std::string::npos);
  EXPECT_FALSE(MakeCudaBackend(-1).ok());
}

TEST(CudaBackendTest, HasTheKdaOpsOfABuildWithCuda) {
  for (const char* op : {"KdaRecurrent", "KdaChunk", "KdaGate", "ShortConv"}) {
    EXPECT_EQ(CudaHas(op), BuiltWithCuda()) << op;
  }
  EXPECT_FALSE(CudaHas("Gemm"));
  EXPECT_FALSE(CudaHas(""));
}

TEST(CudaBackendTest, AMissingOpIsNamedOnceByWait) {
  std::string why;
  const auto gpu = Gpu(why);
  if (!gpu) GTEST_SKIP() << why;
  gpu->Gemm({});
  gpu->Route({});
  const Status status = gpu->Wait();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kUnsupported);
  EXPECT_NE(status.message().find("Gemm"), std::string::npos) << status.message();
  EXPECT_TRUE(gpu->Wait().ok()) << "an error is told once";
}

TEST(CudaBackendTest, RefusesImpossibleAllocations) {
  std::string why;
  const auto gpu = Gpu(why);
  if (!gpu) GTEST_SKIP() << why;
  for (const std::int64_t bytes : {std::int64_t{-1}, std::int64_t{1} << 60}) {
    const auto buffer = gpu->Allocate(bytes);
    ASSERT_FALSE(buffer.ok());
    EXPECT_EQ(buffer.error().code, Code::kResource);
  }
  EXPECT_TRUE(gpu->Allocate(0).ok());
  EXPECT_TRUE(gpu->Wait().ok()) << "a refused allocation must not spoil what follows";
}

/// Host arrays of one KDA call of `dim` channels over sequences of these lengths, and their twins.
class KdaCase {
 public:
  KdaCase(CudaBackend& gpu, std::int64_t dim, const std::vector<std::int64_t>& lengths)
      : gpu_(gpu), dim_(dim) {
    std::int64_t tokens = 0;
    for (const std::int64_t n : lengths) ranges_.push_back({tokens, n}), tokens += n;
    rows_ = tokens;
    const std::int64_t wide = tokens * (kHeads * dim + kPad);
    const double unit = 1 / std::sqrt(static_cast<double>(dim) / 3);  // rows of length about 1
    const double high[] = {unit, unit, 1, 0};
    const double low[] = {-unit, -unit, -1, -5};
    for (int i = 0; i < 4; ++i) in_[i] = Values(wide, low[i], high[i]);
    in_[4] = Values(tokens * kHeads, 0, 1);
    states_ = Values(static_cast<std::int64_t>(lengths.size()) * kHeads * dim * dim, -1, 1);
    out_.assign(static_cast<std::size_t>(wide), -7.f);
  }
  void Reference() {
    Run([](Backend& ops, const KdaArgs& a) { ops.KdaRecurrent(a); }, nullptr);
  }
  void Gpu(bool chunk) {
    std::vector<DeviceBuffer> memory;
    auto on_gpu = [&](std::vector<float>& host) {
      auto buffer = gpu_.Allocate(static_cast<std::int64_t>(4 * host.size()));
      EXPECT_TRUE(buffer.ok());
      memory.push_back(std::move(*buffer));
      EXPECT_TRUE(gpu_.CopyToDevice(memory.back().data(), host.data(), memory.back().bytes()).ok());
      return static_cast<float*>(memory.back().data());
    };
    Run([chunk](Backend& ops, const KdaArgs& a) { chunk ? ops.KdaChunk(a) : ops.KdaRecurrent(a); },
        on_gpu);
    EXPECT_TRUE(gpu_.CopyToHost(states_.data(), memory[5].data(), memory[5].bytes()).ok());
    EXPECT_TRUE(gpu_.CopyToHost(out_.data(), memory[6].data(), memory[6].bytes()).ok());
  }
  std::vector<float> states_, out_;

 private:
  static constexpr std::int64_t kHeads = 3, kPad = 5;
  std::vector<float> Values(std::int64_t n, double low, double high) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = static_cast<float>(low + (high - low) * rng_.Uniform());
    return v;
  }
  template <class Call, class Place>
  void Run(Call&& call, Place&& place) {
    float* at[7];
    std::vector<float>* all[] = {&in_[0], &in_[1], &in_[2], &in_[3], &in_[4], &states_, &out_};
    constexpr bool kHost = std::is_null_pointer_v<std::decay_t<Place>>;
    for (int i = 0; i < 7; ++i) {
      if constexpr (kHost) {
        at[i] = all[i]->data();
      } else {
        at[i] = place(*all[i]);
      }
    }
    KdaArgs a;
    const std::int64_t width = kHeads * dim_;
    CMat* rows[] = {&a.q, &a.k, &a.v, &a.g};
    for (int i = 0; i < 4; ++i) *rows[i] = CMat(at[i], {rows_, width}, {width + kPad, 1});
    a.beta = CMat(at[4], {rows_, kHeads});
    a.n_heads = kHeads, a.scale = 0.3f, a.lower_bound = -5.f;
    std::vector<float*> states;
    for (std::size_t s = 0; s < ranges_.size(); ++s) {
      states.push_back(at[5] + static_cast<std::int64_t>(s) * kHeads * dim_ * dim_);
    }
    a.sequences = ranges_, a.states = states;
    a.o = Mat(at[6], {rows_, width}, {width + kPad, 1});
    if constexpr (kHost) {
      ReferenceBackend reference;
      call(reference, a);
    } else {
      call(gpu_, a);
    }
  }
  CudaBackend& gpu_;
  std::int64_t dim_, rows_ = 0;
  Rng rng_{7};
  std::vector<SequenceRange> ranges_;
  std::vector<float> in_[5];
};

double RelativeL2(const std::vector<float>& got, const std::vector<float>& want) {
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    diff += d * d, norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

TEST(CudaBackendTest, KdaAgreesWithTheReference) {
  std::string why;
  const auto gpu = Gpu(why);
  if (!gpu) GTEST_SKIP() << why;
  std::vector<std::int64_t> many(70, 1);  // more than one launch takes
  many[3] = 0, many[69] = 3;
  for (const std::int64_t dim : {32, 64, 128}) {
    for (const auto& lengths : {std::vector<std::int64_t>{}, {0}, {1}, {33, 0, 5}, many}) {
      for (const bool chunk : {false, true}) {
        KdaCase want(*gpu, dim, lengths), got(*gpu, dim, lengths);
        want.Reference();
        got.Gpu(chunk);
        // f32 sums of dim products, 33 tokens deep, against float64.
        EXPECT_LE(RelativeL2(got.out_, want.out_), 1e-5) << dim << ", " << lengths.size();
        EXPECT_LE(RelativeL2(got.states_, want.states_), 1e-5) << dim << ", " << lengths.size();
      }
    }
  }
}

}  // namespace
}  // namespace k3
