#!/usr/bin/env python3
"""Prints the biggest files, the longest functions and the slowest compiles.

usage: size_report.py ROOT [NINJA_LOG]
"""
import pathlib
import re
import sys

SHOWN = 12
STARTS = re.compile(r"^[A-Za-z_].*\(")
NOT_FUNCTIONS = re.compile(r"^(namespace|class|struct|enum|union|using|typedef|extern)\b")


def functions(lines):
    """(first line, length, text) of functions that start and end in column 0, as we format them."""
    start = None
    for number, line in enumerate(lines, 1):
        if start is None and STARTS.match(line) and not NOT_FUNCTIONS.match(line):
            start = number
        elif start is not None and line.startswith("}"):
            yield start, number - start + 1, lines[start - 1].strip()
            start = None
        if start is not None and line.rstrip().endswith(";") and not line.startswith((" ", "}")):
            start = None  # a declaration


def compiles(ninja_log):
    seconds = {}
    for line in ninja_log.read_text().splitlines()[1:]:
        fields = line.split("\t")
        if len(fields) >= 4 and fields[3].endswith(".o"):
            seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return sorted(((s, name) for name, s in seconds.items()), reverse=True)


def main(arguments):
    root = pathlib.Path(arguments[0])
    files, longest = [], []
    for folder in ("src", "apps", "tests", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu", ".cuh"):
                lines = path.read_text(encoding="utf-8").splitlines()
                name = path.relative_to(root)
                files.append((len(lines), name))
                longest += [(n, f"{name}:{at}  {text[:60]}") for at, n, text in functions(lines)]
    print(f"{len(files)} files, {sum(n for n, _ in files)} lines\n\nbiggest files (500 asks why):")
    for n, name in sorted(files, key=lambda f: -f[0])[:SHOWN]:
        print(f"  {n:5d}  {name}")
    print("\nlongest functions (60 asks why, kernels 150):")
    for n, text in sorted(longest, key=lambda f: -f[0])[:SHOWN]:
        print(f"  {n:5d}  {text}")
    if len(arguments) > 1 and pathlib.Path(arguments[1]).is_file():
        print("\nslowest compiles, seconds (as of their last run; ccache hits are short):")
        for seconds, name in compiles(pathlib.Path(arguments[1]))[:SHOWN]:
            print(f"  {seconds:5.1f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
