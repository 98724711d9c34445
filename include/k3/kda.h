/* Kimi Delta Attention on one Hopper GPU (sm_90a): a C interface of raw device pointers.
 *
 * Per head, state S [D, D] f32 (row = key channel), token t:
 *   qn = scale q / sqrt(sum q^2 + 1e-6);  kn = k / sqrt(sum k^2 + 1e-6);  beta = sigmoid(b)
 *   z  = f + dt_bias;  g = lower_bound sigmoid(exp(a_log) z)        lower_bound < 0 (bounded form)
 *                      g = -exp(a_log) softplus(z)                  lower_bound = 0 (softplus form)
 *   S' = diag(exp(g)) S;  u = beta (v - S'^T kn);  S = S' + kn u^T;  o = S^T qn
 *
 * Link with libk3_kda.so (k3::kda in CMake), which holds its own CUDA runtime: memory and streams
 * may come from any other, or from the driver. examples/kda shows every call from C and Python.
 * All pointers but those to the structs are device addresses. `stream` is a cudaStream_t (CUstream)
 * of the device that is current for the calling thread; null is the default stream. Structs are
 * read before a call returns and may be reused at once.
 *
 * No call allocates, synchronises, copies to the host or remembers anything: all may be captured
 * in a CUDA graph, and calls on different streams with different outputs may run at once. A call
 * returns when its kernels are queued; faults inside them show at the stream's next
 * synchronisation.
 *
 * Arguments are judged before a device is asked, in a build without CUDA too: what is null,
 * misaligned or out of range answers K3_KDA_INVALID and queues nothing; sound calls answer
 * K3_KDA_NO_CUDA where there is no device. What lies in device memory is not looked at: NaN and
 * infinity run through, cu_seqlens is clamped. A tensor shorter than its shape cannot be noticed.
 */
#ifndef K3_KDA_H_
#define K3_KDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum k3_kda_status {
  K3_KDA_OK = 0,
  K3_KDA_INVALID = 1,         /* a null pointer, a size or an alignment that the call cannot take */
  K3_KDA_SMALL_WORKSPACE = 2, /* fewer bytes than the size query asks for */
  K3_KDA_NO_CUDA = 3, /* built without CUDA, or the device is not of compute capability 9.0 */
  K3_KDA_LAUNCH = 4   /* the CUDA runtime refused a launch, or reported an earlier fault */
} k3_kda_status;

/* One line of English for a status; never null. */
const char* k3_kda_status_text(k3_kda_status status);

/* A bf16 tensor [n_tokens, n_heads, D]: head h of token t starts at data + t row_stride + h D.
 * data is aligned to 16 bytes and row_stride (elements) a multiple of 8 from n_heads D to 2^32:
 * offsets may pass 2^31, and tensors may be columns of one buffer. beta is bf16 [n_tokens, n_heads]
 * with any row_stride from n_heads to 2^32, aligned to 2 bytes. f32 arrays are aligned to 4 bytes,
 * states to 16. Without tokens tensors may be null. */
typedef struct k3_kda_tensor {
  const void* data;
  int64_t row_stride;
} k3_kda_tensor;

/* A packed batch: sequence s is rows [cu_seqlens[s], cu_seqlens[s + 1]), possibly none.
 * cu_seqlens lies on the device, does not decrease and stays within [0, n_tokens]: values outside
 * are clamped, so that no access leaves the tensors; sequences that then overlap have undefined
 * results. Rows of no sequence keep what their outputs held. NULL: one sequence of n_tokens rows.
 */
typedef struct k3_kda_batch {
  int64_t n_tokens;    /* 0 to 2^30 - 1 */
  int32_t n_sequences; /* 0 or more; n_sequences n_heads below 2^28 */
  const int32_t* cu_seqlens;
  int32_t n_heads;  /* 1 to 4096 */
  int32_t head_dim; /* 64 or 128 */
} k3_kda_batch;

/* What every direction reads. f goes into the gate, beta holds logits. a_log [n_heads] and dt_bias
 * [n_heads D, aligned to 16 bytes] are f32 and never null. */
typedef struct k3_kda_inputs {
  k3_kda_tensor q, k, v, f, beta;
  const float* a_log;
  const float* dt_bias;
  float lower_bound; /* < 0: bounded form; 0: softplus form; > -1e30 */
  float scale;       /* usually D^-0.5; |scale| < 1e30 */
} k3_kda_inputs;

/* How the forward pass is cut; K3_KDA_AUTO is right unless variants are being compared. */
typedef enum k3_kda_plan {
  K3_KDA_AUTO = 0,
  K3_KDA_FUSED = 1,    /* one kernel, one SM for each (sequence, head); D = 128, bound >= -5 */
  K3_KDA_SPLIT = 2,    /* chunk operands to memory, then state chains of 64 values; the same */
  K3_KDA_RECURRENT = 3 /* token by token; every form */
} k3_kda_plan;

