#include "k3/model/quantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "k3/io/checkpoint.h"
#include "k3/model/inventory.h"
#include "k3/model/matrix_form.h"
#include "k3/model/weights.h"
#include "k3/quant/decode_row.h"
#include "support/config_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kGolden;
using testing::TempDir;

constexpr const char* kQProj = "model.layers.1.self_attn.q_proj.weight";
const std::string kPrefix = "language_model.";

ThreadPool& Pool() {
  static ThreadPool pool(2);
  return pool;
}

Result<QuantizeResult> Convert(const std::string& dir, const std::string& out,
                               const QuantizeOptions& options) {
  return Quantize(dir, out, options, {&Pool(), nullptr, {}});
}

QuantizeOptions All(WeightFormat f) {
  QuantizeOptions o;
  o.trunk = o.embeddings = o.head = f;
  return o;
}

/// A single-file copy of a golden checkpoint whose tensors can be changed.
class Altered {
 public:
  explicit Altered(const std::string& name) : dir_(folder_ / "in") {
    std::filesystem::create_directory(dir_);
    for (const char* file : {"config.json", "tiktoken.model", "tokenizer_config.json"}) {
      std::filesystem::copy(kGolden + name + "/" + file, dir_ + "/" + file);
    }
    auto checkpoint = Checkpoint::Open(kGolden + name);
    EXPECT_TRUE(checkpoint.ok());
    golden_.emplace(std::move(*checkpoint));
    for (const auto& [n, t] : golden_->tensors()) tensors[n] = t;
  }
  const std::string& Save() {
    std::vector<NamedTensor> list;
    for (const auto& [n, t] : tensors) list.push_back({n, t});
    const Status s = WriteSafetensors(dir_ + "/model.safetensors", list);
    EXPECT_TRUE(s.ok()) << (s.ok() ? "" : s.message());
    return dir_;
  }
  /// Changes a number of config.json's text_config.
  void Configure(const char* key, std::int64_t value) {
    nlohmann::json j = nlohmann::json::parse(testing::ReadBytes(dir_ + "/config.json"));
    j["text_config"][key] = value;
    testing::WriteBytes(dir_ + "/config.json", j.dump());
  }
  /// Replaces a tensor by one with these bytes.
  void Put(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           std::string bytes) {
    owned_.push_back(std::make_unique<std::string>(std::move(bytes)));
    TensorRef t{dtype, std::move(shape), nullptr};
    ASSERT_EQ(static_cast<std::size_t>(t.bytes()), owned_.back()->size());
    t.data = reinterpret_cast<const std::byte*>(owned_.back()->data());
    tensors[name] = t;
  }
  std::string out() { return folder_ / "out"; }
  TempDir& folder() { return folder_; }

  std::map<std::string, TensorRef> tensors;

 private:
  TempDir folder_;
  std::string dir_;
  std::optional<Checkpoint> golden_;
  std::vector<std::unique_ptr<std::string>> owned_;
};

