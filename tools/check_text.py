#!/usr/bin/env python3
"""Checks all tracked text files: no absolute paths of one machine, no notes to self, no two decisions
(docs/adr) of one number.

usage: check_text.py [ROOT]
"""
import pathlib
import re
import subprocess
import sys

# Written with brackets so that this file does not match itself.
RULES = [
    (re.compile(r"(?<![\w.])/wor[k]/"), "a path of one machine"),
    (re.compile(r"(?<![\w.])/roo[t]/"), "a path of one machine"),
    (re.compile(r"(?<![\w.])/hom[e]/\w+/"), "a path of one machine"),
    (re.compile(r"\b(TOD[O]|FIXM[E]|XX[X])\b"), "a note to self: open an issue instead"),
    (re.compile(r"\b(pyp[i]\.org|deb\.debia[n]\.org|npmj[s]\.org)\b"), "a package registry's host"),
    (re.compile(r"^(<{7}|>{7}) "), "a merge conflict"),
]
CODE_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
MAX_LINES = 500
MAX_BYTES = 1 << 20  # larger files are data


def tracked_files(root):
    listing = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True)
    return [root / name for name in listing.stdout.decode().split("\0") if name]


def check_file(path, root):
    raw = path.read_bytes()
    if len(raw) > MAX_BYTES or b"\0" in raw:
        return
    name = path.relative_to(root)
    lines = raw.decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        for pattern, complaint in RULES:
            if pattern.search(line):
                yield f"{name}:{number}: {complaint}: {line.strip()[:80]}"
    made_by_script = "Made by " in "".join(lines[:2])
    if path.suffix in CODE_SUFFIXES and len(lines) > MAX_LINES and not made_by_script:
        yield f"{name}: {len(lines)} lines, at most {MAX_LINES}"


def check_decisions(files, root):
    taken = {}
    for path in sorted(p for p in files if p.parent == root / "docs" / "adr"):
        first = taken.setdefault(path.name[:4], path)
        if first != path:
            yield f"{path.relative_to(root)}: number {path.name[:4]} is also that of {first.name}"


def main(arguments):
    root = pathlib.Path(arguments[0] if arguments else __file__).resolve()
    root = root if root.is_dir() else root.parent.parent
    if not (root / ".git").exists():
        print("SKIP not a git checkout: the list of tracked files is unknown")
        return 77
    files = [p for p in tracked_files(root) if p.is_file() and not p.is_symlink()]
    complaints = [c for path in files for c in check_file(path, root)]
    complaints += check_decisions(files, root)
    for complaint in complaints:
        print(complaint)
    print(f"check_text: {len(files)} files, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
