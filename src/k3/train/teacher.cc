#include "k3/train/teacher.h"

#include <filesystem>

#include <fmt/format.h>

#include "k3/model/pass_memory.h"
#include "k3/quant/decode_row.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

Status CompareTokenizers(const std::string& teacher, const std::string& data) {
  std::error_code e;
  if (!std::filesystem::exists(data + "/tiktoken.model", e)) return {};
  K3_ASSIGN(const Tokenizer a, Tokenizer::Load(teacher));
  K3_ASSIGN(const Tokenizer b, Tokenizer::Load(data));
  const std::size_t n = std::max(a.vocab_size(), b.vocab_size());
  for (std::size_t i = 0; i < n; ++i) {
    const auto id = static_cast<TokenId>(i);
    if (a.Bytes(id) == b.Bytes(id) && a.IsSpecial(id) == b.IsSpecial(id)) continue;
    return Error{Code::kInvalidArgument,
                 fmt::format("distill.teacher {}: its tokenizer differs from that of {} at token "
                             "{}, expected the same",
                             teacher, data, id)};
  }
  return {};
}

}  // namespace

Teacher::Teacher(DistillOptions options, std::unique_ptr<Model> model, int threads, MathMode math)
    : options_(std::move(options)), model_(std::move(model)), exec_(threads, math) {
  const WeightRef& w = model_->weights().head;
  head_floats_.resize(static_cast<std::size_t>(w.rows * w.cols));
  for (std::int64_t r = 0; r < w.rows; ++r) DecodeRow(w, r, head_floats_.data() + r * w.cols);
  head_ = CMat(head_floats_.data(), {w.rows, w.cols});
}

Result<std::unique_ptr<Teacher>> Teacher::Load(const DistillOptions& options,
                                               const std::string& data, std::int64_t vocab,
                                               int threads, MathMode math) {
  K3_ASSIGN(auto model, Model::Load(options.teacher));
  if (model->config().vocab != vocab) {
    return Error{Code::kInvalidArgument,
                 fmt::format("distill.teacher {}: its vocabulary has {} ids, expected {} as the "
                             "model's",
                             options.teacher, model->config().vocab, vocab)};
  }
  K3_TRY(CompareTokenizers(options.teacher, data));
  return std::unique_ptr<Teacher>(new Teacher(options, std::move(model), threads, math));
}

Result<CMat> Teacher::Hidden(std::span<const TrainRow> rows) {
  states_.clear();
  states_.reserve(rows.size());
  std::vector<SequenceInput> batch;
  for (const TrainRow& r : rows) {
    states_.push_back(model_->NewState());
    batch.push_back({r.inputs, &states_.back(), LogitRows::kNone});
  }
  CMat hidden;
  K3_TRY(model_->ForwardHidden(batch, exec_, hidden));
  return hidden;
}

std::int64_t Teacher::bytes(std::int64_t rows, std::int64_t sequence, int threads) const {
  const ModelConfig& c = model_->config();
  const std::int64_t tokens = rows * sequence;
  const StateBytes state = ModelState::PartsFor(c, sequence);
  const OpScratch ops = OpScratchBytes(c, tokens, sequence, sequence, exec_.math);
  return model_->weight_bytes() + PassBytes(c, tokens, 0) + rows * state.total() + ops.shared +
         threads * ops.per_thread + 4 * std::min<std::int64_t>(tokens, 256) * c.vocab;
}

}  // namespace k3
