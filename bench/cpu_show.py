#!/usr/bin/env python3
"""Every figure asked of the CPU engine, beside its bar, in one run of a few minutes.

    cpu_show.py --build build/release [--mid MODEL] [--llama-bench PATH --gguf FILE [FILE ...]]
                [--text FILE] [--only llama,kda,...] [--out RESULT.json]

--mid is a checkpoint made by tools/make_checkpoint.py from tools/configs/mid-k3.json, --gguf the same
weights through tools/export_gguf.py, --text documents for the demo model's perplexity. The build
needs K3_BENCH=ON (./dev bench) and k3_conformance_test. What cannot be measured prints SKIP and why.
Single-thread figures are processor time, scaling over threads is wall time and means something on an
idle machine only. Programs that are compared take turns.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
ROWS = []


def row(what, figure, bar=None, ok=None, unit=""):
    """Prints and keeps one line; ok is None where there is no bar."""
    verdict = "" if ok is None else ("meets" if ok else "MISSES")
    text = figure if isinstance(figure, str) else f"{figure:.3g}"
    print(f"{what:<66} {text:>12} {unit:<10} {bar or '':<16} {verdict}", flush=True)
    ROWS.append({"what": what, "figure": figure, "unit": unit, "bar": bar, "ok": ok})


def skip(what, why):
    print(f"{what:<66} SKIP: {why}", flush=True)
    ROWS.append({"what": what, "skip": why})


def run(command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} {command[1] if len(command) > 1 else ''}: exit status "
                           f"{done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout


def micro(args, name):
    """name -> counters of one Google Benchmark filter; medians of three repeats."""
    out = json.loads(run([f"{args.build}/bench/k3_microbench", f"--benchmark_filter={name}",
                          "--benchmark_min_time=0.1", "--benchmark_repetitions=3",
                          "--benchmark_format=json"], {"OMP_NUM_THREADS": "1"}))  # oneDNN's threads
    return {b["run_name"]: b for b in out["benchmarks"] if b.get("aggregate_name") == "median"}


def bench(args, math, threads, prefill, decode, repeats=3, env=None, extra=()):
    out = run([f"{args.build}/k3", "bench", args.mid, "--math", math, "--threads", str(threads),
               "--prefill", str(prefill), "--decode", str(decode), "--repeats", str(repeats),
               "--force", "--json", *extra], env)
    return json.loads(out)["results"]


def llama(args):
    for threads, rounds, prefill in ((1, 2, "256,512"), (2, 1, "512")):
        what = f"beside llama.cpp, {threads} thread{'s' if threads > 1 else ''}"
        if not (args.mid and args.llama_bench and args.gguf):
            skip(what, "no --mid, --llama-bench or --gguf")
            continue
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            run([sys.executable, f"{HERE}/compare_llama.py", "--k3", f"{args.build}/k3", "--model", args.mid,
                 "--llama-bench", args.llama_bench, "--gguf", *args.gguf, "--threads", str(threads),
                 "--rounds", str(rounds), "--prefill", prefill, "--out", file.name])
            figures = json.load(open(file.name, encoding="utf-8"))["figures"]
        for f in figures:
            bar = 2.0 if f["phase"] == "prefill" else 1.25
            for kind in ("per_cpu_s", "per_wall_s"):
                if threads > 1 and kind == "per_cpu_s":
                    continue  # its threads spin while they wait
                for name in ("k3 exact", "k3 fast"):
                    ratio = f["ratio_" + kind][name]
                    row(f"{what}: {f['phase']} {f['tokens']}, {name}, {kind.replace('_', ' ')}", ratio,
                        f">= {bar}", ratio >= bar, "x")
            if f["phase"] == "decode":
                fast, exact = f["per_cpu_s"]["k3 fast"], f["per_cpu_s"]["k3 exact"]
                row(f"{what}: decode, fast beside exact", fast / exact, ">= 1", fast >= exact, "x")


def kda(args):
    b = micro(args, "BM_kda")
    names = {0: "recurrence f32", 1: "chunks f32", 2: "chunks f32, decay without bound", 3: "chunks fast"}
    for tokens in (1, 64, 512):
        for form, name in names.items():
            found = [v for k, v in b.items() if re.match(rf"BM_kda/tokens:{tokens}/form.*:{form}$", k)]
            if not found or (tokens == 1 and form != 0):
                continue
            us = found[0]["us/head-token"]
            bar = 1.5 if tokens == 1 else {0: 1.05, 1: 1.05, 3: 0.6}.get(form)
            row(f"KDA {name}, T = {tokens}", us, bar and f"<= {bar}", None if bar is None else us <= bar,
                "us")
    test = f"{args.build}/tests/k3_conformance_test"
    if not os.path.exists(test):
        return skip("KDA error against float64", "k3_conformance_test is not built")
    out = run([test, "--gtest_filter=WorstCase*:FastMode.Unbounded*"])
    errors = [float(e) for line in out.splitlines() if "|" in line
              for e in re.findall(r"\d\.\d+e-\d+", line)]
    if errors:
        row("KDA f32 against float64, worst of the long runs", max(errors), "<= 1e-5", max(errors) <= 1e-5)
    row("KDA without bound: the case that overflows without segments", "passes", "passes", True)


def mxfp4(args):
    b = micro(args, "BM_gemm_mxfp4|BM_read|BM_fma_peak")
    read = b["BM_read"]["B/s"] * 1e-9
    row("read rate of one core, huge pages", read, unit="GB/s")
    for mode in (0, 1):
        name = ("exact", "fast")[mode]
        macs = b[f"BM_gemm_mxfp4/rows:32/fast:{mode}"]["MAC/s"] * 1e-9
        row(f"MXFP4 3072x3584, 32 rows, {name}", macs, ">= 150" if mode else None,
            macs >= 150 if mode else None, "GMAC/s")
        # Scale bytes are read too.
        rate = b[f"BM_gemm_mxfp4/rows:1/fast:{mode}"]["B/s"] * 1e-9
        row(f"MXFP4 3072x3584, 1 row, {name}: share of the read rate", rate / read, ">= 0.85",
            rate / read >= 0.85)
    if "BM_fma_peak" in b:
        row("f32 multiply-adds of one core at best", b["BM_fma_peak"]["MAC/s"] * 1e-9, unit="GMAC/s")


def onednn(args):
    b = micro(args, "BM_gemm_bf16_4096/.*fast:1|BM_onednn")
    for m in (1, 16, 96):
        theirs = b.get(f"BM_onednn_bf16_4096/rows:{m}")
        if theirs is None:
            skip(f"bf16 4096x4096 beside oneDNN, M = {m}", "built without oneDNN (libdnnl-dev)")
            continue
        ratio = b[f"BM_gemm_bf16_4096/rows:{m}/fast:1"]["MAC/s"] / theirs["MAC/s"]
        row(f"bf16 4096x4096 beside oneDNN, M = {m}", ratio, ">= 0.8", ratio >= 0.8, "x")


def scaling(args):
    if not args.mid:
        return skip("two threads beside one; exact beside fast", "no --mid")
    wall, cpu = {}, {}
    for _ in range(3):
        for math in ("exact", "fast"):
            for threads in (1, 2):
                f = bench(args, math, threads, 512, 0, 1)[0]
                wall.setdefault((math, threads), []).append(f["tokens_per_s"])
                cpu.setdefault((math, threads), []).append(f["tokens_per_cpu_s"])
    wall = {k: statistics.median(v) for k, v in wall.items()}
    cpu = {k: statistics.median(v) for k, v in cpu.items()}
    for math in ("exact", "fast"):
        ratio = wall[math, 2] / wall[math, 1]
        row(f"two threads beside one, prefill 512, {math}, wall time", ratio, ">= 1.7", ratio >= 1.7, "x")
    row("exact beside fast, prefill 512", cpu["exact", 1] / cpu["fast", 1], ">= 0.5",
        cpu["exact", 1] >= 0.5 * cpu["fast", 1], "x")
    try:
        f = bench(args, "fast", 1, 512, 0, 1, {"K3_ISA": "avx512bf16"})[0]["tokens_per_cpu_s"]
        row("exact beside fast without matrix tiles (K3_ISA=avx512bf16)", cpu["exact", 1] / f, unit="x")
    except RuntimeError as e:
        skip("exact beside fast without matrix tiles", str(e))


def first_token(args):
    if not args.mid:
        return skip("first token; resident memory beside the plan", "no --mid")
    command = [f"{args.build}/k3", "run", args.mid, "--ids", ",".join(str(7 * i + 1) for i in range(32)),
               "-n", "1", "--ctx", "33", "--json"]
    run(command)
    start = time.monotonic()
    run(command)
    seconds = time.monotonic() - start
    row("k3 run to the first token and out, warm", seconds, "< 1.5", seconds < 1.5, "s")
    used = json.loads(run([*command, "--weights", "copy"]))  # mapped pages count when touched
    plan = json.loads(run([f"{args.build}/k3", "plan", args.mid, "--ctx", "33", "--json",
                           "--no-measure"]))
    ratio = used["memory"]["peak_resident_bytes"] / plan["total_bytes"]
    row("resident memory beside k3 plan", ratio, "0.95 to 1.05", abs(ratio - 1) <= 0.05, "x")


def flat(args):
    if not args.mid:
        return skip("prefill time a token, 1k to 32k", "no --mid")
    per_token, share = {}, {}
    for n in (1024, 8192, 32768):
        f = bench(args, "fast", 2, n, 0, 1, extra=("--profile",))[0]
        total = sum(p["seconds"] for p in f["profile"])
        mla = sum(p["seconds"] for p in f["profile"] if "mla" in p["op"].lower())
        share[n] = mla / total
        per_token[n] = (1 - share[n]) / f["tokens_per_cpu_s"]
        row(f"prefill {n}: share of latent attention", 100 * share[n], unit="%")
    ratio = max(per_token.values()) / min(per_token.values())
    row("prefill, time a token without it, slowest beside fastest", ratio, "<= 1.15", ratio <= 1.15, "x")


def ppl(args):
    if not args.text:
        return skip("demo model: fast beside exact in nats", "no --text")
    nats = {m: json.loads(run([f"{args.build}/k3", "eval", "ppl", "--text", args.text, "--docs", "8",
                               "--math", m, "--json"]))["mean_nats"] for m in ("exact", "fast")}
    d = abs(nats["fast"] - nats["exact"])
    row("demo model: fast beside exact in nats", d, "<= 0.005", d <= 0.005)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--mid")
    parser.add_argument("--llama-bench")
    parser.add_argument("--gguf", nargs="+")
    parser.add_argument("--text")
    parser.add_argument("--only", default="kda,mxfp4,onednn,first_token,scaling,ppl,llama,flat")
    parser.add_argument("--out")
    args = parser.parse_args()
    start, load = time.monotonic(), os.getloadavg()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=ROOT).stdout.strip()
    print(f"commit {commit or 'unknown'}, load average {load[0]:.2f}; single-thread figures in processor "
          "time")
    for part in args.only.split(","):
        try:
            {"llama": llama, "kda": kda, "mxfp4": mxfp4, "onednn": onednn, "scaling": scaling,
             "first_token": first_token, "flat": flat, "ppl": ppl}[part](args)
        except (RuntimeError, KeyError, FileNotFoundError) as e:
            skip(part, f"{type(e).__name__}: {e}")
    seconds = time.monotonic() - start
    print(f"{seconds:.0f} s, load average {os.getloadavg()[0]:.2f}")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"commit": commit, "load_before": load, "load_after": os.getloadavg(),
                       "seconds": round(seconds), "rows": ROWS}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
