#!/usr/bin/env python3
"""How a plan's balance moves from step to step, from the balance.csv of its runs.

usage: balance_steps.py RUNS_FOLDER [--after STEP]

jitter    standard deviation of the change from step to step after STEP, of the largest MaxVio of a
          layer, and of its widest bias range; mean over the seeds
maxvio    mean MaxVio of the worst layer after STEP
settles   steps from the peak of the worst layer's MaxVio to the first five whose mean is below
          0.5, by seed
"""

import argparse
import csv
import pathlib
import statistics as st


def worst(path, figure):
    by_step = {}
    for row in csv.DictReader(path.open()):
        step = int(row["step"])
        by_step[step] = max(by_step.get(step, 0.0), figure(row))
    return [by_step[s] for s in sorted(by_step)]


def jitter(values):
    return st.pstdev(b - a for a, b in zip(values, values[1:]))


def settles(values):
    peak = values.index(max(values))
    for i in range(peak, len(values) - 4):
        if st.mean(values[i:i + 5]) < 0.5:
            return i - peak
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--after", type=int, default=60)
    o = parser.parse_args()
    print(f"{'arm':16} {'jitter':>7} {'of bias':>8} {'maxvio':>7}  settles")
    for arm in sorted(p for p in o.runs.iterdir() if p.is_dir()):
        files = sorted(arm.glob("seed-*/balance.csv"))
        loads = [worst(f, lambda r: float(r["max_violation"])) for f in files]
        ranges = [worst(f, lambda r: float(r["bias_max"]) - float(r["bias_min"])) for f in files]
        print(f"{arm.name:16} {st.mean(jitter(v[o.after:]) for v in loads):7.2f} "
              f"{st.mean(jitter(v[o.after:]) for v in ranges):8.4f} "
              f"{st.mean(st.mean(v[o.after:]) for v in loads):7.2f}  {[settles(v) for v in loads]}")


if __name__ == "__main__":
    main()