TEST(Quantize, EveryFormatLoadsAndIsAsPlanned) {
  for (const WeightFormat f : {WeightFormat::kFp8, WeightFormat::kInt8, WeightFormat::kMxfp4}) {
    SCOPED_TRACE(Name(f));
    const TempDir dir;
    const std::string out = dir / "out";
    const auto plan = PlanQuantization(kGolden + "tiny-k3", All(f));
    ASSERT_TRUE(plan.ok()) << plan.message();
    const auto done = Convert(kGolden + "tiny-k3", out, All(f));
    ASSERT_TRUE(done.ok()) << done.message();
    EXPECT_EQ(done->bytes_after, plan->bytes_after);
    EXPECT_LT(done->bytes_after, done->bytes_before);
    EXPECT_EQ(dir.count(), 1) << "only the folder itself is left";
    std::int64_t on_disk = 0;
    for (const auto& file : std::filesystem::directory_iterator(out)) {
      on_disk += static_cast<std::int64_t>(file.file_size());
    }
    EXPECT_GE(plan->file_bytes, on_disk) << "what is compared with the free space";
    EXPECT_LT(plan->file_bytes, 2 * on_disk);
    const auto config = ReadModelConfig(out);
    ASSERT_TRUE(config.ok()) << config.message();
    const auto checkpoint = Checkpoint::Open(out);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.message();
    EXPECT_THAT(checkpoint->warnings(), IsEmpty());
    const auto weights = BindWeights(*config, *checkpoint);
    ASSERT_TRUE(weights.ok()) << weights.message();
    EXPECT_EQ((*weights)->bytes, done->bytes_after);
    EXPECT_EQ((*weights)->embedding.format, f);
    EXPECT_EQ((*weights)->layers[0].kda.q.format, f);
    const auto inventory = TakeInventory(out);
    ASSERT_TRUE(inventory.ok());
    EXPECT_THAT(inventory->problems, IsEmpty());
    EXPECT_EQ(inventory->bytes, done->bytes_after);
    EXPECT_EQ(inventory->index_total_size, done->bytes_after);
    EXPECT_EQ(inventory->parameters, TakeInventory(kGolden + "tiny-k3")->parameters);
    for (const QuantizedMatrix& m : done->matrices) {
      EXPECT_EQ(m.changes(), m.role != TensorRole::kRoutedExpert && FitsWidth(f, m.cols)) << m.name;
      // Of uniform or normal weights: e4m3 1/2 of 2^-4, int8 a step of 1/127 of the largest,
      // MXFP4 up to a quarter of a value.
      const double bound = f == WeightFormat::kFp8 ? 0.04 : f == WeightFormat::kInt8 ? 0.012 : 0.2;
      EXPECT_LT(m.error.relative_l2(), bound) << m.name;
      EXPECT_EQ(m.error.relative_l2() > 0, m.changes()) << m.name;
    }
  }
}

