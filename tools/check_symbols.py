#!/usr/bin/env python3
"""Checks that object files compiled for one instruction set leak nothing to older processors.

A weak function (an inline one of the standard library, or of ours outside k3::cpu::<isa>) may be
merged by the linker with the copies of all other files. If the AVX-512 copy wins, code that was
meant for every processor crashes on an old one. So each weak definition must belong to the ISA's own
namespace.

usage: check_symbols.py OBJECT...
       check_symbols.py --self-test
"""
import os
import re
import subprocess
import sys
import tempfile

WEAK_DEFINED = set("WVu")
OWN_NAMESPACE = re.compile(r"\bk3::cpu::[a-z0-9_]+::")
# Data the compiler refers to by name for exceptions; it holds no code.
HARMLESS = re.compile(r"^DW\.ref\.")


def weak_symbols(path):
    listing = subprocess.run(["nm", "--demangle", "--defined-only", path], check=True,
                             capture_output=True, text=True).stdout
    for line in listing.splitlines():
        fields = line.split(maxsplit=2)
        if len(fields) == 3 and fields[1] in WEAK_DEFINED:
            yield fields[2]


def leaks(path):
    return [s for s in weak_symbols(path) if not OWN_NAMESPACE.search(s) and not HARMLESS.match(s)]


def self_test():
    good = ("namespace k3::cpu::avx2 { inline int Twice(int x) { return 2 * x; }\n"
            "int (*Table())(int) { return Twice; } }\n")
    bad = ("#include <algorithm>\n#include <vector>\nnamespace k3::cpu::avx2 {\n"
           "void Grow(std::vector<int>& v) { v.resize(100); std::sort(v.begin(), v.end()); } }\n")
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name, text in (("good", good), ("bad", bad)):
            source, target = os.path.join(folder, name + ".cc"), os.path.join(folder, name + ".o")
            with open(source, "w", encoding="utf-8") as file:
                file.write(text)
            subprocess.run(["g++", "-std=c++20", "-O1", "-c", source, "-o", target], check=True)
            found.append(leaks(target))
    ok = not found[0] and any("std::" in s for s in found[1])
    print(f"check_symbols self-test: {'ok' if ok else f'wrong: {found}'}")
    return 0 if ok else 1


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if not arguments:
        print("usage: check_symbols.py OBJECT...", file=sys.stderr)
        return 2
    n_leaks = 0
    for path in arguments:
        for symbol in leaks(path):
            n_leaks += 1
            print(f"{path}: weak symbol outside k3::cpu: {symbol}")
    print(f"check_symbols: {len(arguments)} object files, {n_leaks} leaks")
    return 1 if n_leaks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
