#!/usr/bin/env python3
"""Latent against full-width experts as one table: microseconds a token, and their ratio.

    latent_table.py --build build/release [--out RESULT.json]
"""
import argparse
import json
import re
import subprocess


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--out")
    args = parser.parse_args()
    out = subprocess.run([f"{args.build}/bench/k3_microbench", "--benchmark_filter=BM_latent",
                          "--benchmark_min_time=0.05", "--benchmark_format=json"], check=True,
                         capture_output=True, text=True).stdout
    us = {}
    for b in json.loads(out)["benchmarks"]:
        experts, latent, tokens = (int(n) for n in re.findall(r":(\d+)", b["name"]))
        us[experts, latent, tokens] = b["us/token"]
    widths = sorted({k[1] for k in us})
    full = widths.pop()
    print("| experts | tokens | full width, us a token | "
          + " | ".join(f"latent {w}, share of it" for w in widths) + " |")
    print("|" + "---|" * (3 + len(widths)))
    for experts, tokens in sorted({(k[0], k[2]) for k in us}):
        base = us[experts, full, tokens]
        print(f"| {experts} | {tokens} | {base:.1f} | "
              + " | ".join(f"{us[experts, w, tokens] / base:.2f}" for w in widths) + " |")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump([{"experts": e, "latent": w, "tokens": t, "us_per_token": v}
                       for (e, w, t), v in sorted(us.items())], file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