TEST(Quantize, SameFormatKeepsEveryByte) {
  const TempDir dir;
  QuantizeOptions o;
  o.experts = WeightFormat::kMxfp4;
  const auto done = Convert(kGolden + "tiny-k3", dir / "out", o);
  ASSERT_TRUE(done.ok()) << done.message();
  EXPECT_EQ(done->changed(), 0);
  for (const char* file : {"config.json", "model-00001-of-00003.safetensors",
                           "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                           "tiktoken.model", "tokenizer_config.json", "generation_config.json"}) {
    EXPECT_EQ(testing::ReadBytes(dir / (std::string("out/") + file)),
              testing::ReadBytes(kGolden + "tiny-k3/" + file))
        << file;
  }
}

TEST(Quantize, UnpackingExpertsIsExactAndPackingThemAgainToo) {
  const TempDir dir;
  QuantizeOptions to_bf16, back;
  to_bf16.experts = WeightFormat::kBF16;
  back.experts = WeightFormat::kMxfp4;
  const auto open = Convert(kGolden + "tiny-k3", dir / "bf16", to_bf16);
  ASSERT_TRUE(open.ok()) << open.message();
  EXPECT_EQ(open->changed(), 7 * 16 * 3);
  for (const QuantizedMatrix& m : open->matrices) EXPECT_EQ(m.error.error_squares, 0) << m.name;
  const auto config = nlohmann::json::parse(testing::ReadBytes(dir / "bf16/config.json"));
  EXPECT_FALSE(config["text_config"].contains("quantization_config"));
  const auto closed = Convert(dir / "bf16", dir / "mxfp4", back);
  ASSERT_TRUE(closed.ok()) << closed.message();
  // Blocks may get a smaller scale than they had; the values are the same.
  EXPECT_EQ(closed->changed(), open->changed());
  EXPECT_EQ(closed->bytes_after, open->bytes_before);
  for (const QuantizedMatrix& m : closed->matrices) EXPECT_EQ(m.error.error_squares, 0) << m.name;
  const auto a = Checkpoint::Open(kGolden + "tiny-k3"), b = Checkpoint::Open(dir / "mxfp4");
  ASSERT_TRUE(a.ok() && b.ok());
  const std::string name = kPrefix + "model.layers.1.block_sparse_moe.experts.5.w1.weight";
  const WeightRef x = MatrixOf(a->tensors(), name), y = MatrixOf(b->tensors(), name);
  std::vector<float> want(static_cast<std::size_t>(x.cols)), got(want.size());
  for (std::int64_t r = 0; r < x.rows; ++r) {
    DecodeRow(x, r, want.data());
    DecodeRow(y, r, got.data());
    EXPECT_EQ(got, want) << r;
  }
}

TEST(Quantize, PatternsChooseMatrices) {
  QuantizeOptions o = All(WeightFormat::kInt8);
  o.only = {"*.q_proj.weight", "lm_head.weight"};
  o.keep = {"model.layers.2.*"};
  const auto plan = PlanQuantization(kGolden + "tiny-k3", o);
  ASSERT_TRUE(plan.ok()) << plan.message();
  for (const QuantizedMatrix& m : plan->matrices) {
    const bool wanted = (m.name.ends_with(".q_proj.weight") || m.role == TensorRole::kHead) &&
                        !m.name.starts_with("model.layers.2.");
    EXPECT_EQ(m.changes(), wanted) << m.name;
    if (m.name == "model.layers.2.self_attn.q_proj.weight") {
      EXPECT_EQ(m.kept_because, "--keep");
    }
  }
  o.keep = {"model.layer.2.*"};
  EXPECT_THAT(PlanQuantization(kGolden + "tiny-k3", o).message(),
              HasSubstr("--keep: \"model.layer.2.*\" fits the name of no matrix"));
}

TEST(Quantize, WidthsThatDoNotFitStayAndAreNamed) {
  Altered model("tiny-k3");
  QuantizeOptions o;
  o.trunk = WeightFormat::kMxfp4;
  const auto plan = PlanQuantization(model.Save(), o);
  ASSERT_TRUE(plan.ok()) << plan.message();
  std::int64_t kept = 0;
  for (const QuantizedMatrix& m : plan->matrices) {
    if (m.role == TensorRole::kRoutedExpert || m.role == TensorRole::kEmbedding ||
        m.role == TensorRole::kHead) {
      continue;
    }
    EXPECT_EQ(m.changes(), m.cols % 32 == 0) << m.name;
    if (m.cols % 32 == 0) continue;
    ++kept;
    EXPECT_THAT(m.kept_because, HasSubstr("no multiple of 32"));
  }
  EXPECT_EQ(kept, 3);  // q_b_proj of the three MLA layers: rank 24
  EXPECT_THAT(plan->warnings, ::testing::Contains(HasSubstr("3 matrices stay as they are")));
}

TEST(Quantize, RoundingTwiceNeedsForce) {
  const TempDir dir;
  QuantizeOptions o;
  o.trunk = WeightFormat::kFp8;
  ASSERT_TRUE(Convert(kGolden + "tiny-k3", dir / "fp8", o).ok());
  o.trunk = WeightFormat::kInt8;
  const auto refused = Convert(dir / "fp8", dir / "int8", o);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.message(), HasSubstr("self_attn.q_proj.weight in fp8-e4m3"));
  EXPECT_THAT(refused.message(), HasSubstr("--force"));
  EXPECT_FALSE(std::filesystem::exists(dir / "int8"));
  o.force = true;
  const auto forced = Convert(dir / "fp8", dir / "int8", o);
  ASSERT_TRUE(forced.ok()) << forced.message();
  EXPECT_THAT(forced->warnings, ::testing::Contains(HasSubstr("a second error")));
}

TEST(Quantize, ValuesThatAreNoNumbersAreRefusedByName) {
  Altered model("tiny-k3");
  const std::string name = kPrefix + kQProj;
  const TensorRef golden = model.tensors[name];
  for (const unsigned bits : {0x7F80u, 0xFF80u, 0x7FC1u}) {
    std::string bytes(reinterpret_cast<const char*>(golden.data),
                      static_cast<std::size_t>(golden.bytes()));
    std::memcpy(bytes.data() + 2 * (64 * 5 + 7), &bits, 2);  // the low half
    model.Put(name, DType::kBF16, golden.shape, bytes);
    for (const WeightFormat f : {WeightFormat::kFp8, WeightFormat::kInt8, WeightFormat::kMxfp4}) {
      QuantizeOptions o;
      o.trunk = f;
      const auto r = Convert(model.Save(), model.out(), o);
      ASSERT_FALSE(r.ok());
      EXPECT_EQ(r.error().code, Code::kNumeric);
      EXPECT_THAT(r.message(), HasSubstr(name));
      EXPECT_THAT(r.message(), HasSubstr("value [5, 7] is"));
      EXPECT_EQ(model.folder().count(), 1) << "nothing is left but the input";
    }
  }
  // Finite, but beyond bf16.
  std::string bytes(4 * 96 * 64, '\0');
  const float huge = std::numeric_limits<float>::max();
  std::memcpy(bytes.data(), &huge, 4);
  model.Put(name, DType::kF32, {96, 64}, bytes);
  QuantizeOptions o;
  o.trunk = WeightFormat::kBF16;
  EXPECT_THAT(Convert(model.Save(), model.out(), o).message(), HasSubstr("inf after rounding"));
}

