// Recorded ops that look across rows: caches, convolution, recurrence, attention, experts.
#include "k3/base/check.h"
#include "k3/train/tape_internal.h"

namespace k3 {
namespace {

void ClearRows(Mat shadow, std::int64_t begin, std::int64_t count) {
  for (std::int64_t t = begin; t < begin + count; ++t) {
    std::fill(shadow.row(t), shadow.row(t) + shadow.dim(1), 0.f);
  }
}

std::vector<float> CopyOf(const float* p, std::int64_t n) { return {p, p + n}; }

std::vector<const float*> Pointers(const std::vector<std::vector<float>>& arrays) {
  std::vector<const float*> p;
  for (const auto& a : arrays) p.push_back(a.data());
  return p;
}

/// What the backward of attention needs to know of a sequence whose spans die with the call.
struct Run {
  std::int64_t begin, count, n_rows;
  std::vector<const float*> pages, value_pages;
  std::vector<float*> dpages, dvalue_pages;

  grad::PagedSequence<float> View() const {
    return {begin, count, n_rows, pages, value_pages, dpages, dvalue_pages};
  }
};

/// Shadows of pages, which the map gets to know.
std::vector<float*> PageShadows(ShadowMap& map, const std::vector<const float*>& pages,
                                std::int64_t floats) {
  std::vector<float*> shadows;
  for (const float* p : pages) {
    map.AddTransient(p, floats);
    shadows.push_back(map.Find(p, floats));
  }
  return shadows;
}

std::vector<std::int32_t> CopyOf(View<const std::int32_t, 2> v) {
  std::vector<std::int32_t> all;
  for (std::int64_t t = 0; t < v.dim(0); ++t) all.insert(all.end(), v.row(t), v.row(t) + v.dim(1));
  return all;
}

}  // namespace

void TapeBackend::StoreRows(const StoreRowsArgs& a) {
  inner_->StoreRows(a);
  if (!recording_) return;
  const std::int64_t width = a.x.dim(1);
  struct Target {
    std::int64_t row;
    float* shadow;
  };
  std::vector<Target> targets;
  for (const StoreRun& run : a.runs) {
    for (std::int64_t t = 0; t < run.count; ++t) {
      const std::int64_t row = run.first + t;
      const float* page = run.pages[static_cast<std::size_t>(row / a.page_rows)];
      shadows_.AddTransient(page, a.page_rows * width);
      targets.push_back({run.begin + t, shadows_.Find(page + row % a.page_rows * width, width)});
    }
  }
  Push([this, x = a.x, targets, width] {
    const Mat dx = Shadow(x);
    for (const Target& t : targets) {
      for (std::int64_t d = 0; d < width; ++d) dx(t.row, d) += t.shadow[d];
      std::fill(t.shadow, t.shadow + width, 0.f);
    }
  });
}

void TapeBackend::ShortConv(const ShortConvArgs& a) {
  if (!recording_) return inner_->ShortConv(a);
  const std::int64_t size = (a.w.dim(1) - 1) * a.w.dim(0);
  const Saved* x = Save(a.x);
  std::vector<std::vector<float>> found;
  std::vector<float*> shadows;
  for (float* history : a.histories) {
    found.push_back(CopyOf(history, size));
    shadows_.AddTransient(history, size);
    shadows.push_back(shadows_.Find(history, size));
  }
  BeforeWrite(a.y);
  inner_->ShortConv(a);
  std::vector<SequenceRange> ranges(a.sequences.begin(), a.sequences.end());
  Push([this, a, x, found, shadows, ranges] {
    const Taken dy(*this, a.y, false);
    const Mat dw(shadows_.Find(a.w.data, a.w.size()), a.w.shape);
    grad::ShortConv<float>(context_,
                           {x->view, a.w, ranges, Pointers(found), dy, Shadow(a.x), dw, shadows});
  });
}

void TapeBackend::KdaGate(const KdaGateArgs& a) {
  if (!recording_) return inner_->KdaGate(a);
  const Saved* f = Save(a.f);
  BeforeWrite(a.g);
  inner_->KdaGate(a);
  Push([this, a, f] {
    const Taken dg(*this, a.g, Overlap(a.f, a.g));
    grad::KdaGate<float>(context_, {f->view, a.dt_bias, a.a_log, a.lower_bound, dg, Shadow(a.f),
                                    GradOf(a.dt_bias), GradOf(a.a_log)});
  });
}

void TapeBackend::RecordKda(const KdaArgs& a, bool chunked) {
  auto run = [&] { chunked ? inner_->KdaChunk(a) : inner_->KdaRecurrent(a); };
  if (!recording_) return run();
  const std::int64_t size = a.n_heads * a.key_dim() * a.value_dim();
  const Saved *q = Save(a.q), *k = Save(a.k), *v = Save(a.v), *g = Save(a.g), *beta = Save(a.beta);
  std::vector<SequenceRange> ranges;  // without the empty ones
  std::vector<std::vector<float>> found;
  std::vector<float*> shadows;
  for (std::size_t s = 0; s < a.sequences.size(); ++s) {
    if (a.sequences[s].count == 0) continue;
    ranges.push_back(a.sequences[s]);
    found.push_back(CopyOf(a.states[s], size));
    shadows_.AddTransient(a.states[s], size);
    shadows.push_back(shadows_.Find(a.states[s], size));
  }
  BeforeWrite(a.o);
  run();
  if (ranges.empty()) return;
  Push([this, a, q, k, v, g, beta, ranges, found, shadows] {
    const auto states = Pointers(found);
    const Mat dout = Shadow(a.o);
    grad::KdaArgs<float> b;
    b.q = q->view, b.k = k->view, b.v = v->view, b.g = g->view, b.beta = beta->view;
    b.n_heads = a.n_heads, b.scale = a.scale, b.sequences = ranges, b.states = states;
    b.dout = dout, b.dstates = shadows;
    b.dq = Shadow(a.q), b.dk = Shadow(a.k), b.dv = Shadow(a.v), b.dg = Shadow(a.g);
    b.dbeta = Shadow(a.beta);
    grad::Kda(context_, b);
    for (const auto& [begin, count] : ranges) ClearRows(dout, begin, count);
  });
}

void TapeBackend::KdaRecurrent(const KdaArgs& a) { RecordKda(a, false); }
void TapeBackend::KdaChunk(const KdaArgs& a) { RecordKda(a, true); }

void TapeBackend::Mla(const MlaArgs& a) {
  if (!recording_ || a.sequences.empty()) return inner_->Mla(a);
  const Saved* q = Save(a.q);
  std::vector<Run> runs;
  for (const MlaSequence& s : a.sequences) {
    Run r{s.begin, s.count, s.n_rows, {s.pages.begin(), s.pages.end()}, {}, {}, {}};
    r.dpages = PageShadows(shadows_, r.pages, a.page_rows * a.row_dim());
    runs.push_back(std::move(r));
  }
  BeforeWrite(a.o);
  inner_->Mla(a);
  Push([this, a, q, runs] {
    std::vector<grad::PagedSequence<float>> sequences;
    for (const Run& r : runs) sequences.push_back(r.View());
    const Mat dout = Shadow(a.o);
    grad::MlaArgs<float> g;
    g.q = q->view, g.kv_b = Dense(a.kv_b), g.n_heads = a.n_heads, g.nope_dim = a.nope_dim;
    g.rope_dim = a.rope_dim, g.v_dim = a.v_dim, g.page_rows = a.page_rows, g.scale = a.scale;
    g.sequences = sequences, g.dout = dout, g.dq = Shadow(a.q), g.dkv_b = GradOf(a.kv_b);
    grad::Mla(context_, g);
    for (const Run& r : runs) ClearRows(dout, r.begin, r.count);
  });
}

void TapeBackend::Gqa(const GqaArgs& a) {
  if (!recording_) return inner_->Gqa(a);
  const Saved* q = Save(a.q);
  std::vector<Run> runs;
  const std::int64_t floats = a.page_rows * a.n_kv_heads * a.head_dim();
  for (const GqaSequence& s : a.sequences) {
    Run r{s.begin,
          s.count,
          s.n_rows,
          {s.key_pages.begin(), s.key_pages.end()},
          {s.value_pages.begin(), s.value_pages.end()},
          {},
          {}};
    r.dpages = PageShadows(shadows_, r.pages, floats);
    r.dvalue_pages = PageShadows(shadows_, r.value_pages, floats);
    runs.push_back(std::move(r));
  }
  BeforeWrite(a.o);
  inner_->Gqa(a);
  Push([this, a, q, runs] {
    std::vector<grad::PagedSequence<float>> sequences;
    for (const Run& r : runs) sequences.push_back(r.View());
    const Mat dout = Shadow(a.o);
    grad::GqaArgs<float> g;
    g.q = q->view, g.n_heads = a.n_heads, g.n_kv_heads = a.n_kv_heads, g.page_rows = a.page_rows;
    g.sequences = sequences, g.dout = dout, g.dq = Shadow(a.q);
    grad::Gqa(context_, g);
    for (const Run& r : runs) ClearRows(dout, r.begin, r.count);
  });
}

void TapeBackend::Rope(const RopeArgs& a) {
  if (!recording_) return inner_->Rope(a);
  BeforeWrite(a.x);
  inner_->Rope(a);
  Push([this, a, positions = std::vector<std::int64_t>(a.positions.begin(), a.positions.end())] {
    grad::Rope<float>(context_, {Shadow(a.x), a.head_dim, a.theta, positions});
  });
}

void TapeBackend::Route(const RouteArgs& a) {
  if (!recording_) return inner_->Route(a);
  const Saved* logits = Save(a.logits);
  BeforeWrite(a.weights);
  BeforeWrite(
      CMat(reinterpret_cast<const float*>(a.experts.data), a.experts.shape, a.experts.strides));
  inner_->Route(a);
  if (on_route) on_route(a);
  Push([this, a, logits, experts = CopyOf(a.experts)] {
    const Taken dweights(*this, a.weights, false);
    const View<const std::int32_t, 2> chosen(experts.data(), a.experts.shape);
    grad::Route<float>(context_, {logits->view, chosen, a.softmax, a.renormalize, a.scale, dweights,
                                  Shadow(a.logits)});
    if (on_route_backward) on_route_backward(a, logits->view, chosen, Shadow(a.logits));
  });
}

void TapeBackend::ExpertMlp(const ExpertMlpArgs& a) {
  if (!recording_) return inner_->ExpertMlp(a);
  const Saved *x = Save(a.x), *weights = Save(a.weights);
  BeforeWrite(a.y);
  inner_->ExpertMlp(a);
  Push([this, a, x, weights, experts = CopyOf(a.experts)] {
    std::vector<grad::ExpertOf<float>> table;
    for (const ExpertWeights& w : a.table) {
      table.push_back(
          {Dense(w.w1), Dense(w.w3), Dense(w.w2), GradOf(w.w1), GradOf(w.w3), GradOf(w.w2)});
    }
    const Taken dy(*this, a.y, false);
    grad::ExpertMlp<float>(context_,
                           {x->view, View<const std::int32_t, 2>(experts.data(), a.experts.shape),
                            weights->view, table, a.act, dy, Shadow(a.x), Shadow(a.weights)});
  });
}

}  // namespace k3
