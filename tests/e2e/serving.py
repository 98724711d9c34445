"""A running `k3 serve` and a plain HTTP client for it."""

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body.decode("utf-8"))

    def error(self):
        """The error object, after checking its shape."""
        assert self.headers["content-type"] == "application/json", self
        error = self.json()["error"]
        assert isinstance(error["message"], str) and isinstance(error["type"], str), self
        assert error["param"] is None or isinstance(error["param"], str), self
        assert "code" in error, self
        return error

    def __repr__(self):
        return f"{self.status} {self.headers} {self.body[:2000]!r}"


class Server:
    """Starts the program and waits until it says that it serves."""

    def __init__(self, program, model, *args, env=None, wait=60):
        command = [program, "serve", str(model), "--port", "0", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, env={**os.environ, **(env or {})})
        self.stderr = ""
        lines = queue.Queue()
        self.readers = [threading.Thread(target=self._read_stderr, daemon=True),
                        threading.Thread(target=self._read_stdout, args=(lines,), daemon=True)]
        for reader in self.readers:
            reader.start()
        try:
            self.line = lines.get(timeout=wait)
        except queue.Empty:
            self.line = None
        if self.line is None:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not start: {self.stderr}")
        found = re.search(r"http://([\w.]+):(\d+)", self.line)
        self.host, self.port = found[1], int(found[2])
        self.url = found[0]
        self.model = self.get("/v1/models").json()["data"][0]["id"] if not args or \
            "--api-key" not in args else None

    def _read_stderr(self):
        for line in self.process.stderr:
            self.stderr += line

    def _read_stdout(self, lines):
        lines.put(self.process.stdout.readline() or None)
        self.process.stdout.read()

    def request(self, method, path, body=None, headers=None, timeout=60):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            if isinstance(body, (dict, list)):
                body = json.dumps(body).encode()
            connection.request(method, path, body, {"Content-Type": "application/json",
                                                    **(headers or {})})
            r = connection.getresponse()
            return Reply(r.status, {k.lower(): v for k, v in r.getheaders()}, r.read())
        finally:
            connection.close()

    def get(self, path, **kwargs):
        return self.request("GET", path, **kwargs)

    def post(self, path, body, **kwargs):
        return self.request("POST", path, body, **kwargs)

    def chat(self, body, **kwargs):
        return self.post("/v1/chat/completions", body, **kwargs)

    def text(self, body):
        """Reasoning and answer of the first choice."""
        reply = self.chat({**body, "stream": False})
        assert reply.status == 200, reply
        return message_text(reply.json()["choices"][0]["message"])

    def stream(self, path, body):
        """The events of a streamed answer, [DONE] included as that text."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status == 200, reply
        assert reply.headers["content-type"].startswith("text/event-stream")
        return events_of(reply.body)

    def streamed_text(self, body):
        return joined(self.stream("/v1/chat/completions", body))

    def open(self, body, path="/v1/chat/completions"):
        """A socket on which a request has been sent."""
        s = socket.create_connection((self.host, self.port), timeout=30)
        data = json.dumps(body).encode()
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                  f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return s

    def raw(self, data, wait=10):
        """Sends bytes, closes nothing, reads until the server closes or `wait` seconds pass."""
        with socket.create_connection((self.host, self.port), timeout=wait) as s:
            with contextlib.suppress(ConnectionError):
                s.sendall(data)
            got = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                while chunk := s.recv(65536):
                    got += chunk
            return got

    def metric(self, name, **labels):
        """The value of a metric, 0 when it is not on the page."""
        wanted = ",".join(f'{k}="{v}"' for k, v in labels.items())
        full = f"{name}{{{wanted}}}" if wanted else name
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(full + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def idle(self, seconds=10):
        """Waits until no request is running or waiting."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.metric("k3_requests_running") + self.metric("k3_requests_waiting") == 0:
                return True
            time.sleep(0.01)
        return False

    def alive(self):
        assert self.process.poll() is None, self.stderr
        assert self.get("/health").status == 200
        reply = self.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
        assert reply.status == 200, reply

    def stop(self, wait=20):
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(wait)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        for reader in self.readers:
            reader.join(5)
        return code

    def close(self):
        if self.process.poll() is None:
            code = self.stop()
            assert code == 0, (code, self.stderr)


def events_of(body):
    out = []
    for block in body.decode("utf-8").split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                text = line[len("data: "):]
                out.append(text if text == "[DONE]" else json.loads(text))
    return out


def message_text(message):
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def joined(events, index=0):
    """Reasoning, then answer, of a streamed chat."""
    reasoning = content = ""
    for event in events:
        if event == "[DONE]":
            continue
        for choice in event["choices"]:
            if choice["index"] == index:
                reasoning += choice["delta"].get("reasoning_content") or ""
                content += choice["delta"].get("content") or ""
    return reasoning + content


@contextlib.contextmanager
def serving(program, model, *args, **kwargs):
    server = Server(program, model, *args, **kwargs)
    try:
        yield server
    finally:
        server.close()