TEST(Quantize, ReportedErrorsAreThoseOfTheFiles) {
  const TempDir dir;
  for (const WeightFormat f : {WeightFormat::kFp8, WeightFormat::kInt8, WeightFormat::kMxfp4}) {
    const std::string out = dir / std::string(Name(f));
    const auto done = Convert(kGolden + "tiny-k3", out, All(f));
    ASSERT_TRUE(done.ok()) << done.message();
    const auto before = Checkpoint::Open(kGolden + "tiny-k3"), after = Checkpoint::Open(out);
    ASSERT_TRUE(before.ok() && after.ok());
    for (const QuantizedMatrix& m : done->matrices) {
      const WeightRef a = MatrixOf(before->tensors(), kPrefix + m.name);
      const WeightRef b = MatrixOf(after->tensors(), kPrefix + m.name);
      std::vector<float> x(static_cast<std::size_t>(m.cols)), y(x.size());
      RoundingError want;
      for (std::int64_t r = 0; m.changes() && r < m.rows; ++r) {
        DecodeRow(a, r, x.data());
        DecodeRow(b, r, y.data());
        want.Add(x.data(), y.data(), m.cols);
      }
      EXPECT_NEAR(m.error.relative_l2(), want.relative_l2(), 1e-12) << m.name;
      EXPECT_EQ(m.error.max_abs, want.max_abs) << m.name;
      EXPECT_EQ(m.error.max_abs > 0, m.changes()) << m.name;
    }
  }
}

/// Matrices are converted some rows at a time, each strip into its own place.
TEST(Quantize, AMatrixOfSeveralStripsKeepsItsRows) {
  constexpr std::int64_t kRows = 140001, kCols = 64;  // 8.96e6 values, over two strips of 2^22
  Altered model("tiny-k3");
  model.Configure("vocab_size", kRows);
  std::string bytes(static_cast<std::size_t>(2 * kRows * kCols), '\0');
  for (std::int64_t i = 0; i < kRows * kCols; ++i) {
    const BF16 x = ToBF16(static_cast<float>(1 + i / kCols * 7919 % 1009));  // by the row
    std::memcpy(bytes.data() + 2 * i, &x, 2);
  }
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
    model.Put(kPrefix + name, DType::kBF16, {kRows, kCols}, bytes);
  }
  QuantizeOptions o;
  o.embeddings = WeightFormat::kInt8, o.head = WeightFormat::kFp8;
  const auto done = Convert(model.Save(), model.out(), o);
  ASSERT_TRUE(done.ok()) << done.message();
  const auto result = Checkpoint::Open(model.out());
  ASSERT_TRUE(result.ok()) << result.message();
  std::vector<float> row(kCols);
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
    const WeightRef w = MatrixOf(result->tensors(), kPrefix + name);
    ASSERT_EQ(w.rows, kRows);
    for (std::int64_t r = 0; r < kRows; r += 37) {
      DecodeRow(w, r, row.data());
      const auto want = static_cast<float>(1 + r * 7919 % 1009);
      ASSERT_NEAR(row[kCols - 1], want, w.format == WeightFormat::kInt8 ? want / 150 : want / 15)
          << name << " row " << r;
    }
  }
}

TEST(Quantize, TheNewFolderMustNotExist) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "out");
  const auto o = All(WeightFormat::kInt8);
  EXPECT_THAT(Convert(kGolden + "tiny-k3", dir / "out", o).message(), HasSubstr("exists already"));
  EXPECT_THAT(Convert(kGolden + "tiny-k3", dir / "out/", o).message(), HasSubstr("exists already"));
  EXPECT_THAT(Convert(kGolden + "tiny-k3", dir / "no/out", o).message(),
              HasSubstr("cannot create the folder"));
  EXPECT_EQ(dir.count(), 1);
}

TEST(Quantize, CancelledLeavesNothing) {
  const TempDir dir;
  const std::atomic<bool> cancel{true};
  const auto r =
      Quantize(kGolden + "tiny-k3", dir / "out", All(WeightFormat::kInt8), {&Pool(), &cancel, {}});
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code, Code::kCancelled);
  EXPECT_EQ(dir.count(), 0);
}

