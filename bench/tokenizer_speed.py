#!/usr/bin/env python3
"""Encoding speed beside tiktoken: same text, same ranks, one thread, runs taken in turn.

    .venv/bin/python bench/tokenizer_speed.py RANKS TEXT [--build build/release] [--rounds 9]

Needs the k3_encode helper of that build (tests/tools). Prints the median and best MB/s of each. The
figure of tiktoken includes making a numpy array of the ids, not a Python list.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/e2e"))
import tokenizer_oracle as oracle  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ranks")
    parser.add_argument("text")
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    start = time.perf_counter()
    enc = oracle.encoding(oracle.load_ranks(args.ranks))
    their_load = time.perf_counter() - start
    text = pathlib.Path(args.text).read_text(encoding="utf-8")
    megabytes = len(text.encode()) / 1e6
    ours, theirs, loads = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            f"{args.build}/tests/tools/k3_encode",
            args.ranks,
            args.text,
            f"{folder}/ids",
            "3",
        ]
        for _ in range(args.rounds):
            done = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            ours.append(megabytes / done["encode_s"])
            loads.append(done["load_s"])
            best = min(timed(enc, text) for _ in range(3))
            theirs.append(megabytes / best)
    print(
        f"{megabytes:.2f} MB, {done['ids']} ids, {args.rounds} rounds of the best of 3, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"k3        median {statistics.median(ours):6.1f} MB/s  best {max(ours):6.1f}  "
        f"loading {statistics.median(loads) * 1e3:.0f} ms"
    )
    print(
        f"tiktoken  median {statistics.median(theirs):6.1f} MB/s  best {max(theirs):6.1f}  "
        f"loading {their_load * 1e3:.0f} ms"
    )
    print(f"ratio of medians {statistics.median(ours) / statistics.median(theirs):.2f}")


def timed(enc, text):
    start = time.perf_counter()
    enc.encode_to_numpy(text, disallowed_special=())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
