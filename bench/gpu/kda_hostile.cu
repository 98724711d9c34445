// Device memory that a caller got wrong, and shapes at the ends of what the calls take: nothing may
// fault, hang or write outside its tensors, and what has a right answer must give it. What is
// refused before a device is asked is tested without one: src/k3/kernels/kda_check_test.cc.
#include <climits>
#include <cmath>
#include <cstring>

#include "kda_rig.h"

namespace k3::bench {
namespace {

using Cu = std::vector<std::int32_t>;

/// cu_seqlens that make no sense: every call, every plan.
int HostileStarts(Report& report) {
  const struct {
    const char* name;
    Cu cu;
  } lists[] = {{"cu falls", {64, 40, 33, 0}},
               {"cu zigzags", {0, 50, 10, 64, 2, 60, 1}},
               {"cu outside", {INT_MIN, -1, INT_MAX, 5, INT_MAX, INT_MIN}},
               {"cu past the end", {65, 66, 1 << 30, INT_MAX}},
               {"cu all negative", {-9, -5, -1, INT_MIN, -2}}};
  int failed = 0;
  for (const auto& list : lists) {
    for (const int heads : {2, 90}) {  // states above and below what decode calls many
      Rig rig(64, list.cu, heads, 128);
      failed += !rig.RunAll(report, list.name);
    }
    Rig rig(64, list.cu, 2, 64);
    failed += !rig.RunAll(report, list.name);
  }
  return failed;
}

/// Values outside are clamped: the same bits as the batch that was meant.
int ClampedStarts(Report& report) {
  int failed = 0;
  for (const auto plan : {K3_KDA_RECURRENT, K3_KDA_SPLIT, K3_KDA_FUSED}) {
    Rig wild(100, {-7, 20, 20, 1 << 29}, 3, 128), meant(100, {0, 20, 20, 100}, 3, 128);
    wild.Must("clamped", wild.Forward(plan)), meant.Must("clamped", meant.Forward(plan));
    const bool ok = wild.o.Host() == meant.o.Host() && wild.s_out.Host() == meant.s_out.Host();
    report.Row("hostile", std::string("clamped cu [") + Rig::PlanName(plan) + "]",
               std::string("\"same_bits\": ") + (ok ? "true" : "false"), ok);
    failed += !ok;
  }
  return failed;
}

/// Numbers that are none: wrong results are right, faults and hangs are not.
int HostileNumbers(Report& report) {
  int failed = 0;
  const struct {
    const char* name;
    std::uint16_t bits;
    float rate;
  } fills[] = {{"NaN everywhere", 0xFFFF, NAN},        {"+inf everywhere", 0x7F80, INFINITY},
               {"-inf everywhere", 0xFF80, -INFINITY}, {"largest bf16", 0x7F7F, 3e38f},
               {"smallest bf16", 0x0001, -3e38f},      {"zeros, rate 88", 0, 88.f}};
  for (const auto& fill : fills) {
    for (const float bound : {-5.f, 0.f}) {
      Rig rig(64, {0, 30, 64}, 3, 128);
      rig.Fill(fill.bits, fill.rate);
      rig.inputs.lower_bound = bound;
      failed += !rig.RunAll(report, std::string(fill.name) + (bound == 0.f ? ", softplus" : ""));
    }
  }
  return failed;
}

/// Without a token or a sequence tensors may be null, states are copied and sums are zero.
int NothingToDo(Report& report) {
  int failed = 0;
  for (const bool sequences : {false, true}) {
    Rig rig(0, sequences ? Cu{0, 0, 0} : Cu{0}, 200, 128);  // enough for a block a head
    rig.inputs.q = rig.inputs.k = rig.inputs.v = rig.inputs.f = rig.inputs.beta = {};
    bool ok = rig.RunAll(report, sequences ? "two empty sequences" : "no sequence");
    CUDA_CHECK(cudaMemset(rig.state.get(), 0x3C, rig.state.size()));
    for (const auto plan : {K3_KDA_RECURRENT, K3_KDA_SPLIT, K3_KDA_FUSED}) {
      rig.s_out.Zero();
      rig.Must("empty", rig.Forward(plan));
      ok &= rig.s_out.Host() == rig.state.Host();
    }
    for (const float x : rig.ddt_bias.Values<float>()) ok &= x == 0.f;
    report.Row("hostile", sequences ? "states copied, sums zero" : "sums zero", "\"tokens\": 0",
               ok);
    failed += !ok;
  }
  return failed;
}

/// o over the rows of an input, shifted so that it is not refused: no fault.
int Overlaps(Report& report) {
  Rig rig(64, {0, 64}, 4, 128);
  bool ok = true;
  for (const auto plan : {K3_KDA_RECURRENT, K3_KDA_SPLIT, K3_KDA_FUSED}) {
    rig.o_data = static_cast<char*>(const_cast<void*>(rig.inputs.v.data)) + 16;
    rig.o_tokens = 63;
    rig.Must("overlap", rig.Forward(plan));
  }
  rig.Must("overlap", rig.Decode(true));
  ok &= rig.GuardsKept();
  report.Row("hostile", "o over v", "\"guards\": \"kept\"", ok);
  return !ok;
}

/// Ends of the shapes: results by every plan agree, and equal rows give equal results.
int Extremes(Report& report) {
  int failed = 0;
  Cu many(100001), wide = {0, 1};
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<std::int32_t>(i);
  {
    Rig rig(1, wide, 4096, 128);
    failed += !rig.RunAll(report, "1 token x 4096 heads") + !rig.PlansAgree(report, "4096 heads");
  }
  {
    Rig rig(1, wide, 4096, 64);
    failed += !rig.RunAll(report, "1 token x 4096 heads");
  }
  {
    Rig rig(100000, many, 2, 128);  // states of 3.3e9 elements
    rig.beta.Set(Bits(rig.beta.size(), 0x3F00));
    failed += !rig.RunAll(report, "100000 sequences of 1");
    failed += !rig.PlansAgree(report, "100000 sequences");
    failed += !rig.RowsRepeat(report, "100000 sequences", 4096);
  }
  return failed;
}

/// 2^20 sequences, most of them empty, without states: grids far above 65535 and 2^24.
int ManyBlocks(Report& report) {
  int failed = 0;
  Cu cu(std::size_t{1} << 20 | 1);
  for (std::size_t i = 0; i < cu.size(); ++i) cu[i] = static_cast<std::int32_t>(i >> 13);
  for (const auto plan : {K3_KDA_RECURRENT, K3_KDA_SPLIT, K3_KDA_FUSED}) {
    Rig rig(128, cu, plan == K3_KDA_RECURRENT ? 200 : plan == K3_KDA_SPLIT ? 1 : 32, 128, false);
    Rig meant(
        128,
        [] {
          Cu each(129);
          for (std::size_t i = 0; i < each.size(); ++i) each[i] = static_cast<std::int32_t>(i);
          return each;
        }(),
        rig.batch.n_heads, 128, false);
    rig.Must("2^20 sequences", rig.Forward(plan));
    meant.Must("2^20 sequences", meant.Forward(plan));
    const bool ok = rig.o.Host() == meant.o.Host() && rig.GuardsKept();
    report.Row("hostile",
               "2^20 sequences x " + std::to_string(rig.batch.n_heads) + " heads [" +
                   Rig::PlanName(plan) + "]",
               std::string("\"same_bits\": ") + (ok ? "true" : "false"), ok);
    failed += !ok;
  }
  return failed;
}

/// Rows 2^18 elements apart in one buffer of 8.9 GB: the same bits as rows side by side.
int HugeStrides(Report& report) {
  constexpr std::int64_t kTokens = 17000, kRow = std::int64_t{1} << 18;
  Rig rig(kTokens, {0, 16000, 17000}, 2, 128);
  DeviceArray<std::uint16_t> buffer(static_cast<std::size_t>(kTokens * kRow));
  int failed = 0;
  auto results = [&] {
    std::vector<std::vector<unsigned char>> all;
    rig.ResetStates();
    for (const auto plan : {K3_KDA_RECURRENT, K3_KDA_SPLIT, K3_KDA_FUSED}) {
      rig.Must("huge strides", rig.Forward(plan));
      all.push_back(rig.Output());
      all.push_back(rig.s_out.Host());
    }
    rig.ResetStates();
    rig.Must("huge strides", rig.Decode(true));
    all.push_back(rig.Output());
    rig.Must("huge strides", rig.Backward());
    for (const Guarded* g : {&rig.dq, &rig.dk, &rig.dv, &rig.df, &rig.dbeta}) {
      all.push_back(g->Host());
    }
    return all;
  };
  const auto compact = results();
  std::int64_t column = 1 << 17;
  auto spread = [&](k3_kda_tensor& x, std::size_t bytes) {
    std::uint16_t* to = buffer.get() + column;
    CUDA_CHECK(cudaMemcpy2D(to, kRow * 2, x.data, static_cast<std::size_t>(x.row_stride) * 2, bytes,
                            kTokens, cudaMemcpyDefault));
    x = {to, kRow}, column += 512;
  };
  for (auto* x :
       {&rig.inputs.q, &rig.inputs.k, &rig.inputs.v, &rig.inputs.f, &rig.d_o, &rig.norm.gate}) {
    spread(*x, 512);
  }
  spread(rig.inputs.beta, 4);
  rig.o_data = buffer.get() + column, rig.o_row = kRow;
  const bool ok = results() == compact;
  report.Row("hostile", "rows 2^18 apart, offsets past 2^32",
             std::string("\"same_bits\": ") + (ok ? "true" : "false"), ok);
  failed += !ok;
  return failed;
}

}  // namespace

int RunHostile(Report& report, bool small) {
  int failed = HostileStarts(report) + ClampedStarts(report) + HostileNumbers(report) +
               NothingToDo(report) + Overlaps(report);
  if (small) return failed;
  return failed + Extremes(report) + ManyBlocks(report) + HugeStrides(report);
}

}  // namespace k3::bench
