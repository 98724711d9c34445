/* Runs every call of k3/kda.h on random data and compares with the formulas of its header in
 * double. Exit status: 0 all right, 1 an error is too large, 3 the GPU failed, 77 no GPU. */
#include <k3/kda.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "reference.h"

/* A host array of doubles that the device holds rounded, as bf16 or float. */
typedef struct array {
  double* x; /* after rounding: what the device computes with */
  void* device;
  size_t n;
} array;

static double uniform(void) { /* in (-1, 1), the same on every machine */
  static uint64_t s = 88172645463325252u;
  s ^= s << 13, s ^= s >> 7, s ^= s << 17;
  return (double)(int64_t)s / 9223372036854775808.0;
}

static double* doubles(size_t n) {
  double* x = calloc(n ? n : 1, sizeof *x);
  if (!x) abort();
  return x;
}

static uint16_t to_bf16(double x) {
  float y = (float)x;
  uint32_t bits;
  memcpy(&bits, &y, sizeof bits);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static double from_bf16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

static array random_array(size_t n, double spread, int bf16) {
  array a = {doubles(n), NULL, n};
  uint16_t* halves = malloc(2 * n + 2);
  float* floats = malloc(4 * n + 4);
  for (size_t i = 0; i < n; ++i) {
    const double x = spread * (uniform() + uniform() + uniform());
    halves[i] = to_bf16(x), floats[i] = (float)x;
    a.x[i] = bf16 ? from_bf16(halves[i]) : (double)floats[i];
  }
  a.device = device_new(bf16 ? (void*)halves : (void*)floats, bf16 ? 2 * n : 4 * n);
  free(halves), free(floats);
  return a;
}

static double* read_back(const void* device, size_t n, int bf16) {
  double* x = doubles(n);
  void* host = malloc(4 * n + 4);
  device_read(host, device, bf16 ? 2 * n : 4 * n);
  for (size_t i = 0; i < n; ++i) x[i] = bf16 ? from_bf16(((uint16_t*)host)[i]) : ((float*)host)[i];
  free(host);
  return x;
}

static int failures = 0;

/* Relative L2 error of what the device holds. */
static void compare(const char* what, const void* device, int bf16, const double* expected,
                    size_t n, double limit) {
  double* x = read_back(device, n, bf16);
  double difference = 0, size = 0;
  for (size_t i = 0; i < n; ++i) {
    difference += (x[i] - expected[i]) * (x[i] - expected[i]), size += expected[i] * expected[i];
  }
  const double error = sqrt(difference / size);
  const int ok = error <= limit; /* false for NaN */
  printf("%-34s %.2e of %.1e%s\n", what, error, limit, ok ? "" : "  FAIL");
  failures += !ok;
  free(x);
}

static void must(const char* what, k3_kda_status status) {
  if (status == K3_KDA_OK) return;
  printf("%s: %s\n", what, k3_kda_status_text(status));
  if (status == K3_KDA_NO_CUDA) puts("SKIP no device that the kernels run on");
  exit(status == K3_KDA_NO_CUDA ? 77 : 3);
}

/* A random batch of `n_sequences` sequences: host side in `p`, device side in `batch`, `inputs`. */
typedef struct job {
  problem p;
  size_t rows, cells, states; /* elements of beta, of q, of the states */
  array q, k, v, f, beta, a_log, dt_bias, state;
  k3_kda_batch batch;
  k3_kda_inputs inputs;
  void* o;
} job;

static job new_job(const int32_t* cu, int n_sequences, int n_heads, int D, double lower_bound) {
  job j = {.p = {cu[n_sequences], n_sequences, n_heads, D, cu, .lower_bound = lower_bound}};
  const int64_t width = (int64_t)n_heads * D;
  j.rows = (size_t)cu[n_sequences] * (size_t)n_heads, j.cells = j.rows * (size_t)D;
  j.states = (size_t)n_sequences * (size_t)(width * D);
  j.q = random_array(j.cells, 1, 1), j.k = random_array(j.cells, 1, 1);
  j.v = random_array(j.cells, 1, 1), j.f = random_array(j.cells, 1, 1);
  j.beta = random_array(j.rows, 1, 1);
  j.a_log = random_array((size_t)n_heads, 0.3, 0);
  j.dt_bias = random_array((size_t)width, 1, 0), j.state = random_array(j.states, 0.2, 0);
  j.p.q = j.q.x, j.p.k = j.k.x, j.p.v = j.v.x, j.p.f = j.f.x, j.p.beta = j.beta.x;
  j.p.a_log = j.a_log.x, j.p.dt_bias = j.dt_bias.x, j.p.state = j.state.x;
  const float scale = (float)(1 / sqrt(D));
  j.p.scale = scale;
  j.batch = (k3_kda_batch){cu[n_sequences], n_sequences,
                           device_new(cu, 4 * ((size_t)n_sequences + 1)), n_heads, D};
  j.inputs = (k3_kda_inputs){{j.q.device, width}, {j.k.device, width},      {j.v.device, width},
                             {j.f.device, width}, {j.beta.device, n_heads}, j.a_log.device,
                             j.dt_bias.device,    (float)lower_bound,       scale};
  j.o = device_new(NULL, 2 * j.cells);
  return j;
}

static int64_t width_of(const job* j) { return (int64_t)j->p.n_heads * j->p.head_dim; }

static void forward(int D, double lower_bound) {
  const int32_t cu[] = {0, 40, 40, 105}; /* the second is empty: its state is copied */
  job j = new_job(cu, 3, 2, D, lower_bound);
  double *o = doubles(j.cells), *state = doubles(j.states);
  recurrence(&j.p, o, state, NULL);
  const int64_t bytes = k3_kda_forward_workspace(&j.batch, j.inputs.lower_bound, K3_KDA_AUTO);
  if (bytes < 0) must("workspace", K3_KDA_INVALID);
  void* workspace = device_new(NULL, (size_t)bytes);
  float* final_state = device_new(NULL, 4 * j.states);
  must("forward", k3_kda_forward(&j.batch, &j.inputs, j.o, width_of(&j), j.state.device,
                                 final_state, K3_KDA_AUTO, workspace, (size_t)bytes, NULL));
  char name[64];
  snprintf(name, sizeof name, "forward D=%d bound=%g: o", D, lower_bound);
  compare(name, j.o, 1, o, j.cells, 6e-3);
  compare("  state", final_state, 0, state, j.states, 6e-3);
}

/* Three draft tokens for each of two sequences; the first call alone, the second with convolution
 * and norm in the same launch. */
static void decode(int D) {
  const int32_t cu[] = {0, 3, 6};
  job j = new_job(cu, 2, 3, D, -5);
  double *o = doubles(j.cells), *state = doubles(j.states);
  double* each = doubles(j.cells * (size_t)D);
  float* token_states = device_new(NULL, 4 * j.cells * (size_t)D);
  float* in_place = device_new(NULL, 4 * j.states);
  recurrence(&j.p, o, state, each);
  must("decode",
       k3_kda_decode(&j.batch, &j.inputs, j.o, width_of(&j), j.state.device, token_states, NULL));
  char name[64];
  snprintf(name, sizeof name, "decode D=%d: o", D);
  compare(name, j.o, 1, o, j.cells, 2.5e-3);
  compare("  state", j.state.device, 0, state, j.states, 2e-6);
  compare("  state after each token", token_states, 0, each, j.cells * (size_t)D, 2e-6);

  const size_t width = (size_t)width_of(&j);
  array weights[3], tails[3], gate = random_array(j.cells, 1, 1);
  array norm_weight = random_array((size_t)D, 1, 0);
  k3_kda_conv conv = {0};
  array* rows[] = {&j.q, &j.k, &j.v};
  for (int i = 0; i < 3; ++i) {
    weights[i] = random_array(4 * width, 0.5, 0), tails[i] = random_array(6 * width, 1, 1);
    conv.weights[i] = weights[i].device, conv.tails[i] = tails[i].device;
    convolve(&j.p, rows[i]->x, weights[i].x, tails[i].x);
  }
  const k3_kda_norm norm = {{gate.device, width_of(&j)}, norm_weight.device, 1e-5f};
  memset(j.state.x, 0, j.states * sizeof(double)); /* from an empty state this time */
  recurrence(&j.p, o, state, NULL);
  gated_norm(&j.p, o, gate.x, norm_weight.x, (double)norm.eps);
  must("fused decode", k3_kda_decode_fused(&j.batch, &j.inputs, &conv, &norm, j.o, width_of(&j),
                                           in_place, NULL, NULL));
  compare("  fused: o", j.o, 1, o, j.cells, 2.5e-3);
  compare("  fused: state", in_place, 0, state, j.states, 2e-6);
}

/* sum(o d_o) + sum(state d_state) */
static double loss(const job* j, const double* d_o, const double* d_state) {
  double *o = doubles(j->cells), *state = doubles(j->states), sum = 0;
  recurrence(&j->p, o, state, NULL);
  for (size_t i = 0; i < j->cells; ++i) sum += o[i] * d_o[i];
  for (size_t i = 0; i < j->states; ++i) sum += state[i] * d_state[i];
  free(o), free(state);
  return sum;
}

/* The gradient along random directions against the difference of the loss in double. The error of
 * one is that of the gradient times a number of about 1, so this is a coarse check. */
static void compare_gradient(const char* what, const job* j, const array* input, const void* device,
                             int bf16, const double* d_o, const double* d_state) {
  double *g = read_back(device, input->n, bf16), *at = doubles(input->n), size = 0, worst = 0;
  memcpy(at, input->x, input->n * sizeof *at);
  for (size_t i = 0; i < input->n; ++i) size += g[i] * g[i];
  for (int round = 0; round < 3; ++round) {
    double *way = doubles(input->n), along = 0, two[2];
    for (size_t i = 0; i < input->n; ++i) way[i] = uniform() > 0 ? 1 : -1, along += way[i] * g[i];
    for (int side = 0; side < 2; ++side) {
      for (size_t i = 0; i < input->n; ++i) input->x[i] = at[i] + (side ? 1e-5 : -1e-5) * way[i];
      two[side] = loss(j, d_o, d_state);
    }
    worst = fmax(worst, fabs((two[1] - two[0]) / 2e-5 - along) / sqrt(size));
    free(way);
  }
  memcpy(input->x, at, input->n * sizeof *at);
  const int ok = size > 0 && worst <= 3e-2;
  printf("  %-32s %.2e of %.1e%s\n", what, worst, 3e-2, ok ? "" : "  FAIL");
  failures += !ok;
  free(g), free(at);
}

static void backward(void) {
  const int32_t cu[] = {0, 40, 75};
  job j = new_job(cu, 2, 2, 128, -5);
  array d_o = random_array(j.cells, 1, 1), d_state = random_array(j.states, 0.2, 0);
  const k3_kda_gradients g = {device_new(NULL, 2 * j.cells),     device_new(NULL, 2 * j.cells),
                              device_new(NULL, 2 * j.cells),     device_new(NULL, 2 * j.cells),
                              device_new(NULL, 4 * j.rows),      device_new(NULL, 4 * j.a_log.n),
                              device_new(NULL, 4 * j.dt_bias.n), device_new(NULL, 4 * j.states)};
  const int64_t bytes = k3_kda_backward_workspace(&j.batch, j.inputs.lower_bound);
  if (bytes < 0) must("workspace", K3_KDA_INVALID);
  must("backward", k3_kda_backward(&j.batch, &j.inputs, j.state.device,
                                   (k3_kda_tensor){d_o.device, width_of(&j)}, d_state.device, &g,
                                   device_new(NULL, (size_t)bytes), (size_t)bytes, NULL));
  puts("backward, along random directions:");
  compare_gradient("dq", &j, &j.q, g.dq, 1, d_o.x, d_state.x);
  compare_gradient("dk", &j, &j.k, g.dk, 1, d_o.x, d_state.x);
  compare_gradient("dv", &j, &j.v, g.dv, 1, d_o.x, d_state.x);
  compare_gradient("df", &j, &j.f, g.df, 1, d_o.x, d_state.x);
  compare_gradient("dbeta", &j, &j.beta, g.dbeta, 0, d_o.x, d_state.x);
  compare_gradient("da_log", &j, &j.a_log, g.da_log, 0, d_o.x, d_state.x);
  compare_gradient("ddt_bias", &j, &j.dt_bias, g.ddt_bias, 0, d_o.x, d_state.x);
  compare_gradient("d_initial_state", &j, &j.state, g.d_initial_state, 0, d_o.x, d_state.x);
}

int main(void) {
  const k3_kda_batch one = {1, 1, NULL, 1, 96};
  if (k3_kda_forward_workspace(&one, -5, K3_KDA_AUTO) >= 0) {
    puts("a head of 96 channels was taken  FAIL");
    return 1;
  }
  const char* why = device_open();
  if (why) {
    printf("SKIP %s\n", why);
    return 77;
  }
  forward(128, -5), forward(128, 0), forward(64, -5);
  decode(128), decode(64);
  backward();
  printf("%d outside their limits\n", failures);
  return failures ? 1 : 0;
}
