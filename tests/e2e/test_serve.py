"""k3 serve: start and end, protocol, limits, many clients at once, and the demo model."""

import concurrent.futures
import json
import math
import random
import shutil
import signal
import socket
import subprocess
import time

import pytest

from models import base  # noqa: F401 (a fixture)
from serving import Server, message_text, serving

SHORT = {"messages": [{"role": "user", "content": "Say something short."}], "temperature": 0,
         "max_tokens": 12}
LONG = {"messages": [{"role": "user", "content": "Tell a very long story."}], "temperature": 0,
        "max_tokens": 4000, "stream": True}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(k3_bin, base):
    with serving(k3_bin, base) as s:
        yield s


@pytest.fixture(scope="module")
def demo(k3_bin):
    from conftest import DEMO_MODEL
    with serving(k3_bin, DEMO_MODEL) as s:
        yield s


# --- start and end


def test_start_line_and_drain(k3_bin, base):
    s = Server(k3_bin, base, "--drain-timeout", 20)
    assert s.line.count("\n") == 1 and s.url in s.line and "prefix cache" in s.line
    assert s.host == "127.0.0.1"
    running = s.open({**LONG, "max_tokens": 300})
    got = running.recv(4096)
    s.process.send_signal(signal.SIGTERM)
    while chunk := running.recv(65536):
        got += chunk
    assert b"data: [DONE]" in got, "a running answer is finished"
    assert s.process.wait(20) == 0
    with pytest.raises(OSError):
        socket.create_connection((s.host, s.port), timeout=1)


def test_drain_timeout_ends_what_is_left(k3_bin, base, model_copy, edit_json):
    folder = model_copy(base, "roomy")
    edit_json(folder / "config.json",
              lambda c: c["text_config"].update(max_position_embeddings=1 << 17))
    s = Server(k3_bin, folder, "--drain-timeout", 0)
    running = s.open({**LONG, "max_tokens": 100000, "logit_bias": {"65": 100}})
    got = running.recv(4096)
    s.process.send_signal(signal.SIGTERM)
    while chunk := running.recv(65536):
        got += chunk
    assert b'"code":"shutting_down"' in got
    assert s.process.wait(20) == 0


def test_second_signal_stops_at_once(k3_bin, base, model_copy, edit_json):
    folder = model_copy(base, "roomy")
    edit_json(folder / "config.json",
              lambda c: c["text_config"].update(max_position_embeddings=1 << 17))
    s = Server(k3_bin, folder, "--drain-timeout", 600)
    running = s.open({**LONG, "max_tokens": 100000, "logit_bias": {"65": 100}})
    running.recv(4096)
    s.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert s.process.poll() is None
    s.process.send_signal(signal.SIGTERM)
    assert s.process.wait(5) == 130


def test_port_that_is_taken_and_bad_options(k3, base, server):
    out = k3("serve", base, "--port", server.port, code=1)
    assert str(server.port) in out.stderr and out.stdout == ""
    for bad in (["--port", 65536], ["--port", "x"], ["--max-running", 0], ["--cors", ""],
                ["--state-memory", "-1"], ["--log-level", "loud"], ["--api-key", ""], ["--model-name", "a\nb"]):
        k3("serve", base, *bad, code=2)
    k3("serve", base, "--port", 0, "--api-key-file", "/nothing", code=1)
    k3("serve", "/nothing", "--port", 0, code=1)


def test_keys_from_everywhere(k3_bin, base, tmp_path):
    (tmp_path / "keys").write_text("from-file\n\n  second \n")
    with serving(k3_bin, base, "--api-key", "from-flag", "--api-key-file", tmp_path / "keys",
                 env={"K3_API_KEY": "from-env"}) as s:
        for key in ("from-file", "second", "from-flag", "from-env"):
            assert s.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status == 200
            assert s.get("/v1/models", headers={"X-Api-Key": key}).status == 200
        for headers in ({}, {"X-Api-Key": "from-fil"}, {"Authorization": "from-file"}):
            reply = s.chat(SHORT, headers=headers)
            assert reply.status == 401 and reply.error()["type"] == "authentication_error"
        assert s.get("/health").status == 200
        assert "from-" not in s.stderr


