"""tools/chat_bodies.py: finds texts in an encoder's source by length and hash, and runs nothing."""

import hashlib
import importlib.util
import subprocess
import sys

import pytest

from models import ROOT

TOOL = ROOT / "tools" / "chat_bodies.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("chat_bodies", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(text, value):
    raw = text.encode()
    return value, len(raw), hashlib.sha256(raw).hexdigest()[:16]


def test_finds_constants_and_filled_strings(tool):
    known = {"plain": [check("Say no.", None)],
             "filled": [check("Level low!", "low"), check("Level max!", "max")],
             "stripped": [check("Edge.", None)], "joined": [check("ab[]cd", "[]")],
             "absent": [check("Nowhere.", None)]}
    source = ('raise SystemExit("never run")\nA = "Say " "no."\n'
              'def f(x, y):\n  return f"Level {x}!", "Edge.\\n", "ab" + y + "cd", "Nowhere"\n')
    assert tool.find([source], known) == {"plain": "Say no.", "filled": "Level {}!",
                                          "stripped": "Edge.", "joined": "ab{}cd"}


def test_knows_all_texts_that_the_program_reads(tool):
    header = (ROOT / "src" / "k3" / "chat" / "format.h").read_text()
    assert all(f"std::string {name};" in header for name in tool.KNOWN)
    assert len(tool.KNOWN) == 7


def test_says_what_is_missing_and_writes_nothing(tmp_path):
    for source in ("x = 1\n", "not python (", None):
        if source is not None:
            (tmp_path / "encoder.py").write_text(source)
        done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 1 and done.stderr.startswith("chat_bodies: ")
    assert not (tmp_path / "chat_bodies.json").exists()
    assert subprocess.run([sys.executable, TOOL], capture_output=True, check=False).returncode == 2
