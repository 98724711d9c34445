"""Model folders that the end-to-end tests use."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CASES = ROOT / "tests" / "cases"
TINY_MODELS = ["tiny-k3", "tiny-linear"]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The untouched model of tests/cases/checkpoint."""
    out = tmp_path_factory.mktemp("checkpoints")
    subprocess.run([sys.executable, CASES / "checkpoint" / "make_bad_checkpoints.py", out, "--only",
                    "base"], check=True, capture_output=True)
    return out / "base"


def base_rows():
    return json.loads((CASES / "checkpoint" / "base_text.json").read_text())["rows"]


def ids_text(ids):
    return ",".join(map(str, ids))