# --- protocol


def test_every_answer_has_an_id(server):
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers[
        "x-request-id"] == "mine-1"
    strange = server.get("/nothing", headers={"X-Request-Id": "a b\"<script>"})
    assert strange.headers["x-request-id"].isalnum()


def test_wrong_paths_methods_and_types(server):
    assert server.get("/v1/nothing").error()["code"] == "not_found"
    wrong = server.get(CHAT)
    assert wrong.status == 405 and wrong.headers["allow"] == "POST"
    assert server.post("/v1/embeddings", {"input": "x"}).status == 404
    assert server.get("/v1/models/other").error()["code"] == "model_not_found"
    head = server.request("HEAD", "/health")
    assert head.status == 200 and head.body == b""


def test_too_much(server):
    reply = server.raw(b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 413")
    assert server.raw(b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 414")
    assert server.raw(b"GET / HTTP/1.1\r\nA: " + b"x" * 40000 + b"\r\n\r\n").startswith(
        b"HTTP/1.1 431")
    assert server.raw(b"\x00\x01\x02\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert server.chat(b"[" * 1000000).status == 400
    assert server.chat(b'{"messages":' + b"[" * 1000000).status == 400
    server.alive()


def test_random_bodies_get_an_error_object(server):
    rng = random.Random(7)
    values = [None, True, 0, -1, 1e308, 2**63, 4294967297, "", "x", "\u0000", [], {}, [None],
              {"type": "x"}, -0.0, 1e20, 2**31, ["\ud7ff"], "<|open|>", {"": {}}]
    keys = ["messages", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream",
            "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "response_format",
            "reasoning_effort", "thinking", "stream_options", "presence_penalty", "priority",
            "timeout", "prompt", "echo", "chat_template_kwargs", "model", "system", "metadata"]
    for _ in range(300):
        b = dict(SHORT, max_tokens=1)
        for key in rng.sample(keys, rng.randint(1, 3)):
            b[key] = rng.choice(values)
        path = rng.choice([CHAT, "/v1/completions", "/v1/messages", "/tokenize", "/detokenize",
                           "/apply-template", "/v1/messages/count_tokens"])
        reply = server.post(path, b)
        assert reply.status in (200, 400), (path, b, reply)
        if reply.status == 400:
            reply.error()
    for a in range(0x80, 0x100, 5):
        for c in range(0, 0x100, 11):
            text = b'{"prompt":"' + bytes([a, c]) + b'","max_tokens":1}'
            assert server.post("/v1/completions", text).status in (200, 400)
    server.alive()


def test_many_line_ends_as_a_stop_text(server):
    assert server.chat({**SHORT, "stop": "\n" * 1000000}).status == 400
    server.alive()


# --- sameness


def test_streamed_and_whole_replies_agree(server):
    for seed in range(4):
        b = {**SHORT, "temperature": 1.0, "seed": seed, "max_tokens": 40}
        assert server.streamed_text(b) == server.text(b)


def test_settings_do_not_leak_between_requests_of_a_batch(server):
    bodies = [{**SHORT, "seed": i, "temperature": t, "top_p": p, "top_k": k, "max_tokens": 40,
               "frequency_penalty": f}
              for i, (t, p, k, f) in enumerate([(0, 1, 0, 0), (1, 1, 0, 0), (1, .5, 0, 0),
                                                (1.5, 1, 5, 0), (0.7, .9, 40, 1), (0, 1, 0, 2),
                                                (2, 1, 0, 0), (1, 1, 1, 0)] * 2)]
    alone = [server.text(b) for b in bodies]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(server.text, bodies)) == alone


def test_secrets_do_not_cross(server):
    def ask(i):
        word = f"secret{i:03d}" * 3
        b = {"prompt": word, "echo": True, "max_tokens": 1 + i % 9, "temperature": 0}
        text = server.post("/v1/completions", b).json()["choices"][0]["text"]
        return all(f"secret{j:03d}" not in text for j in range(64) if j != i) and word in text
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(64)))


def test_usage_sums(server):
    for n in (1, 3):
        u = server.chat({**SHORT, "n": n}).json()["usage"]
        assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"]
        assert 0 <= u["prompt_tokens_details"]["cached_tokens"] <= u["prompt_tokens"]
        assert u["completion_tokens"] <= 12 * n


def test_log_likelihoods_are_those_of_run(server, k3, base):
    """What an evaluation harness reads: echo, logprobs, one more token."""
    ran = k3("run", base, "-p", "hello", "-n", 12, "--temp", 0, "--json", "--logprobs", 1).json()
    ids = ran["prompt_ids"] + ran["ids"]
    for prompt in (ids, ):
        reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True,
                                                "logprobs": 1, "temperature": 0})
        table = reply.json()["choices"][0]["logprobs"]
    assert len(table["tokens"]) == len(ids) + 1 and table["token_logprobs"][0] is None
    got = table["token_logprobs"][len(ran["prompt_ids"]):-1]
    assert got == [t["logprob"] for t in ran["logprobs"]]
    for token, top in zip(table["tokens"][len(ran["prompt_ids"]):-1],
                          table["top_logprobs"][len(ran["prompt_ids"]):-1]):
        assert max(top, key=top.get) == token  # greedy


