"""k3 chat: a conversation through a pipe and on a terminal."""

import json
import os
import subprocess
import time

import pytest

from models import base  # noqa: F401 (a fixture)
from test_signals import Terminal, roomy  # noqa: F401 (roomy is a fixture)


def chat(k3, model, *lines, options=("-n", 8, "--temp", 0), **kwargs):
    return k3("chat", model, *options, stdin="".join(line + "\n" for line in lines), **kwargs)


def saved(path):
    return json.loads(path.read_text())["messages"]


def test_cl01_end_of_input_ends_the_program(k3, base, demo_model):
    for model in (base, demo_model):
        start = time.time()
        assert k3("chat", model).stdout == ""
        assert time.time() - start < 30
        out = k3("chat", model, "-n", 8, stdin="hi\n")
        assert 0 < out.stdout.count("\n") < 100
        assert k3("chat", model, "-n", 8, stdin="hi").stdout == out.stdout


def test_only_answers_on_stdout(k3, base):
    out = chat(k3, base, "hi", "", "  ", "there")
    assert b"\x1b" not in out.raw_stdout and not out.stdout.startswith("> ")
    assert out.stderr == ""


def test_demo_model_continues_plain_text(k3, demo_model):
    """It has the control tokens, but was trained on books with BOS in front."""
    text = k3("run", demo_model, "-p", "Once upon a time", "-n", 8, "--temp", 0).stdout
    assert chat(k3, demo_model, "Once upon a time").stdout == text.rstrip("\n") + "\n"
    forced = chat(k3, demo_model, "Once upon a time", options=("-n", 8, "--temp", 0, "--chat",
                                                               "--think-output"))
    assert forced.stdout != text + "\n"


def test_chat_format_in_tokenizer_config_decides(k3, demo_model, model_copy, edit_json, tmp_path):
    folder = model_copy(demo_model)
    file = tmp_path / "c.json"
    line = f"/save {file}"
    for value, thinks in (("none", False), ("xtml", True)):
        edit_json(folder / "tokenizer_config.json", lambda c: c.update(chat_format=value))
        chat(k3, folder, "q", line)
        assert ("reasoning_content" in saved(file)[1]) == thinks
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(chat_format="other"))
    bad = chat(k3, folder, "q", code=1)
    assert "chat_format" in bad.stderr and "xtml" in bad.stderr


