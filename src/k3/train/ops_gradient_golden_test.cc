// The f32 backward ops against gradients of an independent implementation.
#include <gtest/gtest.h>

#include "k3/kernels/backward/backward.h"
#include "k3/kernels/cpu/isa.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::Golden;
using testing::RelativeL2;
using Floats = std::vector<float>;

// Most errors are near 1e-7; the recurrence adds up 37 tokens.
constexpr double kTolerance = 5e-6;

class OpGradients : public ::testing::Test {
 protected:
  ThreadPool pool{2};
  grad::Context ctx{pool, *cpu::SupportedTables().back()};
  Golden modules{"modules.safetensors"};
  Golden variants{"modules_variants.safetensors"};
};

CMat M(const Floats& v, std::int64_t cols) {
  return CMat(v.data(), {static_cast<std::int64_t>(v.size()) / cols, cols});
}
Mat M(Floats& v, std::int64_t cols) {
  return Mat(v.data(), {static_cast<std::int64_t>(v.size()) / cols, cols});
}
CVec V(const Floats& v) { return CVec(v.data(), {static_cast<std::int64_t>(v.size())}); }
Vec V(Floats& v) { return Vec(v.data(), {static_cast<std::int64_t>(v.size())}); }

TEST_F(OpGradients, Situ) {
  const Floats gate = modules.Floats("situ.gate"), up = modules.Floats("situ.up");
  const Floats dy = modules.Floats("situ.dy");
  const auto n = static_cast<std::int64_t>(gate.size());
  Floats dgate(gate.size()), dup(gate.size());
  grad::GatedAct<float>(
      ctx, {M(gate, n), M(up, n), {true, 4.f, 25.f}, M(dy, n), M(dgate, n), M(dup, n)});
  EXPECT_LT(RelativeL2(dgate, modules.Floats("situ.dgate")), kTolerance);
  EXPECT_LT(RelativeL2(dup, modules.Floats("situ.dup")), kTolerance);
}

TEST_F(OpGradients, KdaRecurrence) {
  for (const std::string name : {"kda_bounded", "kda_softplus"}) {
    const bool bounded = name == "kda_bounded";
    const Golden& g = bounded ? modules : variants;
    const std::int64_t K = bounded ? 32 : 8, P = 2 * K;
    const std::string d = bounded ? ".d" : ".d_";
    const Floats q = g.Floats(name + ".q"), k = g.Floats(name + ".k"), v = g.Floats(name + ".v"),
                 log = g.Floats(name + ".g"), beta = g.Floats(name + ".beta");
    const Floats dout = g.Floats(name + (bounded ? ".do" : ".d_out"));
    Floats state(static_cast<std::size_t>(2 * K * K)), ds(state.size());
    if (bounded) state = g.Floats(name + ".state0"), ds = g.Floats(name + ".dstate1");
    Floats dq(q.size()), dk(q.size()), dv(q.size()), dg(q.size()), dbeta(beta.size());
    const std::vector<SequenceRange> ranges{{0, static_cast<std::int64_t>(beta.size()) / 2}};
    const std::vector<const float*> states{state.data()};
    const std::vector<float*> dstates{ds.data()};
    grad::KdaArgs<float> a;
    a.q = M(q, P), a.k = M(k, P), a.v = M(v, P), a.g = M(log, P), a.beta = M(beta, 2);
    a.n_heads = 2, a.scale = 1.f / std::sqrt(static_cast<float>(K));
    a.sequences = ranges, a.states = states, a.dstates = dstates, a.dout = M(dout, P);
    a.dq = M(dq, P), a.dk = M(dk, P), a.dv = M(dv, P), a.dg = M(dg, P), a.dbeta = M(dbeta, 2);
    grad::Kda(ctx, a);
    EXPECT_LT(RelativeL2(dq, g.Floats(name + d + "q")), kTolerance) << name;
    EXPECT_LT(RelativeL2(dk, g.Floats(name + d + "k")), kTolerance) << name;
    EXPECT_LT(RelativeL2(dv, g.Floats(name + d + "v")), kTolerance) << name;
    EXPECT_LT(RelativeL2(dg, g.Floats(name + d + "g")), kTolerance) << name;
    EXPECT_LT(RelativeL2(dbeta, g.Floats(name + d + "beta")), kTolerance) << name;
    if (bounded) {
      EXPECT_LT(RelativeL2(ds, g.Floats(name + ".dstate0")), kTolerance);
    }
  }
}

