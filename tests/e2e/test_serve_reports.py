"""Rows of tests/cases/COVERAGE.md that need a running server and have no test elsewhere."""

import json
import re
import threading

import pytest

from models import base  # noqa: F401 (a fixture)
from serving import Server, message_text, serving

SHORT = {"messages": [{"role": "user", "content": "Say something short."}], "temperature": 0,
         "max_tokens": 12}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(k3_bin, base):
    with serving(k3_bin, base, "--max-running", 3) as s:
        yield s


def test_the_start_line_and_a_gauge_say_how_many_fit(server):
    said = int(re.search(r"up to (\d+) sequences", server.line)[1])
    assert said == 3
    for length in ("short", "context"):
        assert server.metric("k3_sequences_capacity", length=length) == said
    sockets = [server.open({**SHORT, "max_tokens": 3000, "stream": True, "ignore_eos": True})
               for _ in range(5)]
    sockets[0].recv(1)  # it has begun
    waiting = max(server.metric("k3_requests_waiting") for _ in range(20))
    assert waiting >= 1 and server.metric("k3_requests_running") <= said
    for s in sockets:
        s.close()
    assert server.idle(5)


def test_turns_read_only_what_is_new(server):
    """A chat of ten turns, then its last question asked otherwise."""
    b = {**SHORT, "messages": [{"role": "system", "content": "Be brief. " * 30}], "max_tokens": 8,
         "reasoning_effort": "none"}
    new = 0
    for turn in range(10):
        question = f"Question {turn}: what now?"
        b["messages"].append({"role": "user", "content": question})
        reply = server.chat(b).json()
        usage = reply["usage"]
        if turn > 0:
            read = usage["prompt_tokens"] - usage["cached_tokens"]
            assert read <= new + 130, (turn, usage)
        if turn < 9:
            b["messages"].append(reply["choices"][0]["message"])
        new = usage["completion_tokens"] + len(question)
    b["messages"][-1] = {"role": "user", "content": "Another one."}
    other = server.chat(b).json()["usage"]
    assert other["cached_tokens"] >= usage["prompt_tokens"] - len(question) - 130


def test_schema_holds_after_thoughts_with_drafts(server):
    close = 0
    while server.post("/detokenize", {"tokens": [close]}).json()["content"] != "<|close|>":
        close += 1
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"},
                                               "kind": {"enum": ["a", "b"]}},
              "required": ["ok", "kind"], "additionalProperties": False}
    b = {"messages": [{"role": "user", "content": "ok ok ok ok ok"}], "max_tokens": 300,
         "reasoning_effort": "low", "logit_bias": {str(close): 6},
         "response_format": {"type": "json_schema", "json_schema": {
             "name": "x", "strict": True, "schema": schema}}}
    whole = 0
    for seed in range(8):
        choice = server.chat({**b, "seed": seed}).json()["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"ok", "kind"} and isinstance(value["ok"], bool)
        whole += bool(choice["message"].get("reasoning_content"))
    assert whole > 0, "no seed came to an answer after its thoughts"


def test_forced_and_forbidden_tokens(server):
    for more in ({}, {"top_k": 1}, {"temperature": 1, "top_p": 0.1}):
        forced = server.chat({**SHORT, **more, "logit_bias": {"65": 100}}).json()["choices"][0]
        assert set(message_text(forced["message"])) == {"A"}
    for bad in ({"65": 101}, {"65": "x"}, {"99999999": 1}):
        assert server.chat({**SHORT, "logit_bias": bad}).error()["param"] == "logit_bias"


def test_no_request_writes_a_line_of_its_own_into_the_log(k3_bin, base):
    forged = "forged line"
    s = Server(k3_bin, base, "--log-level", "info", "--log-prompts")
    s.chat({**SHORT, "messages": [{"role": "user", "content": f"a\n{forged}\r\n{forged}"}]})
    s.chat(f'{{"a": "\n{forged}\n"}}'.encode())
    s.get(f"/nothing%0a{forged.replace(' ', '%20')}%0d%0a", headers={"X-Request-Id": forged})
    s.raw(f"GET /x HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\x0b{forged}\r\n"
          "Connection: close\r\n\r\n".encode())
    s.close()
    assert s.stderr.count("/nothing") == 1
    assert not any(line.strip().startswith(forged) for line in s.stderr.splitlines()), s.stderr
    assert all(line.isprintable() for line in s.stderr.split("\n")), s.stderr


def test_counters_never_go_back(server):
    def load(stop):
        seed = 0
        while not stop.is_set():
            seed += 1
            server.chat({**SHORT, "n": 1 + seed % 3, "seed": seed})
            s = server.open({**SHORT, "max_tokens": 500, "stream": True})
            s.close()

    stop = threading.Event()
    threads = [threading.Thread(target=load, args=(stop,)) for _ in range(3)]
    for t in threads:
        t.start()
    seen, pages = {}, 0
    try:
        while pages < 60:
            pages += 1
            for line in server.get("/metrics").body.decode().splitlines():
                name, _, value = line.rpartition(" ")
                if line.startswith("#") or not re.search(r"_(total|count|sum|bucket)(\{|$)", name):
                    continue
                assert float(value) >= seen.get(name, 0) >= 0, line
                seen[name] = float(value)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert seen["k3_generated_tokens_total"] > 0
    assert seen["k3_prompt_tokens_cached_total"] <= seen["k3_prompt_tokens_total"]


def test_a_damaged_snapshot_is_counted(k3_bin, base, tmp_path):
    b = {"prompt": "The keeper of the tower wrote one line every night. " * 4, "temperature": 0,
         "max_tokens": 12}
    with serving(k3_bin, base, "--spill-dir", tmp_path) as s:
        expected = s.post("/v1/completions", b).json()["choices"]
    kept = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert kept
    for path in kept:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with serving(k3_bin, base, "--spill-dir", tmp_path) as s:
        reply = s.post("/v1/completions", b).json()
        assert reply["choices"] == expected and reply["usage"]["cached_tokens"] == 0
        assert s.metric("k3_snapshot_events_total", event="damaged") >= 1


def test_a_long_prompt_is_refused_before_any_work(server):
    """Ten times the context: a status with both numbers, before any work."""
    context = int(re.search(r"context (\d+)", server.line)[1])
    error = server.chat({**SHORT, "messages": [{"role": "user", "content": "x " * 5 * context}]}
                        ).error()
    assert error["code"] == "context_length_exceeded"
    numbers = [int(n) for n in re.findall(r"\d+", error["message"])]
    assert context in numbers and max(numbers) > context
    server.alive()


def test_options_that_exclude_each_other(k3, base, tmp_path, demo_model):
    for options in (["--no-prefix-cache", "--spill-dir", tmp_path],
                    ["--no-prefix-cache", "--cache-memory", "1M"],
                    ["--no-prefix-cache", "--state-dir", tmp_path], ["--state-dir-limit", "1M"],
                    ["--no-speculation", "--draft-model", base], ["--spill-memory", "1M"]):
        k3("serve", base, "--port", 0, *options, code=2, timeout=20)
    other = k3("serve", base, "--port", 0, "--draft-model", demo_model, code=1, timeout=20)
    assert "vocabulary" in other.stderr
