"""The clients that people use, against the running server."""

import asyncio
import json

import pytest

from models import base  # noqa: F401 (a fixture)
from serving import serving

openai = pytest.importorskip("openai", reason="openai is not installed: run ./dev setup")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: run ./dev setup")

MESSAGES = [{"role": "user", "content": "Say something short."}]
TOOL = {"type": "function",
        "function": {"name": "pick", "parameters": {
            "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False}}}


@pytest.fixture(scope="module")
def server(k3_bin, base):
    with serving(k3_bin, base, "--api-key", "sk-test") as s:
        yield s


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="sk-test")


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="sk-test")


def test_openai_models(client):
    model = client.models.list().data[0]
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_openai_chat_and_stream(client):
    whole = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=12,
                                           temperature=0, logprobs=True, top_logprobs=3)
    m = whole.choices[0].message
    assert m.role == "assistant" and len(whole.choices[0].logprobs.content) == 12
    text = reasoning = ""
    usage = None
    for chunk in client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=12,
                                                temperature=0, stream=True,
                                                stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert text == (m.content or "")
    assert reasoning == (getattr(m, "reasoning_content", None) or "")
    assert usage == whole.usage or usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions(client):
    one = client.completions.create(model="any", prompt=["a", "b"], max_tokens=4, temperature=0)
    assert [c.index for c in one.choices] == [0, 1]


def test_openai_tools_and_schema(client):
    reply = client.chat.completions.create(model="any", messages=MESSAGES, tools=[TOOL],
                                           tool_choice="required", max_tokens=400, temperature=1,
                                           seed=1, reasoning_effort="none",
                                           parallel_tool_calls=False)
    call = reply.choices[0].message.tool_calls[0]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    again = client.chat.completions.create(
        model="any", max_tokens=4, temperature=0, tools=[TOOL],
        messages=[*MESSAGES, reply.choices[0].message.model_dump(exclude_none=True),
                  {"role": "tool", "tool_call_id": call.id, "content": "done"}])
    assert again.usage.completion_tokens > 0


def test_openai_errors(client, server):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="any", messages=[])
    assert bad.value.param == "messages" and bad.value.request_id
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")


def test_openai_client_that_stops_reading(client, server):
    stream = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=4000,
                                            temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    headers = {"X-Api-Key": "sk-test"}
    for _ in range(200):
        page = server.get("/metrics", headers=headers).body.decode()
        if "\nk3_requests_running 0\n" in page:
            return
    raise AssertionError("the request goes on")


def test_openai_retries_when_the_queue_is_full(k3_bin, base):
    with serving(k3_bin, base, "--max-running", 1, "--max-waiting", 1) as s:
        client = openai.AsyncOpenAI(base_url=s.url + "/v1", api_key="x", max_retries=10)

        async def ask(i):
            r = await client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=20,
                                                     seed=i)
            return r.usage.completion_tokens

        async def everybody():
            return await asyncio.gather(*(ask(i) for i in range(8)))

        assert all(asyncio.run(everybody()))


def test_anthropic_messages_and_stream(claude):
    common = {"model": "any", "max_tokens": 12, "messages": MESSAGES,
              "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**common)
    assert whole.role == "assistant" and whole.stop_reason in ("max_tokens", "end_turn")
    with claude.messages.stream(**common) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(b.text for b in whole.content if b.type == "text")
    assert final.stop_reason == whole.stop_reason
    thinking = claude.messages.create(**{**common, "max_tokens": 2000},
                                      thinking={"type": "enabled", "budget_tokens": 1024})
    assert thinking.content[0].type == "thinking" and thinking.content[0].signature
    count = claude.messages.count_tokens(model="any", messages=MESSAGES)
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropic_tools(claude):
    tool = {"name": "pick", "input_schema": TOOL["function"]["parameters"]}
    reply = claude.messages.create(model="any", max_tokens=400, messages=MESSAGES, tools=[tool],
                                   tool_choice={"type": "any", "disable_parallel_tool_use": True})
    use = next(b for b in reply.content if b.type == "tool_use")
    assert reply.stop_reason == "tool_use" and use.input["colour"] in ("red", "blue")
    again = claude.messages.create(
        model="any", max_tokens=4, tools=[tool],
        messages=[*MESSAGES, {"role": "assistant", "content": [b.model_dump() for b in
                                                               reply.content]},
                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id,
                                                "content": "done"}]}])
    assert again.usage.output_tokens > 0


def test_anthropic_errors(claude, server):
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="any", max_tokens=5, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong").messages.create(
            model="any", max_tokens=5, messages=MESSAGES)