// ---- config.json -------------------------------------------------------------------------------

nlohmann::json ConfigOf(const std::string& golden, const QuantizeOptions& o) {
  const TempDir dir;
  const auto r = Convert(kGolden + golden, dir / "out", o);
  EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.message());
  const std::string text = testing::ReadBytes(dir / "out/config.json");
  const auto parsed = ParseModelConfig(text, "config.json");
  EXPECT_TRUE(parsed.ok()) << (parsed.ok() ? "" : parsed.message());
  return nlohmann::json::parse(text);
}

TEST(QuantizedConfig, SaysWhatIsWhere) {
  const auto fp8 = ConfigOf("tiny-linear", All(WeightFormat::kFp8))["quantization_config"];
  EXPECT_EQ(fp8["quant_method"], "fp8");
  EXPECT_EQ(fp8["weight_block_size"], nlohmann::json({128, 128}));
  EXPECT_THAT(fp8["modules_to_not_convert"].dump(), HasSubstr("experts"));
  const auto k3 = ConfigOf("tiny-k3", All(WeightFormat::kFp8));
  const auto mixed = k3["text_config"]["quantization_config"];
  EXPECT_FALSE(k3.contains("quantization_config"));
  EXPECT_EQ(mixed["quant_method"], "compressed-tensors");
  EXPECT_EQ(mixed["format"], "mixed-precision");
  ASSERT_EQ(mixed["config_groups"].size(), 2u);
  EXPECT_EQ(mixed["config_groups"]["group_0"]["format"], "mxfp4-pack-quantized");
  EXPECT_EQ(mixed["config_groups"]["group_0"]["targets"].size(), 3u);
  EXPECT_EQ(mixed["config_groups"]["group_1"]["weights"]["strategy"], "block");
  EXPECT_THAT(mixed["config_groups"]["group_1"]["targets"].dump(),
              HasSubstr("re:^language_model\\\\.model\\\\.layers\\\\.\\\\d+\\\\.self_attn"));
}

TEST(QuantizedConfig, NamesModulesWherePatternsWouldTakeTooMany) {
  QuantizeOptions o;
  o.trunk = WeightFormat::kInt8;
  o.only = {kQProj};
  const auto q = ConfigOf("tiny-linear", o)["quantization_config"];
  EXPECT_EQ(q["format"], "int-quantized");
  EXPECT_EQ(q["config_groups"]["group_0"]["targets"],
            nlohmann::json({"model.layers.1.self_attn.q_proj"}));
}

// ---- what a loader refuses ---------------------------------------------------------------------

class HostileParts : public ::testing::Test {
 protected:
  HostileParts() : model_("tiny-linear") {
    const auto checkpoint = Checkpoint::Open(kGolden + "tiny-linear");
    rows_ = checkpoint->Find(kQProj)->shape[0];
    cols_ = checkpoint->Find(kQProj)->shape[1];
  }
  std::string Zeros(std::int64_t n) { return std::string(static_cast<std::size_t>(n), '\0'); }
  void Fp8(std::string codes, std::string scales) {
    const auto parts = PartsOf(WeightFormat::kFp8, rows_, cols_);
    model_.Put(kQProj, DType::kF8E4M3, parts[0].shape, std::move(codes));
    model_.Put(std::string(kQProj) + "_scale_inv", DType::kF32, parts[1].shape, std::move(scales));
  }
  void Int8(const std::string& scales) {
    const auto parts = PartsOf(WeightFormat::kInt8, rows_, cols_);
    model_.Put(kQProj, DType::kI8, parts[0].shape, Zeros(rows_ * cols_));
    model_.Put(std::string(kQProj) + "_scale", DType::kBF16, parts[1].shape, scales);
  }
  std::string Refusal() {
    const std::string& dir = model_.Save();
    const auto config = ReadModelConfig(dir);
    const auto checkpoint = Checkpoint::Open(dir);
    EXPECT_TRUE(checkpoint.ok()) << (checkpoint.ok() ? "" : checkpoint.message());
    const auto check = CheckTensors(*config, *checkpoint);
    const auto inventory = TakeInventory(dir);
    EXPECT_TRUE(inventory.ok());
    return check.ok() ? "" : check.message();
  }
  static std::string Bytes(float f) {
    std::string s(4, '\0');
    std::memcpy(s.data(), &f, 4);
    return s;
  }