/* Bytes of workspace the forward pass needs at `plan` (0 is possible), aligned to 16. It holds
 * nothing between calls; calls on different streams need one each. Negative: the batch or the
 * plan is not one that k3_kda_forward takes. */
int64_t k3_kda_forward_workspace(const k3_kda_batch* batch, float lower_bound, k3_kda_plan plan);

/* o [n_tokens, n_heads, D] bf16, same alignment rules as the inputs.
 * initial_state, final_state: [n_sequences, n_heads, D, D] f32, may be one buffer. No initial state
 * means zeros; a null final_state is not written. An empty sequence copies its state.
 * Error against float64 (relative L2): below 4.5e-3 for o and the state, 6e-3 with long memory.
 * bf16 operands and fp32 state; the same call twice gives the same bits. Worse where I + L of a
 * chunk is ill-conditioned: equal keys, beta near 1 and no decay gave 7e-2 (K3_KDA_RECURRENT does
 * not suffer). o must not overlap an input; one that is an input is refused. */
k3_kda_status k3_kda_forward(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                             int64_t o_row_stride, const float* initial_state, float* final_state,
                             k3_kda_plan plan, void* workspace, size_t workspace_bytes,
                             void* stream);

/* Few tokens for each sequence, states in place: one token, or k draft tokens (n_tokens =
 * n_sequences k when every sequence has k; any cu_seqlens works).
 * token_states, if not null: [n_tokens, n_heads, D, D] f32, the state after each token, so that a
 * rejected draft rolls back by copying one of them; state itself, never null, then ends after the
 * last token.
 * fp32 arithmetic: state error against float64 about 1e-7, output limited by its bf16. */
k3_kda_status k3_kda_decode(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                            int64_t o_row_stride, float* state, float* token_states, void* stream);

/* What a decode step may do around the recurrence, in the same launch.
 * k3_kda_conv: q, k and v of the call are rows x before a causal convolution of width 4 and SiLU,
 *   y_t[c] = silu(sum_j w[c][j] x_{t - 3 + j}[c]);
 * y takes the place of x and is not rounded. Arrays hold those of q, k, v in this order.
 * weights: f32 [n_heads D][4], aligned to 16 bytes; tap 3 meets the current token.
 * tails: bf16 [n_sequences][3][n_heads D], aligned to 8 bytes: the rows before each sequence,
 * oldest first, replaced by its last three. An empty sequence keeps them. token_tails, all null or
 * none: bf16 [n_tokens][3][n_heads D], the tails after each token, so that a rejected draft rolls
 * back by copying one of each. k3_kda_norm: o is replaced by weight o / sqrt(mean_D(o^2) + eps)
 * sigmoid(gate), eps > 0; gate is a tensor as q, weight [D] f32, aligned to 16 bytes. */
typedef struct k3_kda_conv {
  const float* weights[3];
  void* tails[3];
  void* token_tails[3];
} k3_kda_conv;
typedef struct k3_kda_norm {
  k3_kda_tensor gate;
  const float* weight;
  float eps;
} k3_kda_norm;

/* k3_kda_decode with either part, both or none; a null pointer leaves a part out. Tails must not
 * overlap anything else that the call reads or writes. */
k3_kda_status k3_kda_decode_fused(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                                  const k3_kda_conv* conv, const k3_kda_norm* norm, void* o,
                                  int64_t o_row_stride, float* state, float* token_states,
                                  void* stream);

/* Gradients of sum(o do) + sum(final_state d_final_state) by everything the forward pass reads.
 * dq, dk, dv, df: bf16 [n_tokens, n_heads, D] without row padding; dbeta: f32 [n_tokens, n_heads],
 * by the logit b; da_log [n_heads] and ddt_bias [n_heads D]: f32, overwritten, summed in an order
 * that is not fixed; d_initial_state: as the states, may be null (not wanted), as may d_final_state
 * (zeros). No output may overlap anything else.
 * Recomputes the forward pass. Relative L2 error against float64: below 1e-2. */
typedef struct k3_kda_gradients {
  void *dq, *dk, *dv, *df;
  float* dbeta;
  float* da_log;
  float* ddt_bias;
  float* d_initial_state;
} k3_kda_gradients;

/* Bytes of workspace, as above; about 2.3 KB a token and head. Negative: no backward for this form;
 * it needs head_dim 128 and -5 <= lower_bound < 0. */
int64_t k3_kda_backward_workspace(const k3_kda_batch* batch, float lower_bound);

k3_kda_status k3_kda_backward(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                              const float* initial_state, k3_kda_tensor d_o,
                              const float* d_final_state, const k3_kda_gradients* gradients,
                              void* workspace, size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* K3_KDA_H_ */
