// Golden tensors for tests.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "k3/base/ids.h"
#include "k3/io/safetensors.h"
#include "k3/tensor/tensor_ref.h"

namespace k3::testing {

inline std::string GoldenDir() { return std::string(K3_SOURCE_DIR) + "/tests/golden"; }

/// Folders and files of golden/variants: every reading of the config.
inline constexpr const char* kVariants[] = {"released",
                                            "plain",
                                            "scaled",
                                            "scaled_fixed_bound",
                                            "gated",
                                            "gated_channel",
                                            "norm_scaled",
                                            "full_attn_res",
                                            "block_attn_res_gate",
                                            "router_latent",
                                            "router_encoder",
                                            "experts_hidden",
                                            "softplus_decay",
                                            "gqa_hybrid",
                                            "gqa_rope",
                                            "mqa"};

/// Of the logits of tiny-k3 and tiny-linear; docs/numerics.md says why.
inline constexpr double kLogitTolerance = 4e-6;

/// A file of goldens; a missing name fails the test that asks for it.
class Golden {
 public:
  explicit Golden(const std::string& file) {
    auto opened = SafetensorsFile::Open(GoldenDir() + "/" + file);
    EXPECT_TRUE(opened.ok()) << (opened.ok() ? "" : opened.message());
    if (opened.ok()) file_ = std::move(*opened);
  }

  bool Has(const std::string& name) const { return file_.tensors().contains(name); }
  const TensorRef& Ref(const std::string& name) const {
    const auto it = file_.tensors().find(name);
    static const TensorRef empty;
    EXPECT_NE(it, file_.tensors().end()) << "no golden " << name;
    return it == file_.tensors().end() ? empty : it->second;
  }
  std::vector<float> Floats(const std::string& name) const {
    std::vector<float> out;
    EXPECT_TRUE(ToFloats(Ref(name), out)) << name;
    return out;
  }
  std::vector<std::int32_t> Ints(const std::string& name) const {
    const TensorRef& t = Ref(name);
    EXPECT_EQ(t.dtype, DType::kI32) << name;
    std::vector<std::int32_t> out(static_cast<std::size_t>(t.elements()));
    std::memcpy(out.data(), t.data, out.size() * 4);
    return out;
  }
  std::int64_t Dim(const std::string& name, std::size_t i) const { return Ref(name).shape.at(i); }
  const std::map<std::string, TensorRef, std::less<>>& tensors() const { return file_.tensors(); }

 private:
  SafetensorsFile file_;
};

/// |got - want| / |want|, in the Euclidean norm.
inline double RelativeL2(const float* got, const float* want, std::size_t n) {
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    diff += d * d;
    norm += static_cast<double>(want[i]) * want[i];
  }
  return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}
inline double RelativeL2(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) return HUGE_VAL;
  return RelativeL2(got.data(), want.data(), want.size());
}

}  // namespace k3::testing
