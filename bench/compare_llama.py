#!/usr/bin/env python3
"""Speed beside llama.cpp on the same weights, in turns, in processor time and wall time.

    compare_llama.py --k3 build/release/k3 --model DIR --llama-bench PATH --gguf FILE [FILE ...]
                     [--prefill 256,512] [--decode 32] [--threads 1] [--rounds 3] [--out RESULT.json]

FILE come from tools/export_gguf.py (bf16 and q8_0 trunks); the faster one counts in each figure.
Rounds interleave the programs, so that a change of the machine's load meets both. llama-bench gives
its own wall-clock figures; processor time is read from the operating system around each program, and
loading is taken out by a second run that loads and does next to nothing. Ratios of processor time are
the ones to trust on a shared machine with one thread.
"""
import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time


def run(command, env=None):
    """Standard output, processor seconds and wall seconds of a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"compare_llama: {' '.join(command)}: exit status {done.returncode}: "
                 f"{done.stderr.strip().splitlines()[-1:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, cpu, wall


def llama(args, gguf, prefill, decode):
    """Tokens per processor second and per wall second of one llama-bench figure."""
    repeats = 2
    base = [args.llama_bench, "-m", gguf, "-t", str(args.threads), "-ngl", "0", "-o", "json", "-b",
            "512", "-ub", "512"]
    n = prefill or decode
    shape = ["-p", str(prefill), "-n", str(decode)]
    out, cpu, _ = run(base + shape + ["-r", str(repeats)])
    wall_rate = statistics.median(json.loads(out)[0]["samples_ts"])
    # Loading, warm-up and one repeat less: the difference is one run.
    _, cpu_less, _ = run(base + shape + ["-r", "1"])
    used = (cpu - cpu_less) / (repeats - 1)
    return {"per_cpu_s": n / used if used > 0 else None, "per_wall_s": wall_rate}


def k3(args, math, prefill, decode):
    command = [args.k3, "bench", args.model, "--math", math, "--threads", str(args.threads), "--force",
               "--json", "--repeats", "1", "--prefill", str(prefill or 1), "--decode", str(decode)]
    out, _, _ = run(command)
    phase = "prefill" if prefill else "decode"
    row = next(r for r in json.loads(out)["results"] if r["phase"] == phase)
    return {"per_cpu_s": row["tokens_per_cpu_s"], "per_wall_s": row["tokens_per_s"]}


def commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          cwd=os.path.dirname(os.path.abspath(__file__)))
    return done.stdout.strip() or "unknown"


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"model name\s*:\s*(.*)", file.read())
    return found.group(1) if found else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k3", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--gguf", required=True, nargs="+")
    parser.add_argument("--prefill", default="256,512")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()

    programs = {os.path.basename(g): (lambda p, d, g=g: llama(args, g, p, d)) for g in args.gguf}
    programs["k3 exact"] = lambda p, d: k3(args, "exact", p, d)
    programs["k3 fast"] = lambda p, d: k3(args, "fast", p, d)
    shapes = [("prefill", int(n), 0) for n in args.prefill.split(",") if n] + \
             ([("decode", 0, args.decode)] if args.decode else [])
    result = {"commit": commit(), "cpu": cpu_name(), "threads": args.threads, "rounds": args.rounds,
              "load_before": os.getloadavg(), "figures": []}
    for phase, p, d in shapes:
        samples = {name: [] for name in programs}
        for _ in range(args.rounds):
            for name, once in programs.items():
                samples[name].append(once(p, d))
        row = {"phase": phase, "tokens": p or d}
        for kind in ("per_cpu_s", "per_wall_s"):
            row[kind] = {name: statistics.median(s[kind] for s in taken if s[kind])
                         for name, taken in samples.items()}
            best = max(v for name, v in row[kind].items() if not name.startswith("k3 "))
            row["ratio_" + kind] = {name: row[kind][name] / best for name in ("k3 exact", "k3 fast")}
        result["figures"].append(row)
        print(f"{phase} {p or d}: " + ", ".join(
            f"{name} {v:.1f}" for name, v in row["per_cpu_s"].items()) + " tok per CPU second; k3 fast "
            f"{row['ratio_per_cpu_s']['k3 fast']:.2f}x, exact {row['ratio_per_cpu_s']['k3 exact']:.2f}x")
    result["load_after"] = os.getloadavg()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
