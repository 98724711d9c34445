"""The demo model's files are whole: everything else leans on them."""

import hashlib
import json
import struct

import pytest

import tokenizer_oracle
from models import GOLDEN

# Changing the model means changing its card, the golden values and this list in one commit.
SHA256 = {
    "model-00001-of-00002.safetensors": "d8fd47adfc8a1f502ff1cf6c48b3a7236b87a35d16bf943bc90ec2bd1ea3b032",
    "model-00002-of-00002.safetensors": "3d0153fa5e653bfdfaa91a280a92fee2cbd9bf2927de244a9a8ecbeca7160234",
    "tiktoken.model": "ccbabbb3b3e3bfcd183f3ae86ee10d00ceceb9df3e4601e6533e6898ba1f4a99",
}


def test_files_are_the_released_ones(demo_model):
    for name, expected in SHA256.items():
        assert hashlib.sha256((demo_model / name).read_bytes()).hexdigest() == expected, name


def test_index_and_shards_name_the_same_tensors(demo_model):
    index = json.loads((demo_model / "model.safetensors.index.json").read_text())["weight_map"]
    in_shards = {}
    for shard in sorted(set(index.values())):
        with open(demo_model / shard, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        in_shards.update({name: shard for name in header if name != "__metadata__"})
    assert in_shards == index


def test_a_copy_can_be_changed(model_copy, edit_json):
    folder = model_copy()
    edit_json(folder / "config.json", lambda config: config.update(model_type="other"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "other"


@pytest.fixture
def books():
    """The validation text of the demo model; large, so not part of the repository."""
    path = tokenizer_oracle.data_file("books-valid.txt")
    if path is None:
        pytest.skip("SKIP books-valid.txt is neither in $K3_DATA nor in ../shared/data")
    return path


def test_perplexity_is_the_reference(k3, books):
    want = json.loads((GOLDEN / "demo.json").read_text())
    got = k3("eval", "ppl", "--text", books, "--docs", len(want["valid_docs"]), "--tokens", 512,
             "--math", "exact", "--json").json()
    assert len(got["documents"]) == len(want["valid_docs"])
    for document, nats in zip(got["documents"], want["valid_docs"]):
        assert abs(document["nats"] - nats) < 1e-6  # measured: 5e-8
    assert abs(got["mean_nats"] - want["valid_mean"]) < 1e-6