def test_logprobs_are_numbers(server):
    reply = server.chat({**SHORT, "logprobs": True, "top_logprobs": 20})
    for t in reply.json()["choices"][0]["logprobs"]["content"]:
        assert len(t["top_logprobs"]) == 20 and isinstance(t["logprob"], float)
    assert b"NaN" not in reply.body and b"null" not in reply.body.split(b'"logprobs":')[1].split(
        b'"finish_reason"')[0]


# --- leaving, overload


def test_leaving_in_every_phase(server):
    bodies = [{**LONG}, {**LONG, "stream": False}, {**LONG, "n": 4},
              {**LONG, "messages": [{"role": "user", "content": "long " * 600}]}]
    for wait in (0, 0.01, 0.1):
        for b in bodies:
            s = server.open(b)
            time.sleep(wait)
            s.close()
    assert server.idle(5)
    server.alive()


def test_overload_is_shed_and_passes(k3_bin, base):
    with serving(k3_bin, base, "--max-running", 1, "--max-waiting", 2) as s:
        sockets = [s.open({**LONG, "max_tokens": 1000}) for _ in range(3)]
        time.sleep(0.1)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: s.chat(SHORT), range(6)))
        assert any(r.status == 429 for r in replies), replies
        refused = next(r for r in replies if r.status == 429)
        assert refused.error()["type"] == "rate_limit_error" and refused.headers["retry-after"]
        for one in sockets:
            one.close()
        assert s.idle(5)
        s.alive()


def test_timeout_of_a_request(server):
    reply = server.chat({**LONG, "stream": False, "timeout": 0.01})
    assert reply.status == 504 and reply.error()["code"] == "timeout"


def test_choices_are_the_same_however_they_are_computed(k3_bin, base):
    """n > 1 with penalties and a form, each on and off, and a second turn: plain against everything
    at once, with room for two sequences only."""
    def answers(*options):
        out = []
        with serving(k3_bin, base, *options) as s:
            for bits in range(8):
                b = {**SHORT, "n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 30,
                     "messages": [{"role": "user", "content": "one two one two one two " * 20}]}
                if bits & 1:
                    b.update(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2)
                if bits & 2:
                    b["response_format"] = {"type": "json_object"}
                if bits & 4:
                    b["messages"] += [{"role": "assistant", "content": "two"},
                                      {"role": "user", "content": "and then?"}]
                reply = s.chat(b)
                assert reply.status == 200, reply
                out.append([c["message"] for c in reply.json()["choices"]])
        return out

    plain = answers("--no-prefix-cache", "--no-speculation")
    assert any(a != b for a, b, _ in plain), "choices differ"
    assert answers("--max-running", 2, "--prefill-chunk", 64) == plain


