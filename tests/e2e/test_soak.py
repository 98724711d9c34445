"""A server that is used badly for long: nothing may be left behind, and no answer go astray.

160 requests in a test run; `./dev soak` asks for 5,000 and prints what it saw."""

import concurrent.futures
import json
import os
import random
import socket
import time

import pytest

from models import base  # noqa: F401 (a fixture)
from serving import serving

CHAT = "/v1/chat/completions"
REQUESTS = int(os.environ.get("K3_SOAK_REQUESTS", "160"))
TEXT = {"messages": [{"role": "user", "content": "Tell a very long story."}], "temperature": 0.9}
MALFORMED = [
    b"{bad json", b"", b"[]", b"null", b'{"messages": 7}', b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', b'{"a": 1, "a": 2}',
    b"[" * 5000, b'{"messages": [{"role": "nobody", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema",'
    b'"json_schema": {"name": "x", "schema": {"$ref": "#"}}}}',
]


@pytest.fixture(scope="module")
def server(k3_bin, base):
    # Small budgets: sequences give way, snapshots are evicted.
    with serving(k3_bin, base, "--max-running", 12, "--cache-memory", "8M", "--sample-every", 4) as s:
        yield s


def leaves(server, rng):
    s = server.open({**TEXT, "max_tokens": 60, "stream": rng.random() < 0.7, "n": rng.choice([1, 3])})
    time.sleep(rng.random() * 0.08)
    s.close()


def malformed(server, rng):
    body = rng.choice(MALFORMED)
    got = server.raw(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                     % (CHAT.encode(), len(body)) + body, wait=20)
    assert got.startswith(b"HTTP/1.1 400 "), (body[:60], got[:200])


def half_a_request(server, rng):
    with socket.create_connection((server.host, server.port), timeout=10) as s:
        text = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n" + b"{" * 40
        s.sendall(text[:rng.randrange(1, len(text))])
        time.sleep(rng.random() * 0.02)


def slow_reader(server, rng):
    s = server.open({**TEXT, "max_tokens": 40, "stream": True, "logprobs": True,
                     "top_logprobs": 20})
    for _ in range(rng.randrange(4)):
        s.recv(100)
        time.sleep(0.03)
    s.close()


def huge(server, rng):
    body = {**TEXT, "max_tokens": 2**31 - 1, "n": 4, "stop": ["x" * 1024] * 16,
            "logit_bias": {str(i): 1 for i in range(100)}, "stream": True}
    if rng.random() < 0.5:
        body.update(n=10**15)
        assert server.chat(body).status == 400
        return
    s = server.open(body)
    time.sleep(0.02)
    s.close()


def plain(server, rng):
    reply = server.chat({**TEXT, "max_tokens": 4, "seed": rng.randrange(9),
                         "cache_prompt": rng.random() < 0.5, "priority": rng.randrange(3)})
    assert reply.status in (200, 429), reply


KINDS = [leaves, malformed, half_a_request, slow_reader, huge, plain, plain, plain]


def gauges(server):
    """What has to be as before when nobody asks for anything."""
    names = ["k3_requests_running", "k3_requests_waiting", "k3_requests_preempted",
             "k3_state_planned_bytes"]
    return {n: server.metric(n) for n in names} | {
        "states": server.metric("k3_memory_bytes", component="state"),
        "parked": server.metric("k3_memory_bytes", component="parked")}


def anonymous_kib(server):
    with open(f"/proc/{server.process.pid}/status", encoding="ascii") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon"))


def test_soak_leaves_nothing_behind(server):
    rng = random.Random(3)

    def round_of(n):
        jobs = [(rng.choice(KINDS), random.Random(rng.random())) for _ in range(n)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for done in [pool.submit(kind, server, own) for kind, own in jobs]:
                done.result()
        assert server.idle(60)

    before = gauges(server)
    size = max(80, REQUESTS // 10)
    round_of(min(size, 500))  # buffers, arenas and the cache fill up
    memory = [anonymous_kib(server)]
    asked = 0
    while asked < REQUESTS:
        round_of(size)
        asked += size
        memory.append(anonymous_kib(server))
    assert gauges(server) == before and not any(before.values())
    assert server.metric("k3_http_connections") <= 2
    print(f"soak: {asked} requests, RssAnon KiB {memory}, gauges {gauges(server)}")
    assert memory[-1] < memory[0] + 30 * 1024, memory
    server.alive()


def test_soak_secrets_never_cross(server):
    """64 at once: each is told a secret, has to say one, and sees nobody else's."""
    rng = random.Random(9)
    secrets = [f"{rng.getrandbits(48):012x}" for _ in range(64)]

    def tell(secret):
        """Echoed prompt and scores, so the whole way of a request's own tokens is looked at."""
        body = {"prompt": f"the secret is {secret}", "max_tokens": 8, "echo": True, "logprobs": 1,
                "temperature": 0}
        reply = server.post("/v1/completions", body).json()["choices"][0]
        return reply["text"], reply["logprobs"]["token_logprobs"]

    def say(secret):
        body = {**TEXT, "max_tokens": 400, "messages": [{"role": "user", "content": secret}],
                "response_format": {"type": "json_schema", "json_schema": {
                    "name": "s", "strict": True, "schema": {"const": secret}}}}
        reply = server.chat(body)
        assert reply.status == 200, reply
        return reply.json()["choices"][0]["message"]["content"]

    alone = [tell(secret) for secret in secrets[:8]]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        told = list(pool.map(tell, secrets))
        said = list(pool.map(say, secrets))
    assert told[:8] == alone
    for i, secret in enumerate(secrets):
        assert told[i][0].startswith(f"the secret is {secret}")
        seen = told[i][0] + (said[i] or "")
        assert not any(other in seen for other in secrets if other != secret)
        if said[i]:
            assert json.loads(said[i]) == secret
