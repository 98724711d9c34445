"""k3 bench serve: against servers of every kind, and against its own."""

import json
import re
import socket
import threading
import time

import pytest

from conftest import DEMO_MODEL

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(text):
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def usage(n):
    return (b'data: {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": %d}}\n\n' % n)


DONE = b"data: [DONE]\n\n"
GOOD = STREAM + event("a") + event("b") + usage(4) + DONE
# What a server may do, and what it counts as.
ANSWERS = {
    "good": (GOOD, None),
    "no usage": (STREAM + event("a") + DONE, None),
    "keeps alive": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                    + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (event("a"), DONE))
                    + b"0\r\n\r\n", None),
    "slow": (None, None),
    "closes at once": (b"", "cut"),
    "half a head": (b"HTTP/1.1 200 O", "cut"),
    "no http": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "bad http"),
    "endless head": (b"HTTP/1.1 200 OK\r\n" + b"X-A: aaaaaaaaaaaaaaa\r\n" * 8000, "too large"),
    "half a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + event("a"), "cut"),
    "cut stream": (STREAM + event("a") + event("b"), "cut"),
    "wrong json": (STREAM + event("a") + b'data: {"choices": [}\n\n' + DONE, "bad json"),
    "no object": (STREAM + b"data: 17\n\n" + DONE, "bad json"),
    "endless line": (STREAM + b"data: " + b"x" * (2 << 20), "bad json"),
    "error event": (STREAM + event("a") + b'data: {"error": {"message": "x"}}\n\n' + DONE,
                    "error event"),
    "odd shapes": (STREAM + b'data: {"choices": [7], "usage": [1]}\n\ndata: {"choices": {}}\n\n'
                   + b'data: {"usage": {"completion_tokens": -3}}\n\n' + DONE, "no text"),
    "busy": (b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}", "http 429"),
    "server error": (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "http 500"),
    "stalls": (None, "timeout"),
    "stalls in the stream": (STREAM + event("a"), "timeout"),
}


class Hostile:
    """Gives every answer above in turn; /tokenize is unknown."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.lock, self.count, self.open = threading.Lock(), 0, []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                s, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(s,), daemon=True).start()

    def _answer(self, s):
        try:
            data = b""
            while b"\r\n\r\n" not in data:
                data += s.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            left = int(re.search(rb"(?i)content-length: (\d+)", head)[1]) - len(body)
            while left > 0:
                left -= len(s.recv(65536))
            if head.startswith(b"POST /tokenize"):
                s.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            else:
                with self.lock:
                    name = list(ANSWERS)[self.count % len(ANSWERS)]
                    self.count += 1
                if ANSWERS[name][0]:
                    s.sendall(ANSWERS[name][0])
                if name == "slow":
                    self._slow(s)
                if name.startswith("stalls") or name == "keeps alive":
                    self.open.append(s)
                    return
            s.close()
        except OSError:
            s.close()

    @staticmethod
    def _slow(s):
        s.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (event("a"), event("b"), usage(2) + DONE):
            s.sendall(b"%x\r\n%s\r\n" % (len(part), part))
            time.sleep(0.4)
        s.sendall(b"0\r\n\r\n")

    def close(self):
        self.listener.close()
        for s in self.open:
            s.close()


def test_every_failure_is_counted_and_nothing_hangs(k3):
    hostile = Hostile()
    try:
        begin = time.monotonic()
        done = k3("bench", "serve", "--url", f"http://127.0.0.1:{hostile.port}", "--warmup", 0,
                  "--concurrency", len(ANSWERS), "--requests", 2 * len(ANSWERS), "--timeout", 1.5,
                  "--prompt", 8, "--json", "-")
        assert time.monotonic() - begin < 30
    finally:
        hostile.close()
    report = done.json()
    expected = {}
    for _, error in ANSWERS.values():
        if error is not None:
            expected[error] = expected.get(error, 0) + 2
    good = sum(2 for _, error in ANSWERS.values() if error is None)
    assert report["requests"] == {"sent": 2 * len(ANSWERS), "ok": good, "errors": expected}
    assert report["tokens"]["completion"] == 2 * (4 + 1 + 1 + 2)
    assert report["ttft_s"]["count"] == good
    assert report["tpot_s"]["count"] == 4 and report["itl_s"]["count"] == 4
    assert 0.3 < report["itl_s"]["max"] < 1.4  # parts are seen when they come, not at the end
    assert "no /tokenize" in done.stderr


@pytest.mark.parametrize("args,code,message", [
    (["--url", "https://x"], 1, "https is not spoken"),
    (["--url", "ftp://x"], 1, "expected http://"),
    (["--rate", "0"], 2, "--rate"),
    (["--rate", "1", "--concurrency", "2"], 2, "--concurrency"),
    (["--prompt", "uniform:9:3"], 2, "--prompt: found"),
    (["--prefix-share", "0.5"], 2, "common beginning"),
    (["--requests", "0"], 2, "--requests"),
    (["nosuchfolder"], 1, "nosuchfolder"),
])
def test_wrong_usage(k3, args, code, message):
    done = k3("bench", "serve", *args, code=code)
    assert message in done.stderr
    assert done.stdout == ""


def test_nobody_there(k3):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    done = k3("bench", "serve", "--url", f"http://127.0.0.1:{port}", "--requests", 3, code=1)
    assert "refused: 3" in done.stdout and "no request got a complete answer" in done.stderr


def test_a_server_of_its_own(k3, tmp_path):
    done = k3("bench", "serve", DEMO_MODEL, "--requests", 6, "--concurrency", 3, "--prompt",
              "uniform:4:8", "--answer", 5, "--prefix-tokens", 300, "--slo-ttft", 1000,
              "--server-options", "--ctx 1024 --model-name named", "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["requests"] == {"sent": 6, "ok": 6, "errors": {}}
    assert report["tokens"]["completion"] == 30
    assert 6 * 304 <= report["tokens"]["prompt"] <= 6 * 308
    assert report["tokens"]["cached"] >= 256  # the beginning is read once
    assert report["goodput"]["requests"] == 6 and report["server_cpu_s"] > 0
    assert report["workload"]["prefix"] == {"share": 1.0, "tokens": 300, "different": 1}
    assert re.search(r"^TTFT +[\d.]+ +[\d.]+", done.stdout, re.M)
    assert "goodput" in done.stdout
