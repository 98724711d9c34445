"""Fixtures of the end-to-end tests: the program as its users meet it."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "models" / "k3-books-27m"
TIMEOUT_S = 120


class Finished:
    """One finished run. stdout and stderr are text; raw_stdout is the exact bytes."""

    def __init__(self, command, done):
        self.command = command
        self.exit_code = done.returncode
        self.raw_stdout = done.stdout
        self.stdout = done.stdout.decode("utf-8", errors="replace")
        self.stderr = done.stderr.decode("utf-8", errors="replace")

    def json(self):
        return json.loads(self.stdout)

    def __repr__(self):
        return (f"{self.command} -> exit {self.exit_code}\n--- stdout\n{self.stdout[-2000:]}"
                f"\n--- stderr\n{self.stderr[-2000:]}")


@pytest.fixture(scope="session")
def k3_bin():
    path = os.environ.get("K3_BIN", str(ROOT / "build" / "release" / "k3"))
    if not os.access(path, os.X_OK):
        pytest.skip(f"{path} is not built")
    return path


@pytest.fixture
def k3(k3_bin):
    """k3(*args, stdin=None, env=None, timeout=..., code=0, before=None): runs the program and returns
    Finished. `before` is called in the new process.

    Fails the test when the exit status is not `code` (None accepts any). A run killed by a signal
    fails always: no input may crash the program.
    """

    def run(*args, stdin=None, env=None, timeout=TIMEOUT_S, code=0, cwd=None, before=None):
        command = [k3_bin, *map(str, args)]
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(command, input=data if data is not None else b"", capture_output=True,
                              timeout=timeout, env={**os.environ, **(env or {})}, cwd=cwd,
                              check=False, preexec_fn=before)
        result = Finished(command, done)
        assert result.exit_code >= 0, f"killed by signal {-result.exit_code}: {result!r}"
        assert code is None or result.exit_code == code, f"wanted exit {code}: {result!r}"
        return result

    return run


@pytest.fixture
def demo_model():
    return DEMO_MODEL


@pytest.fixture
def model_copy(tmp_path):
    """model_copy(source=DEMO_MODEL): a writable copy of a model folder, to be damaged at will."""

    def copy(source=DEMO_MODEL, name="model"):
        target = tmp_path / name
        shutil.copytree(source, target)
        for path in [target, *target.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
        return target

    return copy


@pytest.fixture
def edit_json():
    """edit_json(path, change): loads a JSON file, calls change(value), writes it back."""

    def edit(path, change):
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        change(value)
        pathlib.Path(path).write_text(json.dumps(value), encoding="utf-8")

    return edit
