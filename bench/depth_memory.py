#!/usr/bin/env python3
"""Activations that `k3 train` plans for deeper models, by how sublayers join the stream.

usage: depth_memory.py K3_PROGRAM DATA     DATA: a folder written by `k3 data prepare`
The model is that of docs/ablations/small.json with 12, 24 and 48 layers; 8 rows of 256 tokens. Each
run is stopped once it has printed its plan.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

BASE = pathlib.Path(__file__).resolve().parents[1] / "docs/ablations/small.json"
MODES = [("plain", None), ("block_attn_res", 4), ("block_attn_res", 12), ("full_attn_res", None)]


def config(layers, mode, block):
    c = json.loads(BASE.read_text())
    text = c["text_config"]
    text["num_hidden_layers"] = layers
    every = range(1, layers + 1)
    text["linear_attn_config"]["full_attn_layers"] = [i for i in every if i % 3 == 0]
    text["linear_attn_config"]["kda_layers"] = [i for i in every if i % 3]
    del text["attn_res_block_size"]
    if block:
        text["attn_res_block_size"] = block
    else:
        text["k3_variant"] = {"residual": {"mode": mode}}
    return c


def planned(program, data, folder, c):
    (folder / "config.json").write_text(json.dumps(c))
    run = folder / "run.toml"
    run.write_text(f'[model]\nconfig = "config.json"\n[data]\ndir = "{data}"\n'
                   '[train]\nout = "run"\nsteps = 1\nbatch = 8\nsequence = 256\n')
    with subprocess.Popen([program, "train", str(run)], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as train:
        said = ""
        for line in train.stderr:
            said += line
            if found := re.search(r"activations ([\d.]+ \w+)", line):
                train.kill()
                return found[1]
    sys.exit(f"depth_memory.py: {said}")


def main(program, data):
    data = pathlib.Path(data).resolve()
    for mode, block in MODES:
        row = []
        for layers in (12, 24, 48):
            with tempfile.TemporaryDirectory() as folder:
                row.append(planned(program, data, pathlib.Path(folder), config(layers, mode, block)))
        print(f"{mode:15} {block or '':3} " + "  ".join(row), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
