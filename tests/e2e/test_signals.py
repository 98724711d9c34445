"""CL-07 and the memory map half of CL-05: Ctrl-C on a terminal, and a shard that shrinks."""

import json
import os
import pty
import signal
import subprocess
import termios
import time

import pytest

from models import base  # noqa: F401 (a fixture)


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self, *command):
        self.master, slave = pty.openpty()
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(list(map(str, command)), stdin=slave, stdout=slave,
                                        stderr=slave, start_new_session=True,
                                        preexec_fn=lambda: __import__("fcntl").ioctl(
                                            0, termios.TIOCSCTTY, 0))
        self.text = b""

    def read_some(self, at_least, timeout=20):
        deadline = time.time() + timeout
        os.set_blocking(self.master, False)
        while len(self.text) < at_least and time.time() < deadline:
            try:
                self.text += os.read(self.master, 4096)
            except (BlockingIOError, OSError):
                time.sleep(0.01)
        assert len(self.text) >= at_least, self.text

    def press_ctrl_c(self):
        os.write(self.master, b"\x03")

    def finish(self, timeout=10):
        """Waits while emptying the terminal, which holds only a few kilobytes."""
        deadline = time.time() + timeout
        while self.process.poll() is None and time.time() < deadline:
            self._drain()
            time.sleep(0.01)
        code = self.process.poll()
        if code is None:
            self.process.kill()
        self._drain()
        after = termios.tcgetattr(self.slave)
        os.close(self.slave)
        os.close(self.master)
        assert code is not None, "still running"
        assert after == self.before, "terminal settings changed"
        return code

    def _drain(self):
        try:
            self.text += os.read(self.master, 4096)
        except (BlockingIOError, OSError):
            pass


@pytest.fixture
def roomy(base, model_copy, edit_json):
    """The base model with a context that is not filled while a test runs."""
    folder = model_copy(base, "roomy")
    edit_json(folder / "config.json",
              lambda c: c["text_config"].update(max_position_embeddings=1 << 20))
    return folder


def endless(model):
    return ["run", str(model), "-p", "hi", "-n", "1000000", "--temp", "0", "--logit-bias",
            "65=100"]


def test_cl07_ctrl_c_keeps_the_text_and_ends_with_130(k3_bin, roomy):
    terminal = Terminal(k3_bin, *endless(roomy))
    terminal.read_some(20)
    terminal.press_ctrl_c()
    assert terminal.finish() == 130
    text = terminal.text.replace(b"^C", b"")
    assert text.startswith(b"A" * 20)
    assert text.rstrip(b"\r\n").strip(b"A") == b"", "text and nothing else, no error message"
    assert text.endswith(b"\r\n"), "the shell's prompt starts on a new line"


def test_cl07_ctrl_c_twice_ends_at_once(k3_bin, roomy):
    terminal = Terminal(k3_bin, *endless(roomy))
    terminal.read_some(5)
    terminal.press_ctrl_c()
    terminal.press_ctrl_c()
    assert terminal.finish(5) == 130


def test_interrupted_json_is_whole(k3_bin, roomy):
    process = subprocess.Popen([k3_bin, *endless(roomy), "--json"], stdout=subprocess.PIPE)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    result = json.loads(out)
    assert result["finish_reason"] == "cancelled" and result["text"] == "A" * len(result["ids"])


def test_ctrl_c_while_waiting_for_standard_input(k3_bin, roomy):
    process = subprocess.Popen([k3_bin, "run", str(roomy)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130


def test_cl05_a_shard_that_shrinks_is_named(k3_bin, roomy):
    shard = roomy / "model-00002-of-00002.safetensors"
    process = subprocess.Popen([k3_bin, *endless(roomy), "--weights", "map"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    os.truncate(shard, 4096)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, process.returncode
    assert str(shard).encode() in err


def test_copied_weights_do_not_need_their_files(k3_bin, roomy):
    process = subprocess.Popen([k3_bin, *endless(roomy), "--weights", "copy"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    os.truncate(roomy / "model-00002-of-00002.safetensors", 4096)
    process.stdout.read(50)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130, process.returncode


def test_one_long_pass_ends_at_the_first_ctrl_c(k3_bin, roomy, tmp_path):
    """Reading a prompt and scoring a document look for Ctrl-C inside a pass, and say nothing."""
    text = tmp_path / "text"
    text.write_bytes(b"ab " * 20000)
    for command in (["run", str(roomy), "--ids", ",".join(["5"] * 30000), "--prefill-chunk",
                     "1048576"],
                    ["eval", str(roomy), "ppl", "--text", str(text), "--tokens", "60000"]):
        process = subprocess.Popen([k3_bin, *command], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        time.sleep(1)
        assert process.poll() is None, "too short to interrupt"
        process.send_signal(signal.SIGINT)
        try:
            out = process.communicate(timeout=10)
        finally:
            process.kill()
        assert (process.returncode, out) == (130, (b"", b""))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_long_trace_ends_at_the_first_signal(k3_bin, roomy, tmp_path, number):
    out = tmp_path / "t" / "out"
    out.parent.mkdir()
    process = subprocess.Popen([k3_bin, "trace", str(roomy), "--ids", ",".join(["5"] * 30000),
                                "--out", str(out)], stderr=subprocess.PIPE)
    time.sleep(1)
    assert process.poll() is None, "too short to interrupt"
    process.send_signal(number)
    try:
        process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert list(out.parent.iterdir()) == []