# --- metrics


def test_metrics_page(server):
    server.chat(SHORT)
    page = server.get("/metrics").body.decode()
    for name in ("k3_requests_total", "k3_requests_running", "k3_ttft_seconds_bucket",
                 "k3_itl_seconds_count", "k3_tpot_seconds_sum", "k3_queue_seconds_count",
                 "k3_memory_bytes", "k3_prefix_cache_requests_total", "k3_draft_tokens_total",
                 "k3_build_info", "k3_http_requests_total"):
        assert f"\n{name}" in page, name
    before = server.metric("k3_requests_total", outcome="ok")
    server.chat(SHORT)
    assert server.metric("k3_requests_total", outcome="ok") == before + 1


def test_what_the_model_does_is_shown(server):
    for seed in range(3):
        server.chat({**SHORT, "seed": seed, "max_tokens": 60, "temperature": 1})
    seen = server.get("/v1/k3/telemetry").json()
    assert seen["sampled_passes"] > 0 and seen["experts"] and seen["depth_weights"]
    for layer in seen["experts"]:
        experts = len(layer["load"])
        assert 0 <= layer["entropy_bits"] <= 1e-9 + math.log2(experts)
        assert layer["dead"] == layer["load"].count(0) and layer["max_violation"] >= 0
        assert sum(layer["load"]) % layer["tokens"] == 0, "every token chooses equally many"
        assert 1 <= layer["active_last_step"] <= experts
    for site in seen["depth_weights"]:
        assert abs(sum(site["mean"]) - 1) < 1e-4
    page = server.get("/metrics").body.decode()
    for name in ("k3_experts_active", "k3_routing_entropy_ratio", "k3_expert_load_max_violation",
                 "k3_experts_dead", "k3_depth_weight_live", "k3_drift_alert"):
        assert f"\n{name}{{" in page, name
    alerts = server.get("/alerts").json()
    assert alerts["alerts"] == []
    assert any(w["signal"] == "completion_tokens" for w in alerts["watched"])


def test_decays_are_shown(server):
    server.chat({**SHORT, "max_tokens": 40})
    layers = server.get("/v1/k3/telemetry").json()["decay"]
    assert layers
    for layer in layers:
        assert layer["tokens"] > 0
        # Every channel of every token is in one bucket.
        assert sum(b["count"] for b in layer["half_life_tokens"]) % layer["tokens"] == 0
    page = server.get("/metrics").body.decode()
    values = [[float(line.rsplit(" ", 1)[1]) for line in page.splitlines()
               if line.startswith(f"k3_decay_half_life_{p}_tokens{{")] for p in ("p10", "p50", "p90")]
    assert values[0] and all(0 < a <= b <= c for a, b, c in zip(*values))


def test_drift_reference_of_another_run(k3_bin, k3, base, tmp_path):
    file = tmp_path / "reference.json"
    with serving(k3_bin, base, "--sample-every", 1) as s:
        assert s.get("/alerts/reference").json()["references"] == []
        for seed in range(9):  # 512 passes teach the signals of passes
            s.chat({**SHORT, "seed": seed, "n": 2, "max_tokens": 90, "ignore_eos": True,
                    "temperature": 1})
        file.write_bytes(s.get("/alerts/reference").body)
    learned = {r["signal"] for r in json.loads(file.read_text())["references"]}
    assert "decay_nats" in learned and "completion_tokens" not in learned
    with serving(k3_bin, base, "--drift-reference", file) as s:
        watched = {w["signal"]: w["state"] for w in s.get("/alerts").json()["watched"]}
        assert watched == dict.fromkeys(learned, "ok")
    file.write_text('{"references": [{"signal": "x", "stratum": "y", "counts": [1]}]}')
    done = k3("serve", base, "--port", 0, "--drift-reference", file, code=1)
    assert f"{file}: references[0]: counts" in done.stderr
    missing = k3("serve", base, "--port", 0, "--drift-reference", tmp_path / "no", code=1)
    assert str(tmp_path / "no") in missing.stderr


