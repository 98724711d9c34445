/* The formulas of k3/kda.h in double, on the host: what the example compares with. */
#ifndef REFERENCE_H_
#define REFERENCE_H_

#include <stdint.h>

/* A packed batch; rows have no padding. Names as in k3/kda.h. */
typedef struct problem {
  int n_tokens, n_sequences, n_heads, head_dim;
  const int32_t* cu;
  double *q, *k, *v, *f;   /* [n_tokens, n_heads, head_dim] */
  double* beta;            /* [n_tokens, n_heads], logits */
  double *a_log, *dt_bias; /* [n_heads], [n_heads, head_dim] */
  double* state;           /* [n_sequences, n_heads, head_dim, head_dim] */
  double lower_bound, scale;
} problem;

/* Writes o and, from p->state, the states after the last token. token_states may be null. */
void recurrence(const problem* p, double* o, double* state, double* token_states);

/* Replaces rows x [n_tokens, width] by silu of their causal convolution; tails [n_sequences, 3,
 * width] stand before each sequence, weights are [width, 4]. */
void convolve(const problem* p, double* x, const double* weights, const double* tails);

/* Replaces o by weight o / sqrt(mean(o^2) + eps) sigmoid(gate), head by head. */
void gated_norm(const problem* p, double* o, const double* gate, const double* weight, double eps);

#endif /* REFERENCE_H_ */
