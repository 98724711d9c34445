#!/usr/bin/env python3
"""What serving is worth: many users against one, drafts, shared beginnings, overload.

usage: serve_rows.py K3_PROGRAM [--model DIR] [--math exact|fast] [--rounds N] [--rows a,b] [--out FILE]

Each row runs `k3 bench serve` with and without the thing it is about, in turn, `rounds` times; a
ratio is the median over rounds. Beside the wall clock each ratio is given by the processor time of
the server, which other programs on the machine disturb less.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Decoding is what the users share: short questions, longer answers.
MIX = ["--prompt", "lognormal:24:0.6", "--answer", "uniform:64:128", "--temp", "1"]


class Bench:
    def __init__(self, program, model, math):
        self.program, self.model, self.math = program, model, math

    def serve(self, *args):
        """A server, and its address."""
        process = subprocess.Popen([self.program, "serve", *([self.model] if self.model else []),
                                    "--port", "0", "--math", self.math, *args],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return process, re.search(r"http://[\w.]+:\d+", process.stdout.readline())[0]

    def __call__(self, *args, server="", url=None):
        server = f"--math {self.math} {server}".strip()
        where = ["--url", url] if url else [*([self.model] if self.model else []),
                                            "--server-options", server]
        command = [self.program, "bench", "serve", *where, "--json", "-", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and not done.stdout.startswith("{"):
            raise SystemExit(f"{command}: {done.stderr}")
        report = json.loads(done.stdout)
        report["command"] = " ".join(["k3", *command[1:]])
        return report


def per_cpu(report):
    return report["tokens"]["completion"] / report["server_cpu_s"]


def median_ratio(pairs, figure):
    return statistics.median(figure(a) / figure(b) for a, b in pairs)


def both(pairs, figure):
    """Ratio of a to b by the clock and by processor time."""
    return {"wall": median_ratio(pairs, figure), "cpu": median_ratio(pairs, per_cpu)}


def speed(report):
    """Decode speed of a user: tokens a second after the first."""
    return 1 / report["tpot_s"]["mean"]


def users(bench, rounds):
    pairs = []
    for seed in range(rounds):
        args = [*MIX, "--seed", seed]
        pairs.append((bench("--concurrency", 64, "--ramp", 4, "--requests", 640, *args),
                      bench("--concurrency", 1, "--requests", 10, *args)))
    ttft = [a["ttft_s"] for a, _ in pairs]
    return {"throughput_64_to_1": both(pairs, lambda r: r["throughput"]["tokens_per_s"]),
            "ttft_max_to_median": max(t["max"] / t["p50"] for t in ttft),
            "complete": all(r["requests"]["errors"] == {} for p in pairs for r in p),
            "runs": [r for p in pairs for r in p]}


def overload(bench, rounds):
    """One server: a burst beyond its queue, then a calm hour in small."""
    del rounds
    process, url = bench.serve("--max-running", "8", "--max-waiting", "16")
    try:
        burst = bench("--rate", 200, "--requests", 300, *MIX, url=url)
        calm = bench("--concurrency", 4, "--requests", 16, *MIX, "--seed", 9, url=url)
    finally:
        process.terminate()
        process.wait()
    return {"burst": burst["requests"], "after": calm["requests"],
            "sheds_with_429_only": set(burst["requests"]["errors"]) == {"http 429"},
            "recovers": calm["requests"]["errors"] == {}, "runs": [burst, calm]}


def texts(bench, bodies, server):
    """The answers of a server to these completions, one after the other."""
    process, url = bench.serve(*server)
    try:
        out = []
        for body in bodies:
            request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
            out.append(json.load(urllib.request.urlopen(request, timeout=600)))
        return [o["choices"][0]["text"] for o in out]
    finally:
        process.terminate()
        process.wait()


def drafts(bench, rounds):
    repeated = "The cat sat on the mat, the dog sat on the log, and the bird sang in the tree. "
    result = {"runs": []}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "repeated.txt"
        file.write_text(repeated * 200)
        kinds = {"repetitive": ["--text", file, "--temp", 0],
                 "elsewhere": ["--temp", 1]}
        for name, how in kinds.items():
            pairs = []
            for seed in range(rounds):
                args = ["--concurrency", 1, "--requests", 8, "--prompt", 120, "--answer", 200,
                        "--seed", seed, *how]
                pairs.append((bench(*args), bench(*args, server="--no-speculation")))
            result[f"{name}_speed"] = both(pairs, speed)
            result["runs"] += [r for p in pairs for r in p]
    bodies = [{"prompt": repeated * 4, "max_tokens": 200, "temperature": 0, "ignore_eos": True},
              {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 1, "seed": 3}]
    result["equal_output"] = texts(bench, bodies, []) == texts(bench, bodies, ["--no-speculation"])
    return result


def prefix(bench, rounds):
    pairs = []
    for seed in range(rounds):
        args = ["--concurrency", 1, "--requests", 32, "--prefix-tokens", 2000, "--prompt", 16,
                "--answer", 8, "--seed", seed]
        pairs.append((bench(*args, server="--no-prefix-cache"), bench(*args)))
    return {"ttft_median_without_to_with": median_ratio(pairs, lambda r: r["ttft_s"]["p50"]),
            "runs": [r for p in pairs for r in p]}


ROWS = {"users": users, "overload": overload, "drafts": drafts, "prefix": prefix}


class LoadWatch(threading.Thread):
    """The one-minute load average while the rows run."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen = []

    def run(self):
        while True:
            self.seen.append(os.getloadavg()[0])
            time.sleep(5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--model")
    parser.add_argument("--math", choices=["exact", "fast"], default="exact")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out")
    o = parser.parse_args()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=False).stdout.strip()
    watch = LoadWatch()
    watch.start()
    bench = Bench(o.program, o.model, o.math)
    rows = {}
    for name in o.rows.split(","):
        rows[name] = ROWS[name](bench, o.rounds)
        print(name, {k: v for k, v in rows[name].items() if k != "runs"}, flush=True)
    report = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(),
              "load_average": {"least": min(watch.seen), "most": max(watch.seen)},
              "math": o.math, "rounds": o.rounds, "rows": rows}
    if o.out:
        pathlib.Path(o.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
