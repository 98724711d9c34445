#include "k3/kernels/profile.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>

#include <fmt/format.h>

#include "k3/quant/encode.h"

namespace k3 {
namespace {

double D(std::int64_t n) { return static_cast<double>(n); }

struct Work {
  double flops = 0, bytes = 0;
};

Work operator+(Work a, Work b) { return {a.flops + b.flops, a.bytes + b.bytes}; }

/// m rows through a weight matrix that is read once.
Work Product(std::int64_t m, const WeightRef& w) {
  return {2.0 * D(m) * D(w.rows) * D(w.cols), D(w.bytes())};
}

Work Of(const GemmArgs& a) { return Product(a.x.dim(0), a.w); }

Work Of(const ExpertMlpArgs& a) {
  std::map<std::int32_t, std::int64_t> rows;
  for (std::int64_t t = 0; t < a.experts.dim(0); ++t) {
    for (std::int64_t j = 0; j < a.experts.dim(1); ++j) ++rows[a.experts(t, j)];
  }
  Work sum;
  for (const auto& [e, m] : rows) {
    const ExpertWeights& w = a.table[static_cast<std::size_t>(e)];
    sum = sum + Product(m, w.w1) + Product(m, w.w3) + Product(m, w.w2);
  }
  return sum;
}

/// Decay, two products with the state and its update for every token; the state in and out once.
Work Of(const KdaArgs& a) {
  Work sum;
  const double state = D(a.n_heads) * D(a.key_dim()) * D(a.value_dim());
  for (const SequenceRange& s : a.sequences) {
    if (s.count > 0) sum = sum + Work{7.0 * D(s.count) * state, 8.0 * state};
  }
  return sum;
}

/// Counted in the plain form, without the expansion of keys and values.
Work Of(const MlaArgs& a) {
  Work sum;
  for (const MlaSequence& s : a.sequences) {
    if (s.count == 0) continue;
    const double rows = D(s.n_rows) - 0.5 * D(s.count - 1);  // a query sees on average
    sum = sum + Work{2.0 * D(s.count) * rows * D(a.n_heads) * D(a.q_dim() + a.v_dim),
                     4.0 * D(s.n_rows) * D(a.row_dim()) + D(a.kv_b.bytes())};
  }
  return sum;
}

template <class Args>
Work Of(const Args&) {
  return {};
}

std::string NameOf(const char* op, const GemmArgs& a) {
  return fmt::format("{} {}x{} {}{}", op, a.w.rows, a.w.cols, Name(a.w.format),
                     a.keep_f32 ? " in f32" : "");
}

template <class Args>
std::string NameOf(const char* op, const Args&) {
  return op;
}

}  // namespace

struct ProfilingBackend::Impl {
  std::unique_ptr<Backend> inner;
  std::map<std::string, ProfileRow> rows;
  bool recording = true;

  template <class Args, class F>
  void Time(const char* op, const Args& args, F&& run) {
    if (!recording) return run();
    const auto start = std::chrono::steady_clock::now();
    run();
    const double s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ProfileRow& row = rows[NameOf(op, args)];
    const Work work = Of(args);
    ++row.calls;
    row.seconds += s;
    row.flops += work.flops;
    row.bytes += work.bytes;
  }
};

ProfilingBackend::ProfilingBackend(std::unique_ptr<Backend> inner)
    : impl_(std::make_unique<Impl>(Impl{std::move(inner), {}, true})) {}
ProfilingBackend::~ProfilingBackend() = default;

#define K3_TIME_OP(name)                                   \
  void ProfilingBackend::name(const name##Args& a) {       \
    impl_->Time(#name, a, [&] { impl_->inner->name(a); }); \
  }
K3_FOR_EACH_OP(K3_TIME_OP)
#undef K3_TIME_OP

void ProfilingBackend::KdaRecurrent(const KdaArgs& a) {
  impl_->Time("KdaRecurrent", a, [&] { impl_->inner->KdaRecurrent(a); });
}
void ProfilingBackend::KdaChunk(const KdaArgs& a) {
  impl_->Time("KdaChunk", a, [&] { impl_->inner->KdaChunk(a); });
}

std::vector<ProfileRow> ProfilingBackend::Rows() const {
  std::vector<ProfileRow> rows;
  for (const auto& [name, row] : impl_->rows) {
    rows.push_back(row);
    rows.back().name = name;
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return rows;
}

void ProfilingBackend::Clear() { impl_->rows.clear(); }

void ProfilingBackend::SetRecording(bool on) { impl_->recording = on; }

}  // namespace k3
