// Recorded ops: norms, products, elementwise, residuals.
#include "k3/train/tape_internal.h"

namespace k3 {

void TapeBackend::RmsNorm(const RmsNormArgs& a) {
  if (!recording_) return inner_->RmsNorm(a);
  const Saved* x = Save(a.x);
  BeforeWrite(a.y);
  inner_->RmsNorm(a);
  Push([this, a, x] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::RmsNorm<float>(context_, {x->view, a.w, a.eps, dy, Shadow(a.x), GradOf(a.w)});
  });
}

void TapeBackend::GatedRmsNorm(const GatedRmsNormArgs& a) {
  if (!recording_) return inner_->GatedRmsNorm(a);
  const Saved *x = Save(a.x), *gate = Save(a.gate);
  BeforeWrite(a.y);
  inner_->GatedRmsNorm(a);
  Push([this, a, x, gate] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::GatedRmsNorm<float>(
        context_, {x->view, gate->view, a.w, a.eps, dy, Shadow(a.x), Shadow(a.gate), GradOf(a.w)});
  });
}

void TapeBackend::L2Norm(const L2NormArgs& a) {
  if (!recording_) return inner_->L2Norm(a);
  const Saved* x = Save(a.x);
  BeforeWrite(a.y);
  inner_->L2Norm(a);
  Push([this, a, x] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::L2Norm<float>(context_, {x->view, a.head_dim, a.eps, dy, Shadow(a.x)});
  });
}

void TapeBackend::Gemm(const GemmArgs& a) {
  if (!recording_) return inner_->Gemm(a);
  const Saved* x = Save(a.x);
  BeforeWrite(a.y);
  inner_->Gemm(a);
  Push([this, a, x] {
    const Taken dy(*this, a.y, false);
    grad::Gemm<float>(context_, {x->view, Dense(a.w), dy, Shadow(a.x), GradOf(a.w), a.keep_f32});
  });
}

void TapeBackend::Embed(const EmbedArgs& a) {
  if (!recording_) return inner_->Embed(a);
  BeforeWrite(a.y);
  inner_->Embed(a);
  Push([this, a, ids = std::vector<TokenId>(a.ids.begin(), a.ids.end())] {
    const Taken dy(*this, a.y, false);
    const Mat dtable = GradOf(a.table);
    if (dtable.data) grad::Embed<float>(context_, {ids, dy, dtable});
  });
}

void TapeBackend::GatedAct(const GatedActArgs& a) {
  if (!recording_) return inner_->GatedAct(a);
  const Saved *gate = Save(a.gate), *up = Save(a.up);
  BeforeWrite(a.y);
  inner_->GatedAct(a);
  Push([this, a, gate, up] {
    const Taken dy(*this, a.y, Overlap(a.gate, a.y) || Overlap(a.up, a.y));
    grad::GatedAct<float>(context_,
                          {gate->view, up->view, a.act, dy, Shadow(a.gate), Shadow(a.up)});
  });
}

void TapeBackend::Residual(const ResidualArgs& a) {
  if (!recording_) return inner_->Residual(a);
  const Saved* y = Save(a.y);
  const Saved* gate = a.gate.data ? Save(a.gate) : nullptr;
  BeforeWrite(a.out);
  inner_->Residual(a);
  Push([this, a, y, gate] {
    grad::ResidualArgs<float> g;
    g.y = y->view, g.alpha = a.alpha;
    if (gate) g.gate = gate->view, g.dgate = Shadow(a.gate);
    g.dy = Shadow(a.y), g.dalpha = GradOf(a.alpha_home);
    if (a.out.data == a.x.data && !Overlap(a.y, a.out)) {  // x's gradient is already in its place
      g.dout = Shadow(a.out);
      return grad::Residual(context_, g);
    }
    const Taken dout(*this, a.out, Overlap(a.x, a.out) || Overlap(a.y, a.out));
    g.dout = dout, g.dx = Shadow(a.x);
    grad::Residual(context_, g);
  });
}

void TapeBackend::Pointwise(const PointwiseArgs& a) {
  if (!recording_) return inner_->Pointwise(a);
  const Saved* x = Save(a.x);
  BeforeWrite(a.y);
  inner_->Pointwise(a);
  Push([this, a, x] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::Pointwise<float>(context_, {x->view, a.fn, dy, Shadow(a.x)});
  });
}

void TapeBackend::Sigmoid(const SigmoidArgs& a) {
  if (!recording_) return inner_->Sigmoid(a);
  BeforeWrite(a.y);
  inner_->Sigmoid(a);
  const Saved* y = Save(a.y);
  Push([this, a, y] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::Sigmoid<float>(context_, {y->view, dy, Shadow(a.x)});
  });
}

void TapeBackend::SigmoidGate(const SigmoidGateArgs& a) {
  if (!recording_) return inner_->SigmoidGate(a);
  const Saved *x = Save(a.x), *gate = Save(a.gate);
  BeforeWrite(a.y);
  inner_->SigmoidGate(a);
  Push([this, a, x, gate] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::SigmoidGate<float>(context_, {x->view, gate->view, dy, Shadow(a.x), Shadow(a.gate)});
  });
}

void TapeBackend::AddBias(const AddBiasArgs& a) {
  if (!recording_) return inner_->AddBias(a);
  BeforeWrite(a.y);
  inner_->AddBias(a);
  Push([this, a] {
    const Taken dy(*this, a.y, Overlap(a.x, a.y));
    grad::AddBias<float>(context_, {dy, Shadow(a.x), GradOf(a.bias)});
  });
}

void TapeBackend::CopyRows(const CopyRowsArgs& a) {
  if (!recording_) return inner_->CopyRows(a);
  BeforeWrite(a.y);
  inner_->CopyRows(a);
  Push([this, a, rows = std::vector<std::int64_t>(a.rows.begin(), a.rows.end())] {
    const Taken dy(*this, a.y, false);
    grad::CopyRows<float>(context_, {rows, dy, Shadow(a.x)});
  });
}

void TapeBackend::AttnRes(const AttnResArgs& a) {
  if (!recording_) return inner_->AttnRes(a);
  const std::array<std::int64_t, 2> shape{a.y.dim(0), a.w.dim(0)};
  std::vector<const Saved*> saved;
  std::vector<const float*> rows(a.rows.begin(), a.rows.end());
  for (const float* row : rows) saved.push_back(Save(CMat(row, shape)));
  BeforeWrite(a.y);
  inner_->AttnRes(a);
  Push([this, a, shape, saved, rows] {
    bool in_place = false;
    std::vector<const float*> values;
    std::vector<float*> drows;
    for (std::size_t e = 0; e < rows.size(); ++e) {
      in_place |= Overlap(CMat(rows[e], shape), a.y);
      values.push_back(saved[e]->view.data);
      drows.push_back(Shadow(CMat(rows[e], shape)).data);
    }
    const Taken dy(*this, a.y, in_place);
    grad::AttnRes<float>(
        context_, {values, a.w, a.eps, a.gamma, dy, drows, GradOf(a.w), GradOf(a.gamma_home)});
  });
}

}  // namespace k3
