// Reference of the ops that treat rows or elements by themselves.
#include <algorithm>
#include <cmath>

#include "k3/base/array.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/ref/ref_math.h"
#include "k3/quant/mxfp4.h"

namespace k3 {

void ReferenceBackend::RmsNorm(const RmsNormArgs& a) {
  const auto D = a.x.dim(1);
  for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
    double sum = 0;
    for (std::int64_t d = 0; d < D; ++d) sum += ref::Square(a.x(t, d));
    const double r = 1.0 / std::sqrt(sum / static_cast<double>(D) + a.eps);
    for (std::int64_t d = 0; d < D; ++d) a.y(t, d) = static_cast<float>(a.x(t, d) * r * a.w(d));
  }
}

void ReferenceBackend::GatedRmsNorm(const GatedRmsNormArgs& a) {
  const auto V = a.w.dim(0);
  for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
    for (std::int64_t h = 0; h < a.x.dim(1); h += V) {
      double sum = 0;
      for (std::int64_t d = 0; d < V; ++d) sum += ref::Square(a.x(t, h + d));
      const double r = 1.0 / std::sqrt(sum / static_cast<double>(V) + a.eps);
      for (std::int64_t d = 0; d < V; ++d) {
        a.y(t, h + d) =
            static_cast<float>(a.x(t, h + d) * r * a.w(d) * ref::Sigmoid(a.gate(t, h + d)));
      }
    }
  }
}

void ReferenceBackend::L2Norm(const L2NormArgs& a) {
  const auto K = a.head_dim;
  for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
    for (std::int64_t h = 0; h < a.x.dim(1); h += K) {
      double sum = a.eps;
      for (std::int64_t d = 0; d < K; ++d) sum += ref::Square(a.x(t, h + d));
      for (std::int64_t d = 0; d < K; ++d) {
        a.y(t, h + d) = static_cast<float>(a.x(t, h + d) / std::sqrt(sum));
      }
    }
  }
}

void ReferenceBackend::Gemm(const GemmArgs& a) {
  Array<float> row(a.w.cols);
  for (std::int64_t n = 0; n < a.w.rows; ++n) {
    DecodeRow(a.w, n, row.data());
    for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
      double sum = 0;
      for (std::int64_t k = 0; k < a.w.cols; ++k) {
        sum += static_cast<double>(a.x(t, k)) * row[k];
      }
      a.y(t, n) = static_cast<float>(sum);
    }
  }
}

void ReferenceBackend::Embed(const EmbedArgs& a) {
  for (std::size_t t = 0; t < a.ids.size(); ++t) {
    DecodeRow(a.table, a.ids[t], a.y.row(static_cast<std::int64_t>(t)));
  }
}

void ReferenceBackend::GatedAct(const GatedActArgs& a) {
  for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
    for (std::int64_t d = 0; d < a.y.dim(1); ++d) {
      a.y(t, d) = static_cast<float>(ref::GatedAct(a.act, a.gate(t, d), a.up(t, d)));
    }
  }
}

void ReferenceBackend::Residual(const ResidualArgs& a) {
  for (std::int64_t t = 0; t < a.out.dim(0); ++t) {
    for (std::int64_t d = 0; d < a.out.dim(1); ++d) {
      double scale = a.alpha;
      if (a.gate.data) scale *= ref::Sigmoid(a.gate(t, a.gate.dim(1) == 1 ? 0 : d));
      a.out(t, d) = static_cast<float>(a.x(t, d) + scale * a.y(t, d));
    }
  }
}

void ReferenceBackend::Pointwise(const PointwiseArgs& a) {
  for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
    for (std::int64_t d = 0; d < a.y.dim(1); ++d) {
      const double x = a.x(t, d);
      switch (a.fn) {
        case PointwiseFn::kSilu:
          a.y(t, d) = static_cast<float>(x * ref::Sigmoid(x));
          break;
        case PointwiseFn::kTanh:
          a.y(t, d) = static_cast<float>(std::tanh(x));
          break;
        case PointwiseFn::kRelu:
          a.y(t, d) = static_cast<float>(std::max(x, 0.0));
          break;
      }
    }
  }
}

void ReferenceBackend::Sigmoid(const SigmoidArgs& a) {
  for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
    for (std::int64_t d = 0; d < a.y.dim(1); ++d) {
      a.y(t, d) = static_cast<float>(ref::Sigmoid(a.x(t, d)));
    }
  }
}

void ReferenceBackend::SigmoidGate(const SigmoidGateArgs& a) {
  for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
    for (std::int64_t d = 0; d < a.y.dim(1); ++d) {
      a.y(t, d) = static_cast<float>(a.x(t, d) * ref::Sigmoid(a.gate(t, d)));
    }
  }
}

void ReferenceBackend::AddBias(const AddBiasArgs& a) {
  for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
    for (std::int64_t d = 0; d < a.y.dim(1); ++d) a.y(t, d) = a.x(t, d) + a.bias(d);
  }
}

void ReferenceBackend::CopyRows(const CopyRowsArgs& a) {
  for (std::int64_t i = 0; i < a.y.dim(0); ++i) {
    const std::int64_t from = a.rows.empty() ? i : a.rows[static_cast<std::size_t>(i)];
    std::copy_n(a.x.row(from), a.y.dim(1), a.y.row(i));
  }
}

void ReferenceBackend::StoreRows(const StoreRowsArgs& a) {
  const std::int64_t width = a.x.dim(1);
  for (const StoreRun& run : a.runs) {
    for (std::int64_t t = 0; t < run.count; ++t) {
      const std::int64_t row = run.first + t;
      float* page = run.pages[static_cast<std::size_t>(row / a.page_rows)];
      std::copy_n(a.x.row(run.begin + t), width, page + row % a.page_rows * width);
    }
  }
}

void ReferenceBackend::AttnRes(const AttnResArgs& a) {
  const auto n = static_cast<std::int64_t>(a.rows.size());
  const auto H = a.w.dim(0);
  auto row = [&](std::int64_t e) { return a.rows[static_cast<std::size_t>(e)]; };
  Array<double> s(n), mix(H);
  for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
    for (std::int64_t e = 0; e < n; ++e) {
      const float* v = row(e) + t * H;
      double square = 0, dot = 0;
      for (std::int64_t d = 0; d < H; ++d) {
        square += ref::Square(v[d]);
        dot += static_cast<double>(v[d]) * a.w(d);
      }
      s[e] = dot / std::sqrt(square / static_cast<double>(H) + a.eps);
    }
    ref::Softmax(s);
    for (std::int64_t d = 0; d < H; ++d) {  // all rows are read before y, which may be one of them
      double sum = 0;
      for (std::int64_t e = 0; e < n; ++e) sum += s[e] * row(e)[t * H + d];
      const double p = row(n - 1)[t * H + d];
      mix[d] = a.gamma ? p + *a.gamma * (sum - p) : sum;
    }
    for (std::int64_t d = 0; d < H; ++d) {
      a.y(t, d) = static_cast<float>(mix[d]);
    }
    for (std::int64_t e = 0; a.weights.data && e < n; ++e) {
      a.weights(t, e) = static_cast<float>(s[e]);
    }
  }
}

}  // namespace k3
