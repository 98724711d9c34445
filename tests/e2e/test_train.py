"""k3 data prepare and k3 train: a small run, stopped and continued, and what is refused."""

import csv
import json
import os
import re
import resource
import signal
import struct
import subprocess
import time

import pytest

from conftest import DEMO_MODEL, ROOT

CASES = ROOT / "tests" / "cases" / "training"


@pytest.fixture
def run_folder(k3, tmp_path):
    """A folder with prepared data, a small model's config and a function that writes run.toml."""
    if not (DEMO_MODEL / "tiktoken.model").exists():
        pytest.skip("the demo model is not here")
    text = (CASES / "corpus.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(b"\0".join([text] * 8))
    k3("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "data", "--valid", "0",
       "--tokenizer", DEMO_MODEL)
    config = json.loads((ROOT / "tests/golden/variants/released/config.json").read_text())
    config.get("text_config", config)["vocab_size"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(config))

    def write(out="run", steps=20, extra="", optimizer=""):
        (tmp_path / "run.toml").write_text(
            f'[model]\nconfig = "config.json"\n[data]\ndir = "data"\n[train]\nout = "{out}"\n'
            f"steps = {steps}\nbatch = 2\nsequence = 32\ncheckpoint_every = 5\n{extra}\n"
            f"[optimizer]\nlr = 1e-2\n{optimizer}\n")
        return tmp_path / "run.toml"

    write.folder = tmp_path
    return write


def losses(folder):
    with open(folder / "log.csv", encoding="utf-8") as file:
        return [(int(row["step"]), row["loss"]) for row in csv.DictReader(file)]


def test_training_falls_resumes_and_the_model_runs(k3, k3_bin, run_folder):
    k3("train", run_folder(out="whole"))
    whole = losses(run_folder.folder / "whole")
    assert [step for step, _ in whole] == list(range(1, 21))
    assert float(whole[-1][1]) < float(whole[0][1]) - 0.5
    ran = k3("run", run_folder.folder / "whole" / "model", "-p", "the", "-n", "4")
    assert ran.stdout

    config = run_folder(out="parts")
    process = subprocess.Popen([k3_bin, "train", str(config)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    log = run_folder.folder / "parts" / "log.csv"
    deadline = time.time() + 60
    while time.time() < deadline and (not log.exists() or log.read_text().count("\n") < 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"step" in out
    k3("train", config)
    assert losses(run_folder.folder / "parts") == whole
    final = "model/model-00001-of-00001.safetensors"
    assert (run_folder.folder / "parts" / final).read_bytes() == (
        run_folder.folder / "whole" / final).read_bytes()


def test_killed_runs_continue_from_a_whole_checkpoint(k3, k3_bin, run_folder):
    config = run_folder(out="killed", steps=1000, extra="keep = 2\n")
    config.write_text(config.read_text().replace("checkpoint_every = 5", "checkpoint_every = 1"))
    for attempt in range(4):
        process = subprocess.Popen([k3_bin, "train", str(config)], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        time.sleep(0.4 + 0.13 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = k3("train", config, "--max-seconds", "1")
    assert "stopped at step" in done.stdout
    assert "damaged" not in done.stderr
    steps = [step for step, _ in losses(run_folder.folder / "killed")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_huge_learning_rate_never_writes_a_broken_model(k3, run_folder):
    config = run_folder(out="huge", steps=10)
    config.write_text(config.read_text().replace("lr = 1e-2", "lr = 1e6"))
    k3("train", config)
    k3("eval", "ppl", run_folder.folder / "huge" / "model", "--text", CASES / "corpus.txt",
       code=None)
    with open(run_folder.folder / "huge" / "log.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 10


def test_documents_of_one_token_give_no_loss_and_no_crash(k3, run_folder):
    k3("data", "prepare", CASES / "one_token_docs.txt", "--split", "blank", "--valid", "0", "--out",
       run_folder.folder / "data", "--tokenizer", DEMO_MODEL)
    config = run_folder(out="one", steps=2)
    config.write_text(config.read_text().replace("sequence = 32", "sequence = 1"))
    k3("train", config)
    for _, loss in losses(run_folder.folder / "one"):
        assert float(loss) == float(loss)


def test_empty_and_short_data_are_refused(k3, run_folder, tmp_path):
    for name in ("empty.txt", "blank.txt"):
        done = k3("data", "prepare", CASES / name, "--out", tmp_path / "d", "--tokenizer",
                  DEMO_MODEL, code=1)
        assert name in done.stderr
    k3("data", "prepare", CASES / "short.txt", "--valid", "0", "--out", run_folder.folder / "data",
       "--tokenizer", DEMO_MODEL)
    done = k3("train", run_folder(extra="seed = 2\n"), code=1)
    assert "expected at least one row of 32 + 1" in done.stderr


def test_a_changed_data_file_or_seed_is_noticed(k3, run_folder):
    k3("train", run_folder(steps=2))
    done = k3("train", run_folder(steps=4, extra="seed = 9\n"), code=1)
    assert "another model, data set, seed" in done.stderr
    k3("data", "prepare", CASES / "corpus.txt", "--valid", "0", "--out",
       run_folder.folder / "data", "--tokenizer", DEMO_MODEL)
    done = k3("train", run_folder(steps=4), code=1)
    assert "another model, data set, seed" in done.stderr


def test_unknown_keys_are_named(k3, run_folder):
    done = k3("train", run_folder(extra="stpes = 3\n"), code=1)
    assert "unknown key train.stpes" in done.stderr
    assert not os.path.exists(run_folder.folder / "run")


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    """The records of an event file, checksums compared."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at:at + 8])
        body = data[at + 12:at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body)
        yield body
        at += 16 + length


def fields(message):
    """(number, value) of every field of a protocol buffer message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 1:
            yield key >> 3, struct.unpack_from("<d", message, at)[0]
            at += 8
        elif key & 7 == 5:
            yield key >> 3, struct.unpack_from("<f", message, at)[0]
            at += 4
        else:
            length = varint()
            yield key >> 3, message[at:at + length]
            at += length


def counts(histogram):
    """The counts of a histogram, after a look at what stands beside them."""
    parts = dict(fields(histogram))
    limits, values = ([x for (x,) in struct.iter_unpack("<d", parts[n])] for n in (6, 7))
    assert limits == sorted(limits) and len(limits) == len(values)
    assert parts[3] == pytest.approx(sum(values)) and parts[1] < limits[0] <= limits[-1] == parts[2]
    return values


def scalars(path):
    """{(tag, step): value} of an event file; of a histogram, its counts."""
    found = {}
    first, *rest = records(path)
    assert dict(fields(first))[3] == b"brain.Event:2"
    for record in rest:
        event = dict(fields(record))
        for number, value in fields(event.get(5, b"")):
            assert number == 1
            entry = dict(fields(value))
            found[entry[1].decode(), event[2]] = entry[2] if 2 in entry else counts(entry[5])
    return found


def test_a_run_leaves_tables_events_samples_and_a_plot(k3, run_folder):
    data = run_folder.folder / "data"
    (data / "valid.tokens").write_bytes((data / "train.tokens").read_bytes())
    done = k3("train", run_folder(steps=6, extra="eval_every = 3\nsample_every = 3\nlog_every = 2\n"
                                                 "eval_rows = 1\nsample_prompt = \"the\"\n"))
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    assert re.search(r"^step 2/6 loss .* tok/s .* left", done.stderr, re.M)
    run = run_folder.folder / "run"
    events = scalars(run / "events.out.tfevents.0000000000.k3")
    with open(run / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "6"]
    for row in rows:
        assert events["loss/train", int(row["step"])] == pytest.approx(float(row["loss"]), abs=1e-5)
    loads = {tag: v for (tag, step), v in events.items() if tag.endswith("/load") and step == 6}
    assert loads and all(sum(v) > 0 and min(v) >= 0 for v in loads.values())
    decays = [v for (tag, step), v in events.items() if tag.endswith("/decay") and step == 6]
    assert decays and all(len(v) == 10 and sum(v) == pytest.approx(1) for v in decays)
    with open(run / "balance.csv", encoding="utf-8") as file:
        balance = list(csv.DictReader(file))
    assert {row["step"] for row in balance} == {"2", "4", "6"}
    assert all(float(row["bias_min"]) <= 0 <= float(row["bias_max"]) for row in balance)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6]
    assert all(sample["text"].startswith("the") for sample in samples)
    assert (run / "loss.svg").read_text().count("<polyline") == 2
    probe = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()][-1]["probe"]
    assert {layer["kind"] for layer in probe["layers"]} == {"kda", "mla"}


def test_the_memory_that_is_announced_is_what_it_takes(k3, run_folder):
    config = run_folder(steps=3, extra="eval_every = 0\n")
    text = json.loads((run_folder.folder / "config.json").read_text())
    text.get("text_config", text)["vocab_size"] = 20000
    (run_folder.folder / "config.json").write_text(json.dumps(text))
    config.write_text(config.read_text().replace("batch = 2\nsequence = 32",
                                                 "batch = 16\nsequence = 256"))
    done = k3("train", config)
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    match = re.search(r"planned ([\d.]+) (\w+), at most ([\d.]+) (\w+) resident", done.stderr)
    planned = float(match[1]) * units[match[2]]
    peak = float(match[3]) * units[match[4]]
    assert planned > 100e6, "large enough for the program itself not to matter"
    assert planned == pytest.approx(peak, rel=0.1)


def test_a_run_that_cannot_fit_is_refused_before_it_starts(k3, run_folder):
    config = run_folder(steps=3)
    config.write_text(config.read_text().replace("batch = 2\nsequence = 32",
                                                 "batch = 65536\nsequence = 200\naccumulate = 2"))
    done = k3("train", config, code=3)
    assert "the run needs" in done.stderr and "there are" in done.stderr
    assert not (run_folder.folder / "run").exists()


def limit_files(size):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return limit


def test_a_full_disk_ends_the_run_and_loses_nothing(k3, k3_bin, run_folder):
    k3("train", run_folder(out="whole", steps=20))
    config = run_folder(out="full", steps=10)
    k3("train", config)
    run = run_folder.folder / "full"
    before = {path: path.read_bytes() for path in (run / "checkpoints").iterdir()
              if path.suffix == ".safetensors"}
    model = (run / "model" / "model-00001-of-00001.safetensors").read_bytes()
    config.write_text(config.read_text().replace("steps = 10", "steps = 20"))
    done = subprocess.run([k3_bin, "train", str(config)], capture_output=True, text=True,
                          preexec_fn=limit_files(64 * 1024), check=False)
    assert done.returncode == 1, done.stderr
    assert str(run) in done.stderr
    after = {path: path.read_bytes() for path in (run / "checkpoints").iterdir()
             if path.suffix == ".safetensors"}
    assert after == before
    assert (run / "model" / "model-00001-of-00001.safetensors").read_bytes() == model
    k3("train", config)
    assert [step for step, _ in losses(run)] == list(range(1, 21))


def test_kill_9_again_and_again_ends_with_the_same_weights(k3, k3_bin, run_folder):
    k3("train", run_folder(out="whole", steps=60))
    config = run_folder(out="killed", steps=60)
    delay, kills = 0.15, 0
    for _ in range(30):
        process = subprocess.Popen([k3_bin, "train", str(config)], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=delay)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            delay *= 1.2  # a busy machine gets further each time
    k3("train", config)
    assert kills > 0
    name = "model/model-00001-of-00001.safetensors"
    assert (run_folder.folder / "killed" / name).read_bytes() == (
        run_folder.folder / "whole" / name).read_bytes()
    assert losses(run_folder.folder / "killed") == losses(run_folder.folder / "whole")


@pytest.mark.parametrize("change, words", [
    ({"num_experts_per_token": 9}, "num_experts_per_token"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_experts": 8, "num_expert_group": 3}, "num_expert_group"),
    ({"vocab_size": 1000}, "vocabulary"),
])
def test_models_that_cannot_be_are_refused_by_name(k3, run_folder, change, words):
    path = run_folder.folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(change)
    path.write_text(json.dumps(config))
    done = k3("train", run_folder(), code=1)
    assert words in done.stderr
    assert not (run_folder.folder / "run").exists()


def test_one_expert_and_one_document_train(k3, run_folder):
    path = run_folder.folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(num_experts=1, num_experts_per_token=1)
    path.write_text(json.dumps(config))
    k3("data", "prepare", CASES / "corpus.txt", "--valid", "0", "--out",
       run_folder.folder / "data", "--tokenizer", DEMO_MODEL)
    k3("train", run_folder(steps=3))
    assert all(float(loss) == float(loss) for _, loss in losses(run_folder.folder / "run"))


def test_an_unwritable_folder_and_a_second_run_are_refused(k3, k3_bin, run_folder):
    done = k3("train", run_folder(out="/proc/none/run"), code=1)
    assert "/proc/none/run" in done.stderr
    config = run_folder(out="busy", steps=100000)
    first = subprocess.Popen([k3_bin, "train", str(config)], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    log = run_folder.folder / "busy" / "log.csv"
    deadline = time.time() + 60
    while time.time() < deadline and not log.exists():
        time.sleep(0.05)
    try:
        done = k3("train", config, code=1)
        assert "another run is using this folder" in done.stderr
    finally:
        first.kill()
        first.wait()


def test_an_ablation_reports_every_run_and_continues(k3, run_folder):
    run_folder(steps=6)
    (run_folder.folder / "plan.toml").write_text(
        'base = "run.toml"\nout = "ablation"\nseeds = [1, 2]\nquestion = "Does it matter?"\n'
        'pairs = [["sign", "plain"]]\n'
        '[arms.sign.balance]\nmethod = "sign"\n'
        '[arms.plain]\nremove = ["attn_res_block_size"]\n'
        '[arms.plain.config.k3_variant.residual]\nmode = "plain"\n'
        '[arms.broken.train]\nbatch = 65536\nsequence = 200\naccumulate = 2\n')
    plan = run_folder.folder / "plan.toml"
    out = run_folder.folder / "ablation"
    first = k3("ablate", plan)
    assert "10 of 10 runs" in first.stdout
    report = (out / "report.md").read_text()
    assert report.startswith("# Does it matter?")
    assert "the run needs" in report and "every run failed" in report
    assert "k3 train ablation/sign/seed-2/run.toml" in report
    data = json.loads((out / "report.json").read_text())
    assert [arm["name"] for arm in data["arms"]] == ["base", "sign", "plain", "broken",
                                                      "sign+plain"]
    by_run = {(run["arm"], run["seed"]): run for run in data["runs"]}
    # The sign rule changes biases, not what a step learns before they move choices.
    assert by_run["base", 1]["loss"] != by_run["base", 2]["loss"]
    assert by_run["sign", 1]["loss"] == pytest.approx(by_run["base", 1]["loss"], abs=0.5)
    assert by_run["broken", 1]["error"]
    assert (out / "report.svg").read_text().count("<polyline") == 5

    models = {run: (out / run / "model" / "model-00001-of-00001.safetensors").stat().st_mtime_ns
              for run in ("base/seed-1", "sign+plain/seed-2")}
    k3("ablate", plan)  # nothing is left to do
    for run, time_ns in models.items():
        path = out / run / "model" / "model-00001-of-00001.safetensors"
        assert path.stat().st_mtime_ns == time_ns
    assert json.loads((out / "report.json").read_text())["runs"] == data["runs"]
    single = k3("train", out / "base" / "seed-1" / "run.toml")
    assert "finished at step 6" in single.stdout
