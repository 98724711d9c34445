// What a conversion would change.
#include <fmt/format.h>

#include <algorithm>

#include "k3/base/glob.h"
#include "k3/io/json.h"
#include "k3/model/matrix_form.h"
#include "k3/model/quantize_internal.h"

namespace k3 {
namespace quantize_internal {
namespace {

std::optional<WeightFormat> Wanted(const QuantizeOptions& o, TensorRole role) {
  switch (role) {
    case TensorRole::kEmbedding:
      return o.embeddings;
    case TensorRole::kHead:
      return o.head;
    case TensorRole::kRoutedExpert:
      return o.experts;
    default:
      return o.trunk;
  }
}

class Planner {
 public:
  Planner(const Source& source, const QuantizeOptions& options)
      : source_(source), o_(options), only_used_(o_.only.size()), keep_used_(o_.keep.size()) {}

  Result<QuantizeResult> Run() {
    K3_TRY(ForEachTensor(source_.config, [this](const TensorSpec& s) { return Visit(s); }));
    if (source_.config.tied_embeddings && source_.check.has_head) {
      TensorSpec head;
      head.name = "lm_head.weight";
      head.shape = {source_.config.vocab, source_.config.hidden};
      head.role = TensorRole::kHead;
      K3_TRY(Visit(head));
    }
    K3_TRY(CheckPatterns(o_.only, only_used_, "--only"));
    K3_TRY(CheckPatterns(o_.keep, keep_used_, "--keep"));
    K3_TRY(CheckTwice());
    Sum();
    return std::move(out_);
  }

 private:
  Status Visit(const TensorSpec& spec) {
    if (!MayBeQuantized(spec)) return {};
    const std::string full = source_.check.prefix + spec.name;
    const auto from = FormatOf(source_.checkpoint.tensors(), full);
    if (!from) return Error{Code::kNotFound, "missing tensor " + spec.name};
    QuantizedMatrix m;
    m.name = spec.name;
    m.role = spec.role;
    m.rows = spec.shape[0], m.cols = spec.shape[1];
    m.from = *from;
    m.to = Target(spec, *from, &m.kept_because);
    m.bytes_before = BytesOf(m, m.from);
    m.bytes_after = BytesOf(m, m.to);
    if (m.changes() && HasScales(m.from) && HasScales(m.to)) twice_.push_back(out_.matrices.size());
    out_.matrices.push_back(std::move(m));
    return {};
  }

  static std::int64_t BytesOf(const QuantizedMatrix& m, WeightFormat f) {
    return CodeBytes(f, m.rows, m.cols) + ScaleBytes(f, m.rows, m.cols);
  }

  bool Fits(const std::vector<std::string>& patterns, std::vector<bool>& used,
            const std::string& name) const {
    bool any = false;
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if (!MatchesGlob(patterns[i], name) &&
          !MatchesGlob(patterns[i], source_.check.prefix + name)) {
        continue;
      }
      used[i] = any = true;
    }
    return any;
  }

  WeightFormat Target(const TensorSpec& spec, WeightFormat from, std::string* because) {
    const bool only = Fits(o_.only, only_used_, spec.name);
    const bool keep = Fits(o_.keep, keep_used_, spec.name);
    const auto wanted = Wanted(o_, spec.role);
    if (!wanted || *wanted == from) return from;
    if (keep) {
      *because = "--keep";
    } else if (!only && !o_.only.empty()) {
      *because = "not in --only";
    } else if (!FitsWidth(*wanted, spec.shape[1])) {
      *because = fmt::format("rows of {} are no multiple of 32", spec.shape[1]);
    } else {
      return *wanted;
    }
    return from;
  }

  static Status CheckPatterns(const std::vector<std::string>& patterns,
                              const std::vector<bool>& used, const char* option) {
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if (used[i]) continue;
      return Error{Code::kInvalidArgument, fmt::format("{}: \"{}\" fits the name of no matrix",
                                                       option, Printable(patterns[i]))};
    }
    return {};
  }

