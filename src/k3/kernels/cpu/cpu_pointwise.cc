// Norms, activations, convolution, attention residuals: rows are independent.
#include <cstring>

#include "k3/kernels/cpu/cpu_internal.h"

namespace k3::cpu {

Workspace& ThreadScratch() {
  thread_local Workspace ws;
  return ws;
}

void CpuBackend::RmsNorm(const RmsNormArgs& a) {
  const auto D = a.x.dim(1);
  ForRows(a.x.dim(0), 2 * D, [&](std::int64_t t) {
    const float* x = a.x.row(t);
    const double mean = static_cast<double>(simd_.dot(x, x, D)) / static_cast<double>(D);
    const float r = static_cast<float>(1.0 / std::sqrt(mean + a.eps));
    simd_.scale_mul(x, r, a.w.data, D, a.y.row(t));
  });
}

void CpuBackend::GatedRmsNorm(const GatedRmsNormArgs& a) {
  const auto V = a.w.dim(0);
  ForRows(a.x.dim(0), 4 * a.x.dim(1), [&](std::int64_t t) {
    for (std::int64_t h = 0; h < a.x.dim(1); h += V) {
      const float* x = a.x.row(t) + h;
      const double mean = static_cast<double>(simd_.dot(x, x, V)) / static_cast<double>(V);
      const float r = static_cast<float>(1.0 / std::sqrt(mean + a.eps));
      simd_.scale_mul_sigmoid(x, r, a.w.data, a.gate.row(t) + h, V, a.y.row(t) + h);
    }
  });
}

void CpuBackend::L2Norm(const L2NormArgs& a) {
  const auto K = a.head_dim;
  ForRows(a.x.dim(0), 2 * a.x.dim(1), [&](std::int64_t t) {
    for (std::int64_t h = 0; h < a.x.dim(1); h += K) {
      const float* x = a.x.row(t) + h;
      const double sum = static_cast<double>(simd_.dot(x, x, K)) + a.eps;
      simd_.scale(x, static_cast<float>(1.0 / std::sqrt(sum)), K, a.y.row(t) + h);
    }
  });
}

void CpuBackend::GatedAct(const GatedActArgs& a) {
  const auto D = a.y.dim(1);
  ForRows(a.y.dim(0), 6 * D, [&](std::int64_t t) {
    simd_.gated_act(a.gate.row(t), a.up.row(t), D, ActOf(a.act), a.y.row(t));
  });
}

void CpuBackend::Residual(const ResidualArgs& a) {
  const auto D = a.out.dim(1);
  ForRows(a.out.dim(0), D, [&](std::int64_t t) {
    const float *x = a.x.row(t), *y = a.y.row(t);
    float* out = a.out.row(t);
    if (!a.gate.data) return simd_.add_scaled(x, a.alpha, y, D, out);
    if (a.gate.dim(1) == 1) {
      const auto scale = static_cast<float>(a.alpha * cpu::Sigmoid(a.gate(t, 0)));
      return simd_.add_scaled(x, scale, y, D, out);
    }
    for (std::int64_t d = 0; d < D; ++d) {
      out[d] = x[d] + static_cast<float>(a.alpha * cpu::Sigmoid(a.gate(t, d))) * y[d];
    }
  });
}

void CpuBackend::Pointwise(const PointwiseArgs& a) {
  const auto D = a.y.dim(1);
  ForRows(a.y.dim(0), 4 * D, [&](std::int64_t t) {
    switch (a.fn) {
      case PointwiseFn::kSilu:
        return simd_.silu(a.x.row(t), D, a.y.row(t));
      case PointwiseFn::kTanh:
        return simd_.tanh(a.x.row(t), D, a.y.row(t));
      case PointwiseFn::kRelu:
        for (std::int64_t d = 0; d < D; ++d) a.y(t, d) = std::max(a.x(t, d), 0.f);
        return;
    }
  });
}

void CpuBackend::Sigmoid(const SigmoidArgs& a) {
  const auto D = a.y.dim(1);
  ForRows(a.y.dim(0), 4 * D, [&](std::int64_t t) { simd_.sigmoid(a.x.row(t), D, a.y.row(t)); });
}

void CpuBackend::SigmoidGate(const SigmoidGateArgs& a) {
  const auto D = a.y.dim(1);
  ForRows(a.y.dim(0), 4 * D,
          [&](std::int64_t t) { simd_.mul_sigmoid(a.x.row(t), a.gate.row(t), D, a.y.row(t)); });
}

void CpuBackend::AddBias(const AddBiasArgs& a) {
  ForRows(a.y.dim(0), a.y.dim(1), [&](std::int64_t t) {
    for (std::int64_t d = 0; d < a.y.dim(1); ++d) a.y(t, d) = a.x(t, d) + a.bias(d);
  });
}

void CpuBackend::CopyRows(const CopyRowsArgs& a) {
  for (std::int64_t i = 0; i < a.y.dim(0); ++i) {
    const std::int64_t from = a.rows.empty() ? i : a.rows[static_cast<std::size_t>(i)];
    std::copy_n(a.x.row(from), a.y.dim(1), a.y.row(i));
  }
}

void CpuBackend::StoreRows(const StoreRowsArgs& a) {
  const std::int64_t width = a.x.dim(1);
  for (const StoreRun& run : a.runs) {
    for (std::int64_t t = 0; t < run.count; ++t) {
      const std::int64_t row = run.first + t;
      float* page = run.pages[static_cast<std::size_t>(row / a.page_rows)];
      std::copy_n(a.x.row(run.begin + t), width, page + row % a.page_rows * width);
    }
  }
}

void CpuBackend::ShortConv(const ShortConvArgs& a) {
  const auto P = a.w.dim(0), k = a.w.dim(1);
  // Channels are cut for the threads at vector boundaries; taps are loaded once for all tokens.
  constexpr std::int64_t kChannels = 64, kWork = 8;  // a channel of a token
  const std::int64_t blocks = (P + kChannels - 1) / kChannels;
  const auto grain = [](std::int64_t count) {
    return std::max<std::int64_t>(1, kParallelWork / (kWork * kChannels * count));
  };
  const auto run = [&](std::size_t s) {
    const std::int64_t begin = a.sequences[s].begin, count = a.sequences[s].count;
    float* history = a.histories[s];
    pool_.ParallelFor(blocks, grain(count), [&](std::int64_t b, std::int64_t e) {
      simd_.short_conv({a.w.data, k, P, b * kChannels, std::min(P, e * kChannels), count, history,
                        a.x.row(begin), a.y.row(begin), a.x.strides[0], a.y.strides[0]});
    });
    // Row t of the sequence; a negative t reaches into the history.
    auto row = [&](std::int64_t t) {
      return t < 0 ? history + (k - 1 + t) * P : a.x.row(begin + t);
    };
    for (std::int64_t j = 0; j < k - 1; ++j) {  // oldest first, so short runs shift in place
      std::memmove(history + j * P, row(count - k + 1 + j), static_cast<std::size_t>(P) * 4);
    }
  };
  // Sequences that are worth cutting one after the other, then all short ones side by side.
  const auto is_short = [&](std::size_t s) { return blocks <= grain(a.sequences[s].count); };
  for (std::size_t s = 0; s < a.sequences.size(); ++s) {
    if (a.sequences[s].count > 0 && !is_short(s)) run(s);
  }
  const std::int64_t many = std::max<std::int64_t>(1, kParallelWork / (kWork * P));
  pool_.ParallelFor(
      static_cast<std::int64_t>(a.sequences.size()), many, [&](std::int64_t b, std::int64_t e) {
        for (auto s = static_cast<std::size_t>(b); s < static_cast<std::size_t>(e); ++s) {
          if (a.sequences[s].count > 0 && is_short(s)) run(s);
        }
      });
}

void CpuBackend::AttnRes(const AttnResArgs& a) {
  const auto n = static_cast<std::int64_t>(a.rows.size());
  const auto H = a.w.dim(0);
  ForRows(a.y.dim(0), n * H, [&](std::int64_t t) {
    Workspace& ws = ThreadScratch();
    const Workspace::Mark mark(ws);
    double* pi = ws.Alloc<double>(n);
    float* mix = ws.Alloc<float>(H);  // y may alias a row: everything is read before y is written
    auto row = [&](std::int64_t e) { return a.rows[static_cast<std::size_t>(e)] + t * H; };
    auto square = [&](std::int64_t e) {
      const auto i = static_cast<std::size_t>(e);
      if (i < a.known) return a.squares[i][t];
      const float sum = simd_.dot(row(e), row(e), H);
      if (i < a.squares.size()) a.squares[i][t] = sum;
      return sum;
    };
    double top = -HUGE_VAL;
    for (std::int64_t e = 0; e < n; ++e) {
      const double mean = static_cast<double>(square(e)) / static_cast<double>(H);
      pi[e] = static_cast<double>(simd_.dot(row(e), a.w.data, H)) / std::sqrt(mean + a.eps);
      top = std::max(top, pi[e]);
    }
    double sum = 0;
    for (std::int64_t e = 0; e < n; ++e) sum += pi[e] = std::exp(pi[e] - top);
    std::fill(mix, mix + H, 0.f);
    for (std::int64_t e = 0; e < n; ++e) {
      const auto weight = static_cast<float>(pi[e] / sum);
      simd_.axpy(weight, row(e), mix, H);
      if (a.weights.data) a.weights(t, e) = weight;
    }
    if (a.gamma) {
      const float* p = row(n - 1);
      for (std::int64_t d = 0; d < H; ++d) mix[d] = p[d] + *a.gamma * (mix[d] - p[d]);
    }
    std::copy(mix, mix + H, a.y.row(t));
  });
}

}  // namespace k3::cpu
