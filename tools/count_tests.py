#!/usr/bin/env python3
"""Adds up what the test runs of ./dev reported.

usage: count_tests.py CTEST_JUNIT=RESULTS_DIR... [--check NAME=pass|fail|skip:REASON ...]

CTEST_JUNIT is the file of `ctest --output-junit`; RESULTS_DIR holds NAME.xml for each ctest that is
a GoogleTest or pytest run. Prints failures and skips with their reasons, then the one summary line.
Exits 1 when something failed or nothing ran.
"""
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

Counts = collections.namedtuple("Counts", "passed failed skipped")  # names; skipped: (name, reason)


def case_name(case):
    return f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")


def skip_reason(case):
    element = case.find("skipped")
    message = (element.get("message") or element.text or "") if element is not None else ""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # GoogleTest puts file:line (and a word) before the reason.
    lines = [line for line in lines if not re.fullmatch(r"\S+:\d+(: Skipped)?|Skipped", line)]
    return " ".join(lines)[:200] or "no reason given"


def read_cases(path):
    """Counts of one GoogleTest or pytest JUnit file, or None when it is absent or cut short."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    counts = Counts([], [], [])
    for case in cases:
        if case.get("status") == "notrun" and case.find("skipped") is None:
            continue  # filtered out, or disabled
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed.append(case_name(case))
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            counts.skipped.append((case_name(case), skip_reason(case)))
        else:
            counts.passed.append(case_name(case))
    return counts


def script_skip_reason(output):
    found = re.search(r"^SKIP:?\s*(.*)$", output or "", re.MULTILINE)
    return found.group(1).strip() if found else "no reason given"


def add_ctest_run(junit, results_dir, total):
    try:
        cases = list(ElementTree.parse(junit).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        total.failed.append(f"{junit}: ctest left no readable report")
        return
    for case in cases:
        name, status = case.get("name"), case.get("status")
        inner = read_cases(results_dir / f"{name}.xml")
        if inner:
            total.passed.extend(inner.passed)
            total.failed.extend(f"{name}: {n}" for n in inner.failed)
            total.skipped.extend(inner.skipped)
            if status == "fail" and not inner.failed:
                total.failed.append(f"{name}: ended badly after its last test")
        elif status == "run":
            total.passed.append(name)
        elif status in ("notrun", "disabled") and skipped_by_script(case):
            total.skipped.append((name, script_skip_reason(case.findtext("system-out"))))
        else:
            total.failed.append(f"{name}: {failure_text(case)}{last_lines(case)}")


def skipped_by_script(case):
    element = case.find("skipped")
    return element is not None and "SKIP" in (element.get("message") or "")


def failure_text(case):
    for tag in ("failure", "error", "skipped"):
        element = case.find(tag)
        if element is not None and element.get("message"):
            return element.get("message")
    return "failed"


def last_lines(case, n=8):
    lines = (case.findtext("system-out") or "").rstrip().splitlines()
    return "".join(f"\n     | {line[:160]}" for line in lines[-n:])


def main(arguments):
    total = Counts([], [], [])
    runs = arguments[:arguments.index("--check")] if "--check" in arguments else arguments
    for run in runs:
        junit, _, results_dir = run.partition("=")
        add_ctest_run(junit, pathlib.Path(results_dir), total)
    for check in arguments[len(runs) + 1:]:
        name, _, outcome = check.partition("=")
        if outcome == "pass":
            total.passed.append(name)
        elif outcome.startswith("skip:"):
            total.skipped.append((name, outcome[5:]))
        else:
            total.failed.append(name)
    for name, reason in total.skipped:
        print(f"SKIP {name}: {reason}")
    for name in total.failed:
        print(f"FAIL {name}")
    if not total.passed and not total.failed:
        print("FAIL no test ran")
    print(f"{len(total.passed)} passed, {len(total.failed)} failed, {len(total.skipped)} skipped")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