def test_promtool_has_no_complaint(server):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    page = server.get("/metrics").body
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True,
                          check=False)
    assert done.returncode == 0 and done.stderr == b"", done


# --- plain text models


def test_demo_model_answers_at_once(demo, k3):
    prompt = "Once upon a time"
    b = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    text = demo.post("/v1/completions", b).json()["choices"][0]["text"]
    assert text == k3("run", "-p", prompt, "-n", 12, "--temp", 0).stdout
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "temperature": 0}
    assert demo.text(chat) == text
    assert demo.streamed_text(chat) == text
    assert demo.get("/v1/models").json()["data"][0]["id"] == "k3-books-27m"


def test_demo_model_continues_a_conversation_like_chat(demo, k3):
    talk = k3("chat", "-n", 8, "--temp", 0, stdin="The sea was calm.\nThen\n").stdout
    first = {"role": "user", "content": "The sea was calm."}
    reply = demo.chat({"messages": [first], "max_tokens": 8, "temperature": 0}).json()["choices"][
        0]["message"]
    second = demo.text({"messages": [first, reply, {"role": "user", "content": "Then"}],
                        "max_tokens": 8, "temperature": 0})
    assert talk == "".join(t if t.endswith("\n") else t + "\n" for t in (reply["content"], second))


def test_json_schema_holds_for_any_model(demo, server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
              "required": ["n", "ok"], "additionalProperties": False}
    fmt = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for s in (demo, server):
        for seed in range(3):
            b = {"messages": [{"role": "user", "content": "A number?"}], "response_format": fmt,
                 "seed": seed, "max_tokens": 200, "reasoning_effort": "none"}
            choice = s.chat(b).json()["choices"][0]
            if choice["finish_reason"] == "length":
                continue  # a number may have many digits
            value = json.loads(choice["message"]["content"])
            assert set(value) == {"n", "ok"} and isinstance(value["ok"], bool)
            assert s.streamed_text(b) == choice["message"]["content"]


def test_required_tool_is_called(server):
    tools = [{"type": "function", "function": {
        "name": "pick", "parameters": {"type": "object", "properties": {
            "colour": {"type": "string", "enum": ["red", "blue"]}}, "required": ["colour"],
            "additionalProperties": False}}}]
    for effort in ("none", "low"):
        for seed in range(3):
            b = {**SHORT, "tools": tools, "tool_choice": "required", "seed": seed,
                 "parallel_tool_calls": False, "temperature": 1, "max_tokens": 400,
                 "reasoning_effort": effort}
            choice = server.chat(b).json()["choices"][0]
            if choice["finish_reason"] == "length":
                assert effort == "low"  # thoughts are free text
                continue
            assert choice["finish_reason"] == "tool_calls"
            call = choice["message"]["tool_calls"][0]["function"]
            assert call["name"] == "pick"
            assert json.loads(call["arguments"])["colour"] in ("red", "blue")


def test_long_thinking_is_no_answer(server):
    choice = server.chat(SHORT).json()["choices"][0]
    if choice["finish_reason"] == "length":
        assert not choice["message"]["content"] and choice["message"]["reasoning_content"]
    assert message_text(choice["message"])


def test_prompts_are_not_in_the_log(k3_bin, base):
    secret = "xylophone"
    b = {"messages": [{"role": "user", "content": secret}], "max_tokens": 1}
    for args, expected in (([], False), (["--log-prompts"], True)):
        s = Server(k3_bin, base, "--log-level", "info", *args)
        s.chat(b)
        s.get("/nothing\u00e9".encode("ascii", "ignore").decode() + "%0a")
        s.close()
        assert (secret in s.stderr) == expected, s.stderr
