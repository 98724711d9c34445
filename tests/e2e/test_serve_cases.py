"""Rows SV, KV and NM-12 of tests/cases against the running server."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from models import CASES, base  # noqa: F401 (a fixture)
from serving import Server, joined, serving

SERVER = CASES / "server"
STATUS = json.loads((SERVER / "status.json").read_text())
SHORT = {"messages": [{"role": "user", "content": "Say something short."}], "temperature": 0,
         "max_tokens": 24}


def body(name):
    return json.loads((SERVER / "bodies" / name).read_text())


def case(name):
    return json.loads((CASES / "kv" / name).read_text())


@pytest.fixture(scope="module")
def server(k3_bin, base):
    with serving(k3_bin, base) as s:
        yield s


@pytest.fixture(scope="module")
def cold(k3_bin, base):
    """Keeps nothing between requests and guesses nothing: the judge of what the other one says."""
    with serving(k3_bin, base, "--no-prefix-cache", "--no-speculation") as s:
        yield s


@pytest.mark.parametrize("row", STATUS["rows"], ids=lambda row: row["file"])
def test_status_rows(server, row):
    reply = server.post(STATUS["path"], (SERVER / row["file"]).read_bytes())
    assert reply.status in row["status"], reply
    if reply.status != 200:
        param = reply.error()["param"]
        if row["param"]:
            assert (param or "").startswith(row["param"]), reply
    server.alive()


def test_sv03_null_content_is_like_an_empty_one(server):
    with_null = body("sv03_null_content.json")
    with_empty = body("sv03_null_content.json")
    with_empty["messages"][1]["content"] = ""
    prompts = [server.post("/apply-template", b).json()["prompt"] for b in (with_null, with_empty)]
    assert prompts[0] == prompts[1]


def test_sv04_no_messages_and_stream_gives_a_status(server):
    reply = server.chat({"messages": [], "stream": True})
    assert reply.status == 400 and reply.error()["param"] == "messages"


def test_sv05_max_completion_tokens(server):
    b = body("sv05_max_completion_tokens.json")
    j = server.chat(b).json()
    assert j["usage"]["completion_tokens"] == 7 and j["choices"][0]["finish_reason"] == "length"
    newer_wins = server.chat({**b, "max_tokens": 3}).json()
    assert newer_wins["usage"]["completion_tokens"] == 7
    assert server.chat({**b, "max_completion_tokens": None, "max_tokens": 3}).json()["usage"][
        "completion_tokens"] == 3
    for bad in (0, -1, 1e20, "5", 1.5, True, []):
        assert server.chat({**b, "max_completion_tokens": bad}).status == 400, bad


def test_sv06_usage_of_a_stream(server):
    events = server.stream(STATUS["path"], body("sv06_stream_usage.json"))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] > 0
    assert all(e["usage"] is None for e in events[:-2])
    b = body("sv06_stream_usage.json")
    del b["stream_options"]
    assert all("usage" not in e or e["usage"] is None
               for e in server.stream(STATUS["path"], b)[:-1])


def test_sv08_logit_bias_keys(server):
    for key in ("999999999", "-3", "x", "1.0", ""):
        reply = server.chat({**SHORT, "logit_bias": {key: 1}})
        assert reply.status == 400 and key in reply.error()["message"], reply
    assert server.chat({**SHORT, "logit_bias": {}}).status == 200
    banned = server.chat({**SHORT, "logprobs": True, "max_tokens": 1}).json()
    first = banned["choices"][0]["logprobs"]["content"][0]["bytes"]
    token = server.post("/tokenize", {"content": bytes(first).decode()}).json()["tokens"][0]
    again = server.chat({**SHORT, "logprobs": True, "max_tokens": 1,
                         "logit_bias": {str(token): -100}}).json()
    assert again["choices"][0]["logprobs"]["content"][0]["bytes"] != first


def test_sv09_tiny_temperatures_are_greedy(server):
    texts = {server.text(b) for b in body("sv09_temperature.json")["requests"]}
    assert len(texts) == 1 and texts != {""}


def test_sv10_stop_text_across_tokens(server):
    b = body("sv10_stop.json")
    whole = server.text(b)
    stop = whole[3:9]
    expected = whole[:whole.index(stop)]
    for value in (stop, [stop]):
        reply = server.chat({**b, "stop": value})
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        assert server.text({**b, "stop": value}) == expected
        events = server.stream(STATUS["path"], {**b, "stop": value})
        assert joined(events) == expected
        assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_sv11_schema_cycle_is_quick(server):
    start = time.monotonic()
    server.chat(body("sv11_schema_cycle.json"))
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("when", ["reading", "three deltas", "not streamed"])
def test_sv12_closed_connections_free_their_place(server, when):
    b = body("sv12_long.json")
    before = server.metric("k3_requests_total", outcome="cancelled")
    if when == "not streamed":
        b["stream"] = False
    s = server.open(b)
    if when == "three deltas":
        seen = b""
        while seen.count(b"data: ") < 3:
            seen += s.recv(4096)
    elif when == "not streamed":
        time.sleep(0.05)
    s.close()
    start = time.monotonic()
    assert server.chat({**SHORT, "max_tokens": 1}).status == 200
    assert time.monotonic() - start < 2
    assert server.idle(2)
    assert server.metric("k3_requests_total", outcome="cancelled") == before + 1


def test_sv15_cors(k3_bin, base, server):
    ask = {"Origin": "http://page.example",
           "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization, content-type"}
    for reply in (server.request("OPTIONS", STATUS["path"], headers=ask),
                  server.request("GET", "/nothing", headers=ask), server.chat(SHORT, headers=ask)):
        assert "access-control-allow-origin" not in reply.headers
    with serving(k3_bin, base, "--cors", "*", "--api-key", "k") as s:
        reply = s.request("OPTIONS", STATUS["path"], headers=ask)
        assert reply.status in (200, 204)
        assert reply.headers["access-control-allow-origin"] == "*"
        allowed = reply.headers["access-control-allow-headers"].lower()
        assert "authorization" in allowed and "content-type" in allowed
        assert "POST" in reply.headers["access-control-allow-methods"]
        refused = s.chat(SHORT, headers=ask)
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "*"


def test_sv16_no_request_names_a_file(server):
    """Without --state-dir nothing is saved, and the answer says how to change that."""
    for name in json.loads((SERVER / "slot_names.json").read_text())["names"]:
        for action in ("save", "restore"):
            reply = server.post(f"/slots/0?action={action}", {"filename": name})
            assert reply.status == 404 and "--state-dir" in reply.error()["message"]
    for path in ("/../../etc/passwd", "/v1/models/../../etc/passwd", "/%2e%2e/x", "//etc/passwd"):
        assert server.get(path).status == 404
    assert not os.path.exists("/tmp/out.bin")


def test_sv17_choices_differ_and_repeat(server):
    b = body("sv17_n3.json")
    replies = [[c["message"] for c in server.chat(b).json()["choices"]] for _ in range(2)]
    assert len(replies[0]) == 3 and replies[0] == replies[1]
    assert len({json.dumps(m) for m in replies[0]}) > 1
    indices = [c["index"] for c in server.chat(b).json()["choices"]]
    assert indices == [0, 1, 2]
    streamed = server.stream(STATUS["path"], b)
    for i in range(3):
        m = replies[0][i]
        assert joined(streamed, i) == (m.get("reasoning_content") or "") + (m["content"] or "")
    for n in (0, 100000):
        assert server.chat({**b, "n": n}).error()["param"] == "n"


def test_sv18_without_a_seed_replies_differ(server):
    assert len({server.text(body("sv18_no_seed.json")) for _ in range(4)}) > 1


def test_sv19_prompts(server):
    for row in json.loads((SERVER / "xtml_prompts.json").read_text())["rows"]:
        b = {"messages": row["messages"]}
        if row.get("reasoning") == "off":
            b["reasoning_effort"] = "none"
        assert server.post("/apply-template", b).json()["prompt"] == row["text"]


def test_sv20_stops_that_change_nothing(server):
    plain = server.text(SHORT)
    for value in (None, [], ["a1", "b2", "c3", "d4", "e5"]):
        assert server.text({**SHORT, "stop": value}) == plain
        assert server.streamed_text({**SHORT, "stop": value}) == plain
    for value in ("", ["", "zzz"], 7, [7]):
        for stream in (False, True):
            assert server.chat({**SHORT, "stop": value, "stream": stream}).status == 400


def test_sv21_results_follow_their_calls(server):
    prompt = server.post("/apply-template", body("sv21_tool_order.json")).json()["prompt"]
    assert prompt.index("from alpha") < prompt.index("from beta")
    unknown = body("sv21_tool_order.json")
    unknown["messages"][2]["tool_call_id"] = "c9"
    assert server.chat(unknown).error()["param"] == "messages[2].tool_call_id"


def test_sv22_effort(server):
    assert server.chat({**SHORT, "reasoning_effort": "none"}).status == 200
    prompt = server.post("/apply-template", {**SHORT, "reasoning_effort": "none"}).json()["prompt"]
    assert prompt.endswith("<|open|>response<|sep|>")
    message = server.chat({**SHORT, "reasoning_effort": "huge"}).error()["message"]
    assert all(word in message for word in ("low", "medium", "high", "max", "none"))


def test_sv23_text_parts_are_joined(server):
    parts = server.post("/apply-template", body("sv23_text_parts.json")).json()["prompt"]
    assert "Say yes." in parts


# --- kv


def test_kv01_second_turn(server, cold):
    turns = case("two_turns.json")
    common = {"temperature": 0, "max_tokens": turns["max_tokens"]}
    first = {**common, "messages": turns["turns"][0]}
    reply = server.chat(first).json()["choices"][0]["message"]
    history = turns["turns"][0] + [reply] + turns["turns"][2]
    second = {**common, "messages": history}
    expected = cold.text(second)
    assert server.text(second) == expected
    assert server.streamed_text(second) == expected
    assert server.text({**second, "cache_prompt": False}) == expected


def test_kv02_edited_history(server, cold):
    edits = case("edited_middle.json")
    common = {"temperature": 0, "max_tokens": edits["max_tokens"]}
    expected = {p: cold.post("/v1/completions", {**common, "prompt": p}).json()["choices"][0]["text"]
                for p in edits["prompts"]}
    for a in edits["prompts"]:
        for b in edits["prompts"]:
            for p in (a, b):
                got = server.post("/v1/completions", {**common, "prompt": p}).json()
                assert got["choices"][0]["text"] == expected[p], (a, b)
                assert got["usage"]["prompt_tokens_details"]["cached_tokens"] <= got["usage"][
                    "prompt_tokens"]


def test_kv03_and_kv04_snapshots_outlive_the_process(k3_bin, base, cold, tmp_path):
    """There are no slots to save by name: with --spill-dir every snapshot is kept by its tokens."""
    save = case("save_restore.json")
    common = {"temperature": 0, "max_tokens": 12}
    text = (save["prefix"] * 4) + save["suffix"]
    (tmp_path / "kept").mkdir()
    options = ["--spill-dir", tmp_path / "kept"]
    with serving(k3_bin, base, *options) as s:  # empty: nothing was asked, nothing to keep
        pass
    with serving(k3_bin, base, *options) as s:
        s.post("/v1/completions", {**common, "prompt": save["prefix"] * 4})
    with serving(k3_bin, base, *options) as s:
        reply = s.post("/v1/completions", {**common, "prompt": text}).json()
        assert reply["usage"]["cached_tokens"] > 0.8 * reply["usage"]["prompt_tokens"]
        assert s.metric("k3_prefix_cache_requests_total", result="hit_disk") == 1
    expected = cold.post("/v1/completions", {**common, "prompt": text}).json()
    assert reply["choices"] == expected["choices"]
    for kept in (tmp_path / "kept").rglob("*"):  # half a snapshot is no snapshot
        if kept.is_file():
            assert kept.stat().st_mode & 0o077 == 0, "prompts are nobody else's"
            kept.write_bytes(kept.read_bytes()[:-100])
    with serving(k3_bin, base, *options) as s:
        reply = s.post("/v1/completions", {**common, "prompt": text}).json()
        assert reply["choices"] == expected["choices"]
        assert reply["usage"]["cached_tokens"] == 0


def test_kv05_asking_after_a_cancelled_request(server, cold):
    c = case("cancel_then_ask.json")
    expected = cold.text(c["second"])
    for ms in c["cancel_after_ms"]:
        s = server.open(c["first"])
        time.sleep(ms / 1000)
        s.close()
        assert server.text(c["second"]) == expected, ms


def test_kv06_full_context(k3_bin, base):
    requests = case("fill_context.json")["requests"]
    with serving(k3_bin, base, "--ctx", 64) as s:
        grows = s.chat(requests[0]["body"])
        assert grows.status in (200, 400)
        if grows.status == 200:
            assert grows.json()["choices"][0]["finish_reason"] == "length"
        too_long = s.chat(requests[1]["body"])
        assert too_long.error()["code"] == "context_length_exceeded"
        prompt = len(s.post("/tokenize", requests[1]["body"]).json()["tokens"])
        assert {"64", str(prompt)} <= set(too_long.error()["message"].split(" ")), too_long
        for n, most in ((64, 0), (63, 1)):
            j = s.post("/v1/completions", {"prompt": [97] * n, "max_tokens": 24}).json()
            assert j["usage"]["completion_tokens"] <= most
            assert j["choices"][0]["finish_reason"] in ("length", "stop")
        assert s.post("/v1/completions", {"prompt": [97] * 65}).status == 400
        s.alive()


def test_kv07_drafts_change_nothing(server, cold):
    text = "one two three four. one two three four. one two three four. one two"
    for n in (24, 200):
        b = {"prompt": text, "temperature": 0, "max_tokens": n}
        assert server.post("/v1/completions", b).json()["choices"] == cold.post(
            "/v1/completions", b).json()["choices"]


def test_kv08_shared_start(server, cold):
    shared = case("shared_start.json")
    common = {"temperature": 0, "max_tokens": shared["max_tokens"]}
    cached = []
    for end in shared["ends"]:
        b = {**common, "messages": [{"role": "system", "content": shared["shared"]},
                                    {"role": "user", "content": end}]}
        reply = server.chat(b).json()
        assert server.text(b) == cold.text(b)
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and all(n > 1000 for n in cached[1:]), cached


def test_nm12_scores_that_are_not_finite(k3_bin, tmp_path):
    name = "ck20_nan_in_output_layer"
    subprocess.run([sys.executable, CASES / "checkpoint" / "make_bad_checkpoints.py", tmp_path,
                    "--only", name], check=True, capture_output=True)
    try:
        s = Server(k3_bin, tmp_path / name)
    except AssertionError as refused:
        assert "nan" in str(refused).lower() or "finite" in str(refused)
        return
    try:
        replies = []
        threads = [threading.Thread(target=lambda: replies.append(s.chat(SHORT)))
                   for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [r.status for r in replies] == [500, 500, 500], replies
        assert all(r.error()["code"] == "numeric_error" for r in replies)
        assert s.get("/health").status == 200
        end = time.monotonic() + 5  # counters may be a step old
        while s.metric("k3_numeric_errors_total") < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert s.metric("k3_numeric_errors_total") == 3
    finally:
        s.close()