TEST_F(OpGradients, KdaGate) {
  for (const std::string name : {"kda_gate.bounded", "kda_gate.softplus"}) {
    const Floats z = variants.Floats(name + ".z"), a_log = variants.Floats(name + ".a_log");
    const Floats zero(24), dg = variants.Floats(name + ".d_out");
    Floats df(z.size()), da(a_log.size()), db(zero.size());
    grad::KdaGate<float>(
        ctx, {M(z, 24), V(zero), V(a_log),
              name.ends_with("bounded") ? std::optional<float>(-5.f) : std::nullopt, M(dg, 24),
              M(df, 24), V(db), V(da)});
    EXPECT_LT(RelativeL2(df, variants.Floats(name + ".d_z")), kTolerance) << name;
    EXPECT_LT(RelativeL2(da, variants.Floats(name + ".d_a_log")), kTolerance) << name;
  }
}

TEST_F(OpGradients, Rope) {
  Floats d = variants.Floats("rope.d_out");
  const std::vector<std::int64_t> positions{0, 1, 2, 3, 4, 5, 6};
  grad::Rope<float>(ctx, {M(d, 12), 6, 100.0, positions});
  EXPECT_LT(RelativeL2(d, variants.Floats("rope.d_x")), kTolerance);
}

TEST_F(OpGradients, AttnRes) {
  for (const std::string name : {"attn_res_gate", "full_attn_res"}) {
    const std::size_t n = name == "attn_res_gate" ? 3 : 5;
    const Floats norm = variants.Floats(name + ".norm_w"), proj = variants.Floats(name + ".proj_w");
    const Floats dy = variants.Floats(name + ".d_out");
    const auto H = static_cast<std::int64_t>(norm.size());
    Floats w(norm), dw(norm.size());
    for (std::size_t d = 0; d < w.size(); ++d) w[d] *= proj[d];
    std::vector<Floats> rows, drows;
    std::vector<const float*> in;
    std::vector<float*> out;
    for (std::size_t e = 0; e < n; ++e) {
      rows.push_back(variants.Floats(name + ".row" + std::to_string(e)));
      drows.emplace_back(rows.back().size());
    }
    for (std::size_t e = 0; e < n; ++e)
      in.push_back(rows[e].data()), out.push_back(drows[e].data());
    std::optional<float> gamma;
    float dgamma = 0;
    if (n == 3) gamma = variants.Floats(name + ".gamma")[0];
    grad::AttnRes<float>(ctx, {in, V(w), 1e-5f, gamma, M(dy, H), out, V(dw), &dgamma});
    for (std::size_t e = 0; e < n; ++e) {
      EXPECT_LT(RelativeL2(drows[e], variants.Floats(name + ".d_row" + std::to_string(e))),
                kTolerance);
    }
    Floats dnorm(dw), dproj(dw);
    for (std::size_t d = 0; d < w.size(); ++d) dnorm[d] *= proj[d], dproj[d] *= norm[d];
    EXPECT_LT(RelativeL2(dnorm, variants.Floats(name + ".d_norm_w")), kTolerance);
    EXPECT_LT(RelativeL2(dproj, variants.Floats(name + ".d_proj_w")), kTolerance);
    if (gamma) {
      EXPECT_NEAR(dgamma, variants.Floats(name + ".d_gamma")[0], 1e-4);
    }
  }
}

}  // namespace
}  // namespace k3
