#include "reference.h"

#include <math.h>
#include <string.h>

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static double log_decay(const problem* p, double f, double bias, double a_log) {
  const double z = f + bias;
  if (p->lower_bound < 0) return p->lower_bound * sigmoid(exp(a_log) * z);
  return -exp(a_log) * (z > 30 ? z : log1p(exp(z)));
}

/* 1 / sqrt(sum x^2 + 1e-6) */
static double norm_factor(const double* x, int n) {
  double sum = 1e-6;
  for (int i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1 / sqrt(sum);
}

/* One token of one head; S [D, D], row = key channel. */
static void step(const problem* p, int token, int head, double* S, double* o) {
  const int D = p->head_dim;
  const long row = (long)token * p->n_heads + head;
  const double *q = p->q + row * D, *k = p->k + row * D, *v = p->v + row * D, *f = p->f + row * D;
  const double q_norm = p->scale * norm_factor(q, D), k_norm = norm_factor(k, D);
  const double beta = sigmoid(p->beta[row]);
  for (int i = 0; i < D; ++i) {
    const double decay = exp(log_decay(p, f[i], p->dt_bias[head * D + i], p->a_log[head]));
    for (int j = 0; j < D; ++j) S[i * D + j] *= decay;
  }
  for (int j = 0; j < D; ++j) {
    double seen = 0, sum = 0;
    for (int i = 0; i < D; ++i) seen += S[i * D + j] * k[i] * k_norm;
    const double u = beta * (v[j] - seen);
    for (int i = 0; i < D; ++i) {
      S[i * D + j] += k[i] * k_norm * u;
      sum += S[i * D + j] * q[i] * q_norm;
    }
    o[row * D + j] = sum;
  }
}

void recurrence(const problem* p, double* o, double* state, double* token_states) {
  const long size = (long)p->head_dim * p->head_dim;
  for (int s = 0; s < p->n_sequences; ++s) {
    for (int h = 0; h < p->n_heads; ++h) {
      double* S = state + ((long)s * p->n_heads + h) * size;
      memcpy(S, p->state + ((long)s * p->n_heads + h) * size, (size_t)size * sizeof *S);
      for (int t = p->cu[s]; t < p->cu[s + 1]; ++t) {
        step(p, t, h, S, o);
        if (!token_states) continue;
        memcpy(token_states + ((long)t * p->n_heads + h) * size, S, (size_t)size * sizeof *S);
      }
    }
  }
}

void convolve(const problem* p, double* x, const double* weights, const double* tails) {
  const long width = (long)p->n_heads * p->head_dim;
  for (int s = 0; s < p->n_sequences; ++s) {
    for (long c = 0; c < width; ++c) {
      double last[4] = {0}; /* the newest at the end */
      for (int j = 0; j < 3; ++j) last[j + 1] = tails[((long)s * 3 + j) * width + c];
      for (int t = p->cu[s]; t < p->cu[s + 1]; ++t) {
        double sum = 0;
        memmove(last, last + 1, 3 * sizeof last[0]);
        last[3] = x[t * width + c];
        for (int j = 0; j < 4; ++j) sum += weights[4 * c + j] * last[j];
        x[t * width + c] = sum * sigmoid(sum);
      }
    }
  }
}

void gated_norm(const problem* p, double* o, const double* gate, const double* weight, double eps) {
  const int D = p->head_dim;
  for (long row = 0; row < (long)p->n_tokens * p->n_heads; ++row) {
    double sum = 0;
    for (int d = 0; d < D; ++d) sum += o[row * D + d] * o[row * D + d];
    for (int d = 0; d < D; ++d) {
      o[row * D + d] *= weight[d] / sqrt(sum / D + eps) * sigmoid(gate[row * D + d]);
    }
  }
}