  Altered model_;
  std::int64_t rows_ = 0, cols_ = 0;
};

TEST_F(HostileParts, GoodOnesPass) {
  Fp8(Zeros(rows_ * cols_), Bytes(1.f));
  EXPECT_EQ(Refusal(), "");
}

TEST_F(HostileParts, ScalesThatNoWriterMayGive) {
  ASSERT_LE(rows_, 128);
  ASSERT_LE(cols_, 128);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {0.f, -0.f, -1.f, kInf, -kInf, std::nanf(""), 0x1.1p120f}) {
    Fp8(Zeros(rows_ * cols_), Bytes(bad));
    EXPECT_THAT(Refusal(), HasSubstr("scale 0 of tensor model.layers.1.self_attn.q_proj.weight_"
                                     "scale_inv is"))
        << bad;
    EXPECT_THAT(Refusal(), HasSubstr("expected a positive number up to 2^120"));
  }
  model_.tensors.erase(std::string(kQProj) + "_scale_inv");
  const std::int64_t n = rows_ * cols_ / 32;
  for (const unsigned bad : {0u, 0x8000u, 0xBF80u, 0x7F80u, 0x7FC0u, 0x7F00u}) {
    std::string scales;
    for (std::int64_t i = 0; i < n; ++i) scales += "\x80\x3F";
    std::memcpy(scales.data() + 2 * (n - 1), &bad, 2);
    Int8(scales);
    EXPECT_THAT(Refusal(), HasSubstr("q_proj.weight_scale is")) << bad;
  }
}

TEST_F(HostileParts, NanCodes) {
  for (const char bad : {'\x7F', '\xFF'}) {
    std::string codes = Zeros(rows_ * cols_);
    codes[70] = bad;
    Fp8(codes, Bytes(1.f));
    EXPECT_THAT(Refusal(), HasSubstr("code 70 of tensor model.layers.1.self_attn.q_proj.weight"));
    EXPECT_THAT(Refusal(), HasSubstr("the NaN of e4m3"));
  }
}

TEST_F(HostileParts, MissingPartsAndWrongShapes) {
  const std::string scale_inv = std::string(kQProj) + "_scale_inv",
                    scale = std::string(kQProj) + "_scale";
  Fp8(Zeros(rows_ * cols_), Bytes(1.f));
  model_.Put(scale_inv, DType::kF32, {1}, Bytes(1.f));
  EXPECT_THAT(Refusal(), HasSubstr("weight_scale_inv: found [1], expected [1, 1]"));
  model_.Put(scale_inv, DType::kBF16, {1, 1}, "\x80\x3F");
  EXPECT_THAT(Refusal(), HasSubstr("weight_scale_inv: found BF16, expected F32"));
  model_.tensors.erase(scale_inv);
  EXPECT_THAT(Refusal(), HasSubstr("missing tensor " + scale_inv));
  model_.Put(kQProj, DType::kF8E4M3, {cols_, rows_}, Zeros(rows_ * cols_));
  model_.Put(scale_inv, DType::kF32, {1, 1}, Bytes(1.f));
  ASSERT_NE(rows_, cols_);
  EXPECT_THAT(Refusal(), HasSubstr("wrong shape " + std::string(kQProj)));
  model_.tensors.erase(scale_inv);
  Int8(std::string(static_cast<std::size_t>(rows_ * cols_ / 16), '\x3F'));
  model_.Put(scale, DType::kF32, {rows_, cols_ / 32}, Zeros(rows_ * cols_ / 8));
  EXPECT_THAT(Refusal(), HasSubstr("weight_scale: found F32, expected BF16"));
  model_.tensors.erase(scale);
  EXPECT_THAT(Refusal(), HasSubstr("missing tensor " + scale));
}

TEST_F(HostileParts, RoutersAndNormsStayDense) {
  const std::string gate = "model.layers.1.block_sparse_moe.gate.weight";
  const auto shape = model_.tensors[gate].shape;
  model_.Put(gate, DType::kI8, shape, Zeros(shape[0] * shape[1]));
  EXPECT_THAT(Refusal(), HasSubstr("found I8, expected BF16, F16 or F32"));
}

}  // namespace
}  // namespace k3
