"""./dev and the counting of test results: a miscount would hide a failure."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT

GTEST = """<testsuites><testsuite name="A">
<testcase name="Good" status="run" result="completed" classname="A"/>
<testcase name="Off" status="notrun" result="suppressed" classname="A"/>
<testcase name="Skips" status="run" result="skipped" classname="A">
  <skipped message="x/a_test.cc:5&#x0A;no GPU here"/></testcase>
{bad}</testsuite></testsuites>"""
BAD = '<testcase name="Bad" status="run" classname="A"><failure message="1 != 2"/></testcase>'


def ctest(*cases):
    return "<testsuite>" + "".join(cases) + "</testsuite>"


def case(name, status, inner=""):
    return f'<testcase name="{name}" status="{status}">{inner}</testcase>'


def count(tmp_path, junit, files=(), checks=()):
    results = tmp_path / "results"
    results.mkdir()
    for name, text in files:
        (results / name).write_text(text)
    (tmp_path / "ctest.xml").write_text(junit)
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "count_tests.py", f"{tmp_path / 'ctest.xml'}={results}",
         "--check", *checks], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_tests_inside_a_binary_are_counted(tmp_path):
    code, lines = count(tmp_path, ctest(case("u", "run")), [("u.xml", GTEST.format(bad=""))],
                        ["CUDA build=skip:no nvcc", "lint=pass"])
    assert code == 0
    assert lines[-1] == "2 passed, 0 failed, 2 skipped"
    assert "SKIP A.Skips: no GPU here" in lines
    assert "SKIP CUDA build: no nvcc" in lines


def test_a_failure_inside_a_binary_fails(tmp_path):
    code, lines = count(tmp_path, ctest(case("u", "fail")), [("u.xml", GTEST.format(bad=BAD))])
    assert code == 1
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"
    assert "FAIL u: A.Bad" in lines


@pytest.mark.parametrize("report", [GTEST.format(bad=""), "<testsuites><cut sh", None])
def test_a_crash_is_a_failure_whatever_the_report_says(tmp_path, report):
    files = [("u.xml", report)] if report else []
    code, lines = count(tmp_path, ctest(case("u", "fail")), files)
    assert code == 1
    assert ", 1 failed," in lines[-1]


def test_scripts_skip_only_by_their_own_word(tmp_path):
    skip = '<skipped message="SKIP_RETURN_CODE=77"/><system-out>SKIP no .venv</system-out>'
    missing = '<skipped message="Unable to find executable"/>'
    code, lines = count(tmp_path, ctest(case("s", "notrun", skip), case("m", "notrun", missing)))
    assert code == 1
    assert lines[-1] == "0 passed, 1 failed, 1 skipped"
    assert "SKIP s: no .venv" in lines


def test_nothing_ran_is_a_failure(tmp_path):
    code, lines = count(tmp_path, ctest())
    assert (code, lines[-1]) == (1, "0 passed, 0 failed, 0 skipped")


def test_unknown_verb_is_a_usage_error():
    done = subprocess.run([ROOT / "dev", "frobnicate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown verb 'frobnicate'" in done.stderr
    assert subprocess.run([ROOT / "dev", "help"], capture_output=True, check=False).returncode == 0


def gpu_script(*arguments, **environment):
    done = subprocess.run([ROOT / "bench" / "gpu" / "run.sh", *arguments], capture_output=True,
                          text=True, check=False, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments, environment, words", [
    ([], {}, "usage: run.sh PROGRAM"),
    (["a", "b", "c", "d"], {}, "usage: run.sh PROGRAM"),
    (["no/such/program"], {}, "'no/such/program' is no program"),
    (["/bin/true"], {"K3_SANITIZE": "memchek"}, "not memcheck or racecheck"),
    (["/bin/true"], {"K3_EXAMPLES": "no/such/folder"}, "no kda_example in 'no/such/folder'"),
])
def test_the_gpu_script_says_what_it_misses(arguments, environment, words):
    code, out, err = gpu_script(*arguments, **environment)
    assert (code, out) == (2, "")
    assert err.startswith("run.sh: ") and words in err and err.count("\n") == 1


def test_the_gpu_script_hands_on_file_commit_and_status(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho \"$@\"\nexit 77\n")
    program.chmod(0o755)
    code, out, _ = gpu_script(str(program), "out.json", "abc", K3_MODE="hostile")
    assert code == 77
    assert out.startswith("hostile --commit abc --json out.json")