  Status CheckTwice() {
    if (twice_.empty()) return {};
    const QuantizedMatrix& m = out_.matrices[twice_.front()];
    const std::string what = fmt::format(
        "{} of {} matrices are rounded already (the first: {} in {}) and would be rounded again to "
        "{}, adding a second error",
        twice_.size(), out_.matrices.size(), m.name, Name(m.from), Name(m.to));
    if (!o_.force) {
      return Error{Code::kInvalidArgument, fmt::format("{}: {}; --force does it all the same",
                                                       source_.checkpoint.dir(), what)};
    }
    out_.warnings.push_back(what);
    return {};
  }

  void Sum() {
    std::int64_t matrices_before = 0, matrices_after = 0;
    std::int64_t kept = 0;
    const QuantizedMatrix* first = nullptr;
    for (const QuantizedMatrix& m : out_.matrices) {
      matrices_before += m.bytes_before;
      matrices_after += m.bytes_after;
      if (!m.kept_because.starts_with("rows")) continue;
      if (first == nullptr) first = &m;
      ++kept;
    }
    if (first != nullptr) {
      out_.warnings.push_back(fmt::format("{} matrices stay as they are, the first: {}, {}", kept,
                                          first->name, first->kept_because));
    }
    std::int64_t matrix_tensors = 0;
    for (const QuantizedMatrix& m : out_.matrices) {
      matrix_tensors += static_cast<std::int64_t>(PartsOf(m.from, m.rows, m.cols).size());
    }
    for (const auto& [name, t] : source_.checkpoint.tensors()) out_.bytes_before += t.bytes();
    out_.other_tensors =
        static_cast<std::int64_t>(source_.checkpoint.tensors().size()) - matrix_tensors;
    out_.other_bytes = out_.bytes_before - matrices_before;
    out_.bytes_after = out_.other_bytes + matrices_after;
    // Headers and the index: about 200 bytes a tensor, and scales add some.
    out_.file_bytes =
        out_.bytes_after + 400 * static_cast<std::int64_t>(source_.checkpoint.tensors().size());
  }

  const Source& source_;
  const QuantizeOptions& o_;
  std::vector<bool> only_used_, keep_used_;
  std::vector<std::size_t> twice_;
  QuantizeResult out_;
};

}  // namespace

Result<Source> OpenSource(const std::string& dir) {
  K3_ASSIGN(ModelConfig config, ReadModelConfig(dir));
  K3_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(dir));
  K3_ASSIGN(TensorCheck check, CheckTensors(config, checkpoint));
  return Source{std::move(config), std::move(checkpoint), std::move(check)};
}

Result<QuantizeResult> Plan(const Source& source, const QuantizeOptions& options) {
  K3_ASSIGN(QuantizeResult result, Planner(source, options).Run());
  const std::vector<std::string>* lists[] = {&source.config.warnings, &source.checkpoint.warnings(),
                                             &source.check.warnings};
  for (const auto* list : lists) {
    result.warnings.insert(result.warnings.end(), list->begin(), list->end());
  }
  K3_ASSIGN(const OtherFiles files, FindOtherFiles(source.checkpoint.dir()));
  for (const std::string& name : files.left_out) {
    result.warnings.push_back(
        fmt::format("{}/{} is not copied", source.checkpoint.dir(), Printable(name)));
  }
  result.file_bytes += files.bytes;
  return result;
}

}  // namespace quantize_internal

std::int64_t QuantizeResult::changed() const {
  return std::count_if(matrices.begin(), matrices.end(),
                       [](const QuantizedMatrix& m) { return m.changes(); });
}

Result<QuantizeResult> PlanQuantization(const std::string& dir, const QuantizeOptions& options) {
  K3_ASSIGN(const quantize_internal::Source source, quantize_internal::OpenSource(dir));
  return quantize_internal::Plan(source, options);
}

}  // namespace k3
