#!/usr/bin/env python3
"""Checks who includes whom under src/k3 (the ladder is drawn in ARCHITECTURE.md).

usage: check_layers.py [ROOT]        check a tree, default: the one this script lives in
       check_layers.py --self-test   check that bad sample trees are refused
"""
import pathlib
import re
import sys
import tempfile

# A module may include its own files and those of modules with a smaller number; equal is sideways.
LEVEL = {
    "base": 0, "tensor": 1, "io": 2, "quant": 2, "tokenizer": 2, "chat": 3, "kernels": 3,
    "grammar": 4, "layers": 4, "model": 5, "runtime": 6, "train": 6, "serve": 7, "eval": 7,
}
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")')
CUDA_HEADER = re.compile(r"<(cuda|cublas|cudnn|nccl|curand|cusparse|cooperative_groups|cub/|thrust/|"
                         r"nvtx|mma\.h|driver_types|device_launch)")
SIMD_HEADER = re.compile(r"<([a-z0-9]*mmintrin|immintrin|x86intrin|arm_neon|arm_sve|cpuid)\.h>")
SIMD_ALLOWED = {"<cstddef>", "<cstdint>"}
SLOW_IN_HEADERS = {"<regex>", "<iostream>", "<filesystem>", "<ranges>"}


def includes(path):
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


def check_module_include(module, target, is_test):
    """The complaint about a quoted include in src/k3/<module>, or None."""
    if not target.startswith("k3/"):
        return None if is_test else f'"{target}" is not written as "k3/<module>/<file>.h"'
    parts = target.split("/")
    if len(parts) < 3 or parts[1] not in LEVEL:
        return f'"{target}" names no module of the ladder'
    other = parts[1]
    if other == module or LEVEL[other] < LEVEL[module]:
        return None
    direction = "sideways" if LEVEL[other] == LEVEL[module] else "upward"
    return f'"{target}" goes {direction}: {module} may not include {other}'


def check_system_include(inner, target, name):
    """The complaint about <target> in a file at `inner` (its path below src/k3), or None."""
    if CUDA_HEADER.match(target) and not inner.startswith("kernels/cuda/"):
        return f"{target}: only kernels/cuda includes CUDA headers"
    if SIMD_HEADER.match(target) and not inner.startswith("kernels/cpu/"):
        return f"{target}: only kernels/cpu includes vector headers"
    if ".simd." in name and target not in SIMD_ALLOWED and not SIMD_HEADER.match(target):
        return f"{target}: .simd files include no standard header but <cstddef> and <cstdint>"
    if name.endswith(".h") and target in SLOW_IN_HEADERS:
        return f"{target} is too slow to compile for a header"
    return None


def check_file(path, source_root):
    relative = path.relative_to(source_root)
    module, inner = relative.parts[0], relative.as_posix()
    if len(relative.parts) < 2 or module not in LEVEL:
        yield f"src/k3/{inner}: lies in no module of the ladder"
        return
    is_test = path.name.endswith("_test.cc")
    for number, include in includes(path):
        if include.startswith('"'):
            complaint = check_module_include(module, include.strip('"'), is_test)
        else:
            complaint = check_system_include(inner, include, path.name)
        if complaint:
            yield f"src/k3/{inner}:{number}: {complaint}"


def check_tree(root):
    source_root = pathlib.Path(root) / "src" / "k3"
    files = sorted(p for p in source_root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    complaints = [c for path in files for c in check_file(path, source_root)]
    return len(files), complaints


# (file below src/k3, its one include, words the complaint must have; None: must be accepted)
SAMPLES = [
    ("io/a.cc", '"k3/base/status.h"', None),
    ("io/a.cc", '"k3/io/mapped_file.h"', None),
    ("serve/a.h", '"k3/runtime/session.h"', None),
    ("kernels/cuda/a.cu", "<cuda_runtime.h>", None),
    ("kernels/cpu/a.simd.cc", "<immintrin.h>", None),
    ("kernels/cpu/a.simd.cc", "<cstddef>", None),
    ("io/a_test.cc", '"conformance/cases.h"', None),
    ("base/a.h", '"k3/tensor/view.h"', "upward"),
    ("kernels/ref/a.cc", '"k3/layers/kda.h"', "upward"),
    ("io/a.cc", '"k3/tokenizer/tokenizer.h"', "sideways"),
    ("chat/a.cc", '"k3/tokenizer/tokenizer.h"', None),
    ("chat/a.cc", '"k3/kernels/exec.h"', "sideways"),
    ("grammar/a.cc", '"k3/chat/format.h"', None),
    ("grammar/a.cc", '"k3/layers/kda.h"', "sideways"),
    ("chat/a.cc", '"k3/grammar/grammar.h"', "upward"),
    ("quant/a_test.cc", '"k3/io/checkpoint.h"', "sideways"),
    ("train/a.cc", '"k3/runtime/session.h"', "sideways"),
    ("eval/a.cc", '"k3/serve/http.h"', "sideways"),
    ("io/a.cc", '"mapped_file.h"', "is not written as"),
    ("io/a.cc", '"k3/nowhere/a.h"', "no module"),
    ("nowhere/a.cc", "<vector>", "no module"),
    ("kernels/a.cc", "<cuda_runtime.h>", "only kernels/cuda"),
    ("kernels/cuda_stub/a.cc", "<cublas_v2.h>", "only kernels/cuda"),
    ("layers/a.cc", "<immintrin.h>", "only kernels/cpu"),
    ("kernels/cpu/a.simd.cc", "<vector>", ".simd files"),
    ("io/a.h", "<iostream>", "too slow"),
]


def self_test():
    failures = 0
    for name, include, words in SAMPLES:
        with tempfile.TemporaryDirectory() as root:
            path = pathlib.Path(root, "src", "k3", name)
            path.parent.mkdir(parents=True)
            path.write_text(f"// sample\n#include {include}\n")
            _, complaints = check_tree(root)
        good = not complaints if words is None else any(words in c for c in complaints)
        if not good:
            failures += 1
            print(f"{name} with {include}: expected {words or 'no complaint'}, got {complaints}")
    print(f"check_layers self-test: {len(SAMPLES)} samples, {failures} wrong")
    return 1 if failures else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent
    n_files, complaints = check_tree(root)
    for complaint in complaints:
        print(complaint)
    if n_files == 0:
        print(f"{root}/src/k3: no source files found")
        return 1
    print(f"check_layers: {n_files} files, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
