#include "k3/train/tape.h"

#include <algorithm>

#include "k3/base/check.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/train/tape_internal.h"

namespace k3 {

TapeBackend::TapeBackend(Exec& exec, std::unique_ptr<Backend> inner, const cpu::SimdTable& simd)
    : exec_(exec), inner_(std::move(inner)), context_(exec.pool, simd) {}

TapeBackend& TapeBackend::Install(Exec& exec) {
  const auto table = cpu::ChooseTable();
  K3_CHECK(table.ok(), "the instruction set was checked at start");
  auto tape = std::make_unique<TapeBackend>(exec, std::move(exec.ops), **table);
  TapeBackend& ref = *tape;
  exec.ops = std::move(tape);
  return ref;
}

void TapeBackend::Start() {
  ops_.clear(), live_.clear(), saved_.clear();
  shadows_.ClearPass();
  recording_ = true;
}

void TapeBackend::Finish() {
  recording_ = false;
  exec_.ws.ForEachBlock([this](const void* data, std::size_t bytes) {
    shadows_.AddScratch(static_cast<const float*>(data), static_cast<std::int64_t>(bytes / 4));
  });
}

void TapeBackend::Backward() {
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) (*op)();
  ops_.clear();
}

std::int64_t TapeBackend::saved_bytes() const {
  std::int64_t n = 0;
  for (const Saved& s : saved_) n += static_cast<std::int64_t>(s.copy.size()) * 4;
  return n;
}

Mat TapeBackend::Shadow(CMat v) const {
  return Mat(shadows_.Find(v.data, Extent(v)), v.shape, v.strides);
}

Mat TapeBackend::GradOf(const WeightRef& w) const {
  K3_CHECK(w.format == WeightFormat::kF32, "trained weights are f32");
  return Shadow(Dense(w));
}

Vec TapeBackend::GradOf(CVec w) const { return Vec(shadows_.Find(w.data, w.dim(0)), w.shape); }

const TapeBackend::Saved* TapeBackend::Save(CMat v) {
  for (const Saved* s : live_) {
    if (s->view.data == v.data && s->view.shape == v.shape && s->view.strides == v.strides) {
      return s;
    }
  }
  saved_.push_back({v, {}});
  live_.push_back(&saved_.back());
  return &saved_.back();
}

void TapeBackend::BeforeWrite(CMat target) {
  std::erase_if(live_, [&](Saved* s) {
    if (!Overlap(s->view, target)) return false;
    const std::int64_t rows = s->view.dim(0), cols = s->view.dim(1);
    s->copy.reserve(static_cast<std::size_t>(rows * cols));
    for (std::int64_t t = 0; t < rows; ++t) {
      s->copy.insert(s->copy.end(), s->view.row(t), s->view.row(t) + cols);
    }
    s->view = CMat(s->copy.data(), {rows, cols});
    return true;
  });
}

}  // namespace k3
