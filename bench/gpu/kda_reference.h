// Inputs of one KDA problem and its float64 token recurrence, forward and backward, on the CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace k3::bench {

/// Where the decay lies. Lower bound -5 unless the problem says otherwise.
enum class Regime {
  kMid,   // mean log decay about -3.2
  kLong,  // about -1e-3: long memory
  kHard,  // pinned at the lower bound
  kMix    // every channel its own, from long to hard
};

struct Problem {
  std::vector<int> lengths;  // of the sequences
  int n_heads = 1, dim = 128;
  Regime regime = Regime::kMid;
  float lower_bound = -5.f;  // 0: softplus form
  bool initial_state = false;
  bool same_keys = false;  // all tokens alike: the worst case of the triangular inverse
  int pad = 0;             // extra elements a row of q, k, v, f and o
  unsigned seed = 1;
};

using Bits = std::vector<std::uint16_t>;  // bf16

/// All host arrays. Rows of q, k, v, f, d_o have `row` elements, only the first H D are used.
struct Inputs {
  std::int64_t tokens = 0, row = 0;
  float scale = 1.f;
  std::vector<std::int32_t> cu;
  Bits q, k, v, f, beta, d_o;
  std::vector<float> a_log, dt_bias, state, d_state;
  std::vector<double> wide[3];  // if not empty: rows in the place of q, k, v, not rounded
};
Inputs MakeInputs(const Problem& p);

struct Outputs {
  std::vector<double> o, state;                        // [T, H, D], [N, H, D, D]
  std::vector<double> dq, dk, dv, df, dbeta, d_state;  // as their inputs, dense
  std::vector<double> da_log, ddt_bias;
};
/// Runs every (sequence, head) on all processors. `tokens_state`, if asked for: [T, H, D, D].
Outputs Reference(const Problem& p, const Inputs& x, bool backward,
                  std::vector<double>* token_states = nullptr);

float FromBits(std::uint16_t bits);
std::uint16_t ToBits(float x);

/// |a - b| / |b| over whole arrays; infinite when `a` holds anything that is not finite.
double RelativeError(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace k3::bench
