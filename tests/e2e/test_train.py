"""k3 data prepare and k3 train: a small run, stopped and continued, and what is refused."""

import csv
import json
import os
import signal
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
