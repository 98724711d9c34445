// Reference of latent attention and of the mixture of experts: spec sections 7 and 9, transcribed.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "k3/base/array.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/ref/ref_math.h"
#include "k3/quant/mxfp4.h"

namespace k3 {
namespace {

double Dot(const float* a, const float* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

/// One query of one head against rows [0, n_rows): adds p_j-weighted values to o.
/// kAbsorbed and kPlain agree in float64, so the reference has one form: keys are expanded.
void Attend(const MlaArgs& a, const MlaSequence& s, std::int64_t n_rows, const float* q,
            const Array<float>& w, float* o) {
  const auto R = a.kv_rank(), dn = a.nope_dim;
  Array<double> p(n_rows), key(R);
  for (std::int64_t d = 0; d < dn; ++d) {  // q_n . (W_uk c) = (W_uk^T q_n) . c
    for (std::int64_t r = 0; r < R; ++r) {
      key[r] += static_cast<double>(q[d]) * w[d * R + r];
    }
  }
  auto row = [&](std::int64_t j) {
    return s.pages[static_cast<std::size_t>(j / a.page_rows)] + j % a.page_rows * a.row_dim();
  };
  for (std::int64_t j = 0; j < n_rows; ++j) {
    double dot = Dot(q + dn, row(j) + R, a.rope_dim);
    for (std::int64_t r = 0; r < R; ++r) dot += key[r] * row(j)[r];
    p[j] = dot * a.scale;
  }
  ref::Softmax(p);
  Array<double> context(R);
  for (std::int64_t j = 0; j < n_rows; ++j) {
    for (std::int64_t r = 0; r < R; ++r) {
      context[r] += p[j] * row(j)[r];
    }
  }
  for (std::int64_t d = 0; d < a.v_dim; ++d) {
    double sum = 0;
    for (std::int64_t r = 0; r < R; ++r) {
      sum += context[r] * w[(dn + d) * R + r];
    }
    o[d] = static_cast<float>(sum);
  }
}

/// Experts that may be chosen for a token: all, or those of the best groups.
Array<char> AllowedByGroup(const RouteArgs& a, const Array<double>& biased) {
  const auto E = biased.size();
  Array<char> allowed(E, 1);
  if (a.n_group <= 1 || a.n_group <= a.topk_group) return allowed;
  const std::int64_t size = E / a.n_group;
  Array<double> score(a.n_group);
  for (std::int64_t g = 0; g < a.n_group; ++g) {
    Array<double> members(biased.begin() + g * size, biased.begin() + (g + 1) * size);
    std::sort(members.begin(), members.end(), std::greater<>());
    score[g] = members[0] + (size > 1 ? members[1] : 0.0);
  }
  Array<std::int64_t> order(score.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t x, std::int64_t y) { return score[x] > score[y]; });
  std::fill(allowed.begin(), allowed.end(), char{0});
  for (std::int64_t i = 0; i < a.topk_group; ++i) {
    const std::int64_t g = order[i];
    std::fill(allowed.begin() + g * size, allowed.begin() + (g + 1) * size, char{1});
  }
  return allowed;
}

}  // namespace

void ReferenceBackend::Mla(const MlaArgs& a) {
  const auto R = a.kv_rank(), head_rows = a.nope_dim + a.v_dim;
  Array<float> w(head_rows * R);
  for (std::int64_t n = 0; n < a.n_heads; ++n) {
    for (std::int64_t i = 0; i < head_rows; ++i) DecodeRow(a.kv_b, n * head_rows + i, &w[i * R]);
    for (const MlaSequence& s : a.sequences) {
      for (std::int64_t i = 0; i < s.count; ++i) {
        Attend(a, s, s.n_rows - s.count + i + 1, a.q.row(s.begin + i) + n * a.q_dim(), w,
               a.o.row(s.begin + i) + n * a.v_dim);
      }
    }
  }
}

void ReferenceBackend::Route(const RouteArgs& a) {
  const std::int64_t E = a.logits.dim(1), k = a.k;
  for (std::int64_t t = 0; t < a.logits.dim(0); ++t) {
    Array<double> score(E), biased(E);
    std::copy_n(a.logits.row(t), E, score.begin());
    if (a.softmax) {
      ref::Softmax(score);
    } else {
      for (double& s : score) s = ref::Sigmoid(s);
    }
    for (std::int64_t e = 0; e < E; ++e) biased[e] = score[e] + a.bias(e);
    const auto allowed = AllowedByGroup(a, biased);
    Array<std::int64_t> order(E);
    std::iota(order.begin(), order.end(), 0);
    auto key = [&](std::int64_t e) {
      return allowed[e] && !std::isnan(biased[e]) ? biased[e] : -HUGE_VAL;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t x, std::int64_t y) { return key(x) > key(y); });
    double sum = 1e-20;
    for (std::int64_t j = 0; j < k; ++j) sum += score[order[j]];
    for (std::int64_t j = 0; j < k; ++j) {
      const double w = a.renormalize && k > 1 ? score[order[j]] / sum : score[order[j]];
      a.experts(t, j) = static_cast<std::int32_t>(order[j]);
      a.weights(t, j) = static_cast<float>(w * a.scale);
    }
  }
}

void ReferenceBackend::ExpertMlp(const ExpertMlpArgs& a) {
  const auto D = a.x.dim(1);
  for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
    Array<double> sum(D);
    for (std::int64_t j = 0; j < a.experts.dim(1); ++j) {
      const ExpertWeights& w = a.table[static_cast<std::size_t>(a.experts(t, j))];
      const auto I = w.w1.rows;
      Array<float> row(std::max(D, I));
      Array<double> hidden(I);
      for (std::int64_t i = 0; i < I; ++i) {
        DecodeRow(w.w1, i, row.data());
        const double gate = Dot(row.data(), a.x.row(t), D);
        DecodeRow(w.w3, i, row.data());
        hidden[i] = ref::GatedAct(a.act, gate, Dot(row.data(), a.x.row(t), D));
      }
      for (std::int64_t d = 0; d < D; ++d) {
        DecodeRow(w.w2, d, row.data());
        double y = 0;
        for (std::int64_t i = 0; i < I; ++i) y += hidden[i] * row[i];
        sum[d] += a.weights(t, j) * y;
      }
    }
    for (std::int64_t d = 0; d < D; ++d) a.y(t, d) = static_cast<float>(sum[d]);
  }
}

}  // namespace k3
