// Checks of the CUDA KDA against the float64 recurrence: the case list of every plan.
#include <cmath>
#include <cstring>

#include "device_problem.h"

namespace k3::bench {
namespace {

std::string Format(const char* format, double a, double b, double limit) {
  char text[160];
  std::snprintf(text, sizeof text, format, a, b, limit);
  return text;
}

const char* PlanName(k3_kda_plan plan) {
  return plan == K3_KDA_FUSED       ? "fused"
         : plan == K3_KDA_SPLIT     ? "split"
         : plan == K3_KDA_RECURRENT ? "recurrent"
                                    : "auto";
}

struct Case {
  const char* name;
  Problem problem;
  double limit = 4.5e-3;
};

std::vector<Case> Cases(bool small) {
  const std::vector<int> edges = {0, 1, 31, 32, 33, 0, 63, 64, 65, 17, 2, 100, 0};
  std::vector<Case> cases;
  auto add = [&](const char* name, std::vector<int> lengths, int heads, Regime regime,
                 double limit = 4.5e-3) -> Problem& {
    cases.push_back({name, {}, limit});
    Problem& p = cases.back().problem;
    p.lengths = std::move(lengths), p.n_heads = heads, p.regime = regime;
    p.seed = static_cast<unsigned>(cases.size());
    return p;
  };
  add("T=0", {0}, 2, Regime::kMid).initial_state = true;
  add("T=1", {1}, 3, Regime::kMid).initial_state = true;
  add("edges, initial state", edges, 3, Regime::kMix, 6e-3).initial_state = true;
  add("edges, wide rows", edges, 2, Regime::kMid).pad = 40;
  std::vector<int> short_ones;  // enough heads for a block a head in the recurrence
  for (int i = 0; i < 90; ++i) short_ones.push_back(i % 8);
  add("90 short, initial state", short_ones, 3, Regime::kMix, 6e-3).initial_state = true;
  if (small) return cases;
  add("mid T=1024", {1024}, 8, Regime::kMid);
  add("long T=2048", {2048}, 8, Regime::kLong, 6e-3);
  add("pinned T=512", {512}, 8, Regime::kHard);
  add("mixed T=1000", {1000}, 8, Regime::kMix, 6e-3).initial_state = true;
  add("varlen 300,17,483", {300, 17, 483}, 5, Regime::kMid).initial_state = true;
  add("long varlen, initial state", {700, 0, 129}, 3, Regime::kLong, 6e-3).initial_state = true;
  add("equal keys", {256}, 4, Regime::kLong, 0.1).same_keys = true;  // (I + L) is ill-conditioned
  add("bound -1", {400}, 4, Regime::kMix, 6e-3).lower_bound = -1.f;
  return cases;
}

bool CheckForward(Report& report, const Case& c, const Inputs& x, const Outputs& expected,
                  k3_kda_plan plan) {
  DeviceProblem device(c.problem, x);
  const k3_kda_status status = device.Forward(plan);
  const cudaError_t error = cudaDeviceSynchronize();
  const std::string name = std::string(c.name) + " [" + PlanName(plan) + "]";
  if (status != K3_KDA_OK || error != cudaSuccess) {
    std::printf("%s: %s, %s\n", name.c_str(), k3_kda_status_text(status),
                cudaGetErrorString(error));
    std::exit(3);
  }
  const std::int64_t width = static_cast<std::int64_t>(c.problem.n_heads) * c.problem.dim;
  const auto o = device.o.Get();
  const double o_error = RelativeError(Dense(o, x.row, width), expected.o);
  const double s_error = RelativeError(Widen(device.state_out.Get()), expected.state);
  bool padding_kept = true;  // the kernels write nothing between the rows
  for (std::size_t i = 0; i < o.size(); ++i) {
    if (static_cast<std::int64_t>(i) % x.row >= width) padding_kept &= o[i] == 0xFFFF;
  }
  device.o.Poison();
  device.Forward(plan);
  CUDA_CHECK(cudaDeviceSynchronize());
  const bool same = device.o.Get() == o;
  const bool ok = o_error <= c.limit && s_error <= c.limit && padding_kept && same;
  report.Row("forward", name,
             Format("\"o\": %.3g, \"state\": %.3g, \"limit\": %.3g", o_error, s_error, c.limit) +
                 (same ? "" : ", \"repeat\": \"differs\"") +
                 (padding_kept ? "" : ", \"padding\": \"written\""),
             ok);
  return ok;
}

/// States after each draft token, and the state in place, against the reference.
bool CheckDecode(Report& report, int dim, float lower_bound, int drafts, int batch) {
  Problem p;
  p.lengths.assign(static_cast<std::size_t>(batch), drafts);
  p.n_heads = 3, p.dim = dim, p.regime = Regime::kMix, p.lower_bound = lower_bound;
  p.initial_state = true;
  const Inputs x = MakeInputs(p);
  std::vector<double> states;
  const Outputs expected = Reference(p, x, false, &states);
  DeviceProblem device(p, x);
  DeviceArray<float> token_states(states.size());
  const auto status = k3_kda_decode(&device.batch, &device.inputs, device.o.get(), device.row,
                                    device.state.get(), token_states.get(), nullptr);
  CUDA_CHECK(cudaDeviceSynchronize());
  const double o_error = RelativeError(Dense(device.o.Get(), x.row, x.row), expected.o);
  const double s_error = std::max(RelativeError(Widen(device.state.Get()), expected.state),
                                  RelativeError(Widen(token_states.Get()), states));
  const bool ok = status == K3_KDA_OK && o_error < 2.5e-3 && s_error < 2e-6;
  char name[80];
  std::snprintf(name, sizeof name, "D=%d bound=%g drafts=%d batch=%d", dim,
                static_cast<double>(lower_bound), drafts, batch);
  report.Row("decode", name,
             Format("\"o\": %.3g, \"state\": %.3g, \"limit\": %.3g", o_error, s_error, 2.5e-3), ok);
  return ok;
}

bool CheckBackward(Report& report, const Case& c) {
  const Inputs x = MakeInputs(c.problem);
  const Outputs expected = Reference(c.problem, x, true);
  DeviceProblem device(c.problem, x);
  const auto n = expected.dq.size();
  DeviceArray<std::uint16_t> dq(n), dk(n), dv(n), df(n);
  DeviceArray<float> dbeta(expected.dbeta.size()), da(expected.da_log.size()),
      bias(expected.ddt_bias.size()), ds(expected.d_state.size());
  const std::int64_t bytes = k3_kda_backward_workspace(&device.batch, c.problem.lower_bound);
  if (bytes < 0) return true;  // no backward for this form
  DeviceArray<unsigned char> workspace(static_cast<std::size_t>(bytes));
  const k3_kda_gradients out = {dq.get(),    dk.get(), dv.get(),   df.get(),
                                dbeta.get(), da.get(), bias.get(), ds.get()};
  const auto status =
      k3_kda_backward(&device.batch, &device.inputs, device.s_in, {device.d_o.get(), x.row},
                      device.d_state.get(), &out, workspace.get(), workspace.size(), nullptr);
  const cudaError_t error = cudaDeviceSynchronize();
  if (status != K3_KDA_OK || error != cudaSuccess) {
    std::printf("%s: %s, %s\n", c.name, k3_kda_status_text(status), cudaGetErrorString(error));
    std::exit(3);
  }
  const std::int64_t width = static_cast<std::int64_t>(c.problem.n_heads) * c.problem.dim;
  const struct {
    const char* name;
    double error;
  } rows[] = {{"dq", RelativeError(Dense(dq.Get(), width, width), expected.dq)},
              {"dk", RelativeError(Dense(dk.Get(), width, width), expected.dk)},
              {"dv", RelativeError(Dense(dv.Get(), width, width), expected.dv)},
              {"df", RelativeError(Dense(df.Get(), width, width), expected.df)},
              {"dbeta", RelativeError(Widen(dbeta.Get()), expected.dbeta)},
              {"da_log", RelativeError(Widen(da.Get()), expected.da_log)},
              {"ddt_bias", RelativeError(Widen(bias.Get()), expected.ddt_bias)},
              {"dstate", RelativeError(Widen(ds.Get()), expected.d_state)}};
  std::string fields;
  bool ok = true;
  for (const auto& row : rows) {
    char text[60];
    std::snprintf(text, sizeof text, "%s\"%s\": %.2g", fields.empty() ? "" : ", ", row.name,
                  row.error);
    fields += text;
    ok &= row.error <= 1e-2;
  }
  report.Row("backward", c.name, fields, ok);
  return ok;
}

}  // namespace

int RunChecks(Report& report, bool small) {
  int failed = 0;
  for (const Case& c : Cases(small)) {
    const Inputs x = MakeInputs(c.problem);
    const Outputs expected = Reference(c.problem, x, false);
    for (const auto plan : {K3_KDA_RECURRENT, K3_KDA_SPLIT, K3_KDA_FUSED}) {
      failed += !CheckForward(report, c, x, expected, plan);
    }
  }
  for (const float bound : {0.f, -20.f}) {
    Case c = {bound == 0.f ? "softplus, edges" : "bound -20, edges", {}, 4.5e-3};
    c.problem.lengths = {0, 1, 33, 200}, c.problem.n_heads = 3, c.problem.lower_bound = bound;
    c.problem.regime = Regime::kMix, c.problem.initial_state = true;
    const Inputs x = MakeInputs(c.problem);
    failed += !CheckForward(report, c, x, Reference(c.problem, x, false), K3_KDA_AUTO);
    c.problem.dim = 64, c.name = bound == 0.f ? "softplus, D=64" : "bound -20, D=64";
    const Inputs y = MakeInputs(c.problem);
    failed += !CheckForward(report, c, y, Reference(c.problem, y, false), K3_KDA_AUTO);
  }
  for (const int dim : {64, 128}) {
    failed += !CheckDecode(report, dim, -5.f, 1, 2);
    failed += !CheckDecode(report, dim, 0.f, 4, small ? 2 : 180);
  }
  failed += !CheckDecode(report, 128, -5.f, 1, 90);  // enough states for a block a head
  failed += !CheckDecode(report, 128, -5.f, 0, 90);
  failed += !CheckDecode(report, 128, 0.f, 3, 90);
  if (!small) failed += !CheckDecode(report, 128, -5.f, 8, 700);
  failed += RunFusedDecodeChecks(report, small);
  std::vector<Case> cases = {{"edges", {}, 1e-2}, {"mid T=200", {}, 1e-2}};
  cases[0].problem.lengths = {0, 1, 31, 33, 0, 64, 2};
  cases[0].problem.regime = Regime::kMix, cases[0].problem.initial_state = true;
  cases[1].problem.lengths = {200};
  if (!small) {
    for (const Regime regime : {Regime::kLong, Regime::kHard, Regime::kMix}) {
      cases.push_back({regime == Regime::kLong   ? "long T=256"
                       : regime == Regime::kHard ? "pinned T=130"
                                                 : "mixed, two sequences",
                       {},
                       1e-2});
      cases.back().problem.lengths = regime == Regime::kMix    ? std::vector{150, 97}
                                     : regime == Regime::kLong ? std::vector{256}
                                                               : std::vector{130};
      cases.back().problem.regime = regime;
      cases.back().problem.initial_state = regime != Regime::kHard;
    }
  }
  for (Case& c : cases) {
    c.problem.n_heads = 4;
    failed += !CheckBackward(report, c);
  }
  return failed;
}

}  // namespace k3::bench
