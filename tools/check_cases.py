#!/usr/bin/env python3
"""Checks tests/cases/COVERAGE.md: every row is there once, and every test it names exists.

usage: check_cases.py [ROOT]        check a tree, default: the one this script lives in
       check_cases.py --self-test   check that bad sample trees are refused

A row is "| ID | what | tests |". IDs: those of the tables "server" and "kv" of tests/cases/README.md,
and S-01 to S-42. The last cell names tests in backticks (Suite.Name of GoogleTest, FILE.py::test of
tests/e2e, both with a * for the end of a name; or "./dev VERB"), or begins with "does not apply:".
"""
import pathlib
import re
import sys
import tempfile

NOTES = [f"S-{i:02}" for i in range(1, 43)]
DOES_NOT_APPLY = "does not apply: "
GTEST = re.compile(r"^TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
VERBS = re.compile(r'^ *([\w |]+)\)\n *"verb_', re.MULTILINE)
PYTEST = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


def wanted_ids(root):
    text = (root / "tests" / "cases" / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^\| ((?:SV|KV)-\d\d) ", text, re.MULTILINE) + NOTES


def known_tests(root):
    """Names of all tests in the sources, and the verbs of ./dev."""
    names = set()
    for folder in ("src", "tests"):
        for path in (root / folder).rglob("*_test.cc"):
            names |= {f"{s}.{n}" for s, n in GTEST.findall(path.read_text(encoding="utf-8"))}
    for path in (root / "tests" / "e2e").glob("test_*.py"):
        names |= {f"{path.name}::{n}" for n in PYTEST.findall(path.read_text(encoding="utf-8"))}
    verbs = VERBS.search((root / "dev").read_text(encoding="utf-8"))
    return names | {f"./dev {verb.strip()}" for verb in verbs[1].split("|")}


def exists(name, known):
    name = re.sub(r"\[.*\]$", "", name)  # the parameters of a pytest
    if name.endswith("*"):
        return any(k.startswith(name[:-1]) for k in known)
    return name in known


def check_row(row, cell, known):
    names = re.findall(r"`([^`]+)`", cell)
    if cell.startswith(DOES_NOT_APPLY):
        if len(cell) < len(DOES_NOT_APPLY) + 10:
            yield f"{row}: does not apply, without a reason"
    elif not names:
        yield f"{row}: names no test"
    for name in names:
        if not exists(name, known):
            yield f"{row}: there is no test {name}"


def check_tree(root):
    known, wanted = known_tests(root), wanted_ids(root)
    seen = []
    for line in (root / "tests" / "cases" / "COVERAGE.md").read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if not re.match(r"\| [A-Z]+-\d", line):
            continue
        if len(cells) != 3:
            yield f"{cells[0]}: {len(cells)} cells, expected 3"
            continue
        seen.append(cells[0])
        yield from check_row(cells[0], cells[2], known)
    for row in wanted:
        if seen.count(row) != 1:
            yield f"{row}: {seen.count(row)} rows, expected 1"
    for row in sorted(set(seen) - set(wanted)):
        yield f"{row}: no such case"


def self_test():
    def complaints(rows):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tests" / "cases").mkdir(parents=True)
            (root / "tests" / "e2e").mkdir()
            (root / "src").mkdir()
            (root / "dev").write_text('  run | soak)\n    "verb_$verb"\n')
            (root / "tests" / "e2e" / "test_a.py").write_text("def test_one(x):\n")
            (root / "src" / "a_test.cc").write_text("TEST_F(Suite, Two) {\n")
            (root / "tests" / "cases" / "README.md").write_text("| SV-01 | x |\n| TK-01 | x |\n")
            notes = [f"| {n} | x | does not apply: no such thing here |" for n in NOTES]
            (root / "tests" / "cases" / "COVERAGE.md").write_text("\n".join(rows + notes))
            return list(check_tree(root))

    good = "`test_a.py::test_one`, `Suite.Two`, `test_a.py::test_o*`, `./dev soak`"
    assert complaints([f"| SV-01 | x | {good} |"]) == []
    for bad in ("", "`Suite.Three`", "`test_a.py::test_two`", "`./dev fly`", "`Suite.X*`", "a test",
                "does not apply: no"):
        assert len(complaints([f"| SV-01 | x | {bad} |"])) == 1, bad
    assert complaints([]) == ["SV-01: 0 rows, expected 1"]
    assert len(complaints([f"| SV-01 | x | {good} |"] * 2)) == 1
    assert len(complaints([f"| SV-01 | x | {good} |", f"| SV-02 | x | {good} |"])) == 1
    print("check_cases: self-test passed")


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = pathlib.Path(arguments[0] if arguments else __file__).resolve()
    root = root if root.is_dir() else root.parent.parent
    found = list(check_tree(root))
    for complaint in found:
        print(complaint)
    print(f"check_cases: {len(wanted_ids(root))} rows, {len(found)} complaints")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