def test_prompt_is_the_format_and_history_is_kept(k3, base, tmp_path):
    """The reply equals what k3 run gives for the rendered ids, so the prompt is that."""
    golden = json.loads((base / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    ids = {v["content"]: int(k) for k, v in golden.items()}

    def encode(text):
        return k3("tokenize", base, "-p", text, "--json").json()["ids"] if text else []

    def message(role, body):
        return ([ids["<|open|>"]] + encode("message") + encode(" role") + encode('="')
                + encode(role) + encode('"') + [ids["<|sep|>"]] + body)

    close = [ids["<|close|>"]] + encode("message") + [ids["<|sep|>"], ids["<|end_of_msg|>"]]
    prompt = (message("system", encode("Be kind.")) + close + message("user", encode("hi")) + close
              + message("assistant", [ids["<|open|>"]] + encode("response") + [ids["<|sep|>"]]))
    run = k3("run", base, "--ids", ",".join(map(str, prompt)), "-n", 8, "--temp", 0, "--json").json()
    out = k3("chat", base, "-n", 8, "--temp", 0, "--system", "Be kind.", "--no-thinking",
             stdin="hi\n")
    assert out.stdout.rstrip("\n") == run["text"].rstrip("\n") != ""


def test_undo_retry_save_load(k3, base, tmp_path):
    file, other = tmp_path / "a.json", tmp_path / "b b.json"
    sampled = ("-n", 8, "--temp", 1, "--seed", 5, "--no-thinking")
    out = chat(k3, base, "one", "/retry", "/retry", f"/save {file}", options=sampled)
    replies = out.stdout.splitlines()
    assert len(set(replies)) > 1, "a second answer is another one"
    assert [m["role"] for m in saved(file)] == ["user", "assistant"]
    chat(k3, base, "one", "two", "/undo", f"/save {file}", "/undo", f"/save {other}")
    assert saved(file)[0]["content"] == "one" and len(saved(file)) == 2 and saved(other) == []
    # Taking back leaves no trace: the next answer is that of a conversation without it.
    with_undo = chat(k3, base, "one", "two", "/undo", "three", options=("-n", 8, "--temp", 0,
                                                                       "--no-thinking"))
    without = chat(k3, base, "one", "three", options=("-n", 8, "--temp", 0, "--no-thinking"))
    assert with_undo.raw_stdout.endswith(without.raw_stdout.split(b"\n", 1)[1])
    chat(k3, base, f"/load {file}", "/undo", f"/load {other}", "/system be brief", "x",
         f"/save {file}")
    assert [m["role"] for m in saved(file)] == ["system", "user", "assistant"]


def test_commands_that_fail_end_a_pipe_with_1(k3, base, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"messages": [{"role": "oracle", "content": "x"}]}')
    for line, words in ((f"/load {tmp_path}/none.json", "none.json"), ("/load", "file name"),
                        (f"/load {broken}", "messages[0].role"), ("/unod", "/undo"),
                        ("/undo", "nothing"), ("/retry", "no question"),
                        (f"/save {tmp_path}/no/such/folder.json", "folder.json")):
        bad = chat(k3, base, line, code=1)
        assert words in bad.stderr and bad.stderr.count("\n") == 1, line


def test_wrong_usage(k3, base):
    for args in (["-n", "0"], ["--effort", "huge"], ["--raw", "--chat"], ["--temp", "nan"],
                 ["--effort", "low", "--no-thinking"]):
        k3("chat", base, *args, code=2)
    told = k3("chat", base, "--effort", "low", stdin="x\n", code=1)
    assert "chat_bodies.json" in told.stderr
    told = k3("chat", base, "--raw", "--effort", "low", stdin="x\n", code=1)
    assert "effort" in told.stderr and "chat format" in told.stderr


def test_histories_that_do_not_fit_the_model(k3, base, demo_model, tmp_path):
    file = tmp_path / "h.json"
    for history, model, words in (
            ({"messages": None}, base, "messages: found null"),
            ({"messages": [{"role": "system", "content": "s"}]}, demo_model, "found a system"),
            ({"messages": [{"role": "user", "content": "x " * (1 << 26)}]}, base, "more than")):
        file.write_text(json.dumps(history))
        bad = chat(k3, model, f"/load {file}", code=1)
        assert words in bad.stderr and "h.json" in bad.stderr and bad.stderr.count("\n") == 1


def test_effort_with_bodies(k3, base, model_copy, tmp_path):
    folder = model_copy(base, "bodies")
    keys = ["tool_choice_required", "tool_choice_none", "json_object"]
    holes = ["tool_declare", "tool_declare_dynamic", "thinking_effort", "json_schema"]
    (folder / "chat_bodies.json").write_text(json.dumps(
        {**{k: "text" for k in keys}, **{k: "text {}" for k in holes}}))
    shown = ("-n", 8, "--temp", 0, "--think-output")
    low = chat(k3, folder, "x", options=(*shown, "--effort", "low")).stdout
    assert low != chat(k3, folder, "x", options=shown).stdout


def test_a_slash_can_begin_a_question(k3, base, tmp_path):
    file = tmp_path / "c.json"
    chat(k3, base, "//usr is a folder", f"/save {file}")
    assert saved(file)[0]["content"] == "/usr is a folder"


@pytest.mark.parametrize("way_out", [b"\x04", b"/exit\n"])
def test_terminal_ctrl_c_stops_the_reply_only(k3_bin, roomy, way_out):
    terminal = Terminal(k3_bin, "chat", str(roomy), "-n", "1000000", "--temp", "0", "--logit-bias",
                        "65=100")
    os.write(terminal.master, b"hi\n")
    deadline = time.time() + 60
    while b"AAAAAAAAAA" not in terminal.text and time.time() < deadline:
        terminal.read_some(len(terminal.text) + 1)
    assert b"\x1b[2m" in terminal.text, "thoughts are dim"
    terminal.press_ctrl_c()
    while b"(stopped)" not in terminal.text and time.time() < deadline:
        terminal.read_some(len(terminal.text) + 1)
    assert b"\x1b[0m" in terminal.text
    time.sleep(0.2)
    terminal.press_ctrl_c()  # at the prompt: a hint
    while b"Ctrl-D" not in terminal.text and time.time() < deadline:
        terminal.read_some(len(terminal.text) + 1)
    os.write(terminal.master, way_out)
    assert terminal.finish() == 0


def test_ctrl_c_in_a_pipe_ends_with_130(k3_bin, roomy):
    process = subprocess.Popen([k3_bin, "chat", str(roomy)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    time.sleep(1.0)
    process.send_signal(2)
    assert process.wait(timeout=10) == 130
