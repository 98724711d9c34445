"""inspect, plan, check and info: the commands that explain a model and a machine."""

import json
import os
import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

from models import GOLDEN, ROOT, TINY_MODELS, base, ids_text  # noqa: F401 (base is a fixture)

CONFIGS = ROOT / "tests" / "configs"
K3 = CONFIGS / "k3-text-config.json"
DERIVED = json.loads(K3.read_text())["_derived"]  # counts of the specification


@pytest.fixture(scope="module")
def made_folder(tmp_path_factory):
    """made_folder(*options): K3's 497,220 tensors as an index, with --headers also as shards."""
    made = {}

    def make(*options):
        if options not in made:
            out = tmp_path_factory.mktemp("k3")
            subprocess.run([sys.executable, ROOT / "tools" / "make_index.py", K3, out, "--shards",
                            "96", "--wrap", "--vision", *options], check=True, capture_output=True)
            made[options] = out
        return made[options]

    return make


def seconds_to_parse(folder):
    """Processor time of Python's json for the index and every header."""
    start = time.process_time()
    json.loads((folder / "model.safetensors.index.json").read_bytes())
    for shard in folder.glob("*.safetensors"):
        with shard.open("rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return time.process_time() - start


def findings(report):
    return {f["topic"]: f["text"] for f in report["findings"]}


# ---- inspect


@pytest.mark.parametrize("name", TINY_MODELS)
def test_inspect_tiny_models(k3, name):
    report = k3("inspect", GOLDEN / name, "--json").json()
    assert report["source"] == "headers of all shards" and report["problems"] == []
    assert report["parameters"] > report["active_parameters"] > 0
    assert sum(r["parameters"] for r in report["roles"]) == report["parameters"]
    assert sum(g["count"] for g in report["groups"]) == report["tensors"]
    assert all(f["evidence"] for f in report["findings"])
    decay = findings(report)["decay"]
    assert ("bounded at -5" in decay) == (name == "tiny-k3")


def test_inspect_demo_and_its_text(k3):
    report = k3("inspect", "--json").json()
    assert abs(report["parameters"] - 27e6) < 0.5e6
    text = k3("inspect", "--tensors").stdout
    assert "half of hidden" in text and "what weights cannot show" in text
    assert "model.layers.*.self_attn.kv_a_proj_with_mqa.weight" in text


@pytest.mark.parametrize("options,source", [
    ((), "shapes as the config implies; no shard was read"),
    (("--headers",), "headers of all shards"),
])
def test_inspect_the_full_k3(k3_bin, made_folder, options, source):
    folder = made_folder(*options)
    done = subprocess.Popen([k3_bin, "inspect", folder, "--json"], stdout=subprocess.PIPE)
    text = done.stdout.read()
    _, status, usage = os.wait4(done.pid, 0)
    done.returncode = os.waitstatus_to_exitcode(status)
    assert done.returncode == 0
    report = json.loads(text)
    assert report["source"] == source and report["problems"] == []
    assert report["tensors"] == DERIVED["tensors"] and len(report["shards"]) == DERIVED["shards"]
    padding = 0 if options else 69 * 32  # A_log is padded; only headers show it
    assert report["parameters"] == DERIVED["total_params"] - padding
    assert report["active_parameters"] == DERIVED["active_params"] - padding
    assert report["experts"]["bytes_each"] == DERIVED["expert_bytes"]
    assert report["vision"]["tensors"] == 168
    if options:
        assert report["experts"]["in_one_piece"] == report["experts"]["count"] == 92 * 896
    facts = findings(report)
    assert facts["key-value compression"] == "576 values a token and layer instead of 24576"
    assert facts["experts"].startswith("experts run at width 3584, half of hidden")
    assert facts["residual"] == "cross-layer residual (attention over depth), block 12"
    assert usage.ru_maxrss < 1 << 20, "more than 1 GiB"  # in KiB
    # Ten seconds on an ordinary machine; a slow one is measured by what Python takes for the same
    # text: the program takes 3 to 5 times that, everything included.
    took, python = usage.ru_utime + usage.ru_stime, seconds_to_parse(folder)
    assert took < max(10, 10 * python), f"{took:.1f} s of processor time, Python's json {python:.1f}"


def test_inspect_lists_vision_and_problems(k3, model_copy, edit_json):
    copy = model_copy(GOLDEN / "tiny-k3")
    edit_json(copy / "config.json",
              lambda c: c["text_config"].update(intermediate_size=77, vocab_size=10 ** 5))
    out = k3("inspect", copy, code=1)
    assert "wrong shape" in out.stdout and "problems" in out.stderr
    assert "mlp.gate_proj.weight" in out.stdout


def test_inspect_diff(k3):
    same = k3("inspect", GOLDEN / "tiny-k3", "--diff", GOLDEN / "tiny-k3")
    assert same.stdout == "no difference\n"
    variants = GOLDEN / "variants"
    out = k3("inspect", variants / "released", "--diff", variants / "gated").stdout
    assert "+ residual: gated" in out and "self_attn.q_proj" not in out
    lines = k3("inspect", variants / "released", "--diff", variants / "gated", "--json").json()
    assert lines["lines"] == out.splitlines()[2:]


def test_inspect_refusals(k3, tmp_path):
    assert "nowhere" in k3("inspect", tmp_path / "nowhere", code=1).stderr
    assert "config.json" in k3("inspect", tmp_path, code=1).stderr
    (tmp_path / "config.json").write_text("{}")
    assert "hidden_size" in k3("inspect", tmp_path, code=1).stderr


# ---- plan


def plan(k3, *args, code=0):
    return k3("plan", *args, "--no-measure", "--json", code=code).json()


def part(report, name):
    return next(p for p in report["parts"] if p["name"] == name)


@pytest.mark.parametrize("context", [4096, 131072, 1048576])
def test_plan_for_k3_has_the_numbers_of_the_specification(k3, context):
    report = plan(k3, K3, "--context", context, "--memory", "2T")
    assert report["row_bytes_per_token_bf16"] == 27648
    assert part(report, "KDA state")["bytes"] == 434_110_464
    assert part(report, "MLA rows")["bf16_bytes"] == 27648 * context
    assert abs(part(report, "weights: routed expert")["bytes"] - 1.447e12) < 1e9
    assert report["verdict"] == "fits"
    assert sum(p["bytes"] for p in report["parts"]) == report["total_bytes"]


def test_plan_says_what_does_not_fit_and_what_would(k3):
    report = plan(k3, K3, "--context", 131072, "--memory", "64G", code=3)
    assert report["verdict"] == "from disk" and report["largest_context"] > 131072
    out = k3("plan", K3, "--context", 131072, "--memory", "2G", "--no-measure", code=3)
    assert "DOES NOT FIT" in out.stdout and "would fit" in out.stdout
    assert "2000000000" in out.stderr
    largest = plan(k3, K3, "--context", 131072, "--memory", "2T")["largest_batch"]
    assert plan(k3, K3, "--context", 131072, "--memory", "2T", "--batch", largest)["verdict"] == "fits"
    plan(k3, K3, "--context", 131072, "--memory", "2T", "--batch", largest + 1, code=3)


def test_plan_works_with_a_config_alone(k3, tmp_path):
    folder = tmp_path / "only"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "kimi-linear-48b-config.json").read_text())
    report = plan(k3, folder, "--memory", "1T")
    assert "no shards" in report["source"] and report["row_bytes_per_token_bf16"] == 7 * 576 * 2


def test_plan_sweep_svg_and_measured_bounds(k3, tmp_path):
    svg = tmp_path / "plan.svg"
    report = k3("plan", "--sweep", "--svg", svg, "--json").json()
    heaps = [p["heap_bytes"] for p in report["sweep"]]
    assert heaps == sorted(heaps) and len(heaps) >= 2
    root = ElementTree.parse(svg).getroot()
    assert root.tag.endswith("svg") and len(list(root.iter())) > 10
    assert report["machine"]["read_bytes_per_s"] > 1e8
    assert report["decode"]["tokens_per_s_at_most"] > 0
    assert "curve" not in k3("plan", "--sweep", "--no-measure").stderr
    assert "bound by" in k3("plan").stdout


def test_plan_bounds_are_bounds(k3):
    plan_s = k3("plan", "--context", 128, "--json").json()["decode"]["seconds_at_least"]
    bench = k3("bench", "--force", "--prefill", "8", "--decode", 32, "--repeats", 2, "--json").json()
    decode = next(r for r in bench["results"] if r["phase"] == "decode")
    assert 1 / decode["fastest"] > plan_s / 3  # a busy machine may measure itself too slow


@pytest.mark.parametrize("value", ["0", "-1", "12Q", "nan", "", "1e9"])
def test_plan_refuses_bad_sizes(k3, value):
    assert "--memory" in k3("plan", "--memory", value, code=2).stderr
    assert "--batch" in k3("plan", "--batch", 0, code=2).stderr


def test_plan_refuses_contexts_past_the_limit(k3):
    out = k3("plan", "--context", 4097, code=2).stderr
    assert "--context" in out and "4097" in out and "4096" in out
    assert "--context" in k3("plan", "--context", 0, code=2).stderr


# ---- the engine respects the plan


def test_run_refuses_before_work_when_memory_is_short(k3):
    out = k3("run", "-p", "hi", "-n", 4, "--ctx", 4096, "--memory", "2M", code=3)
    assert out.stdout == "" and "4096 tokens" in out.stderr and "2000000" in out.stderr
    assert out.stderr.count("\n") == 1
    k3("run", "-p", "hi", "-n", 4, "--memory", "200M")
    # Without --ctx only what the run can reach counts.
    assert k3("run", "-p", "hi", "-n", 1000, "--memory", "3M", code=None).exit_code in (0, 3)


def measured(k3, model, n, tmp_path):
    """Peak resident bytes of a run that fills a context of n tokens, and the plan for it."""
    vocab = json.loads((model / "config.json").read_text())
    vocab = vocab.get("text_config", vocab)["vocab_size"]
    ids = tmp_path / "ids.txt"
    ids.write_text(ids_text([(i * 7919) % (vocab - 300) for i in range(n - 8)]))
    run = k3("run", model, "--ids", f"@{ids}", "-n", 8, "--temp", 0, "--json", "--threads", 2,
             timeout=600).json()
    peak = run["memory"]["peak_resident_bytes"]
    if peak == 0:
        pytest.skip("this system does not tell resident memory")
    return peak, plan(k3, model, "--context", n, "--threads", 2)


def test_resident_memory_of_the_demo_is_the_plan(k3, demo_model, tmp_path):
    peak, report = measured(k3, demo_model, 3000, tmp_path)
    assert abs(peak / report["total_bytes"] - 1) < 0.05, (peak, report["total_bytes"])


def test_resident_memory_of_a_large_model_is_the_plan(k3, tmp_path):
    """0.8e9 parameters, random weights."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free < 3 << 30:
        pytest.skip("less than 3 GiB of disk are free")
    model = tmp_path / "large"
    subprocess.run([sys.executable, ROOT / "tools" / "make_checkpoint.py",
                    ROOT / "tools" / "configs" / "mid-k3.json", model], check=True,
                   capture_output=True)
    peak, report = measured(k3, model, 520, tmp_path)
    assert abs(peak / report["total_bytes"] - 1) < 0.05, (peak, report["total_bytes"])


def test_a_memory_limit_of_the_process_is_not_exceeded_by_planning(k3_bin):
    """Planning 2.8e12 parameters takes no memory to speak of."""
    limit = 1 << 30
    done = subprocess.run([k3_bin, "plan", K3, "--memory", "2T", "--no-measure"],
                          capture_output=True, timeout=120,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert done.returncode == 0, done.stderr


# ---- check


def test_check_demo(k3):
    report = k3("check", "--tokens", 100, "--json").json()
    assert report["ok"] and report["tokens"] == 100
    rows = {(r["math"], r["name"]): r for r in report["rows"]}
    for name in ("cut anywhere", "batched", "forked", "saved and restored", "threads",
                 "instruction sets"):
        assert rows["exact", name]["verdict"] == "PASS" and rows["exact", name]["different"] == 0
    assert rows["fast", "cut on the grid"]["verdict"] == "PASS"
    fast = rows["fast", "fast against exact"]
    assert fast["verdict"] == "measured" and fast["argmax_agreement"] > 0.95


def test_check_text_and_options(k3, base):
    text = k3("check", base, "--tokens", 20).stdout
    assert "all identities hold" in text and "FAIL" not in text
    assert "--tokens" in k3("check", "--tokens", 7, code=2).stderr


def test_check_reports_a_model_whose_scores_are_no_numbers(k3, tmp_path):
    subprocess.run([sys.executable, ROOT / "tests" / "cases" / "checkpoint" /
                    "make_bad_checkpoints.py", tmp_path, "--only", "ck20_nan_in_output_layer"],
                   check=True, capture_output=True)
    assert "lm_head" in k3("check", tmp_path / "ck20_nan_in_output_layer", code=1).stderr


# ---- info


def test_info_table_has_every_op_of_the_header_and_what_ran(k3):
    header = (ROOT / "src" / "k3" / "kernels" / "backend.h").read_text()
    block = header[header.index("#define K3_FOR_EACH_OP(X)"):header.index("/// Shapes and aliasing")]
    names = {part.split(")")[0] for part in block.split("X(")[1:]}
    info = k3("info", "--json").json()
    table = {row["op"]: row["backends"] for row in info["ops"]}
    assert len(names) >= 18 and names <= set(table)
    for op, backends in table.items():
        assert backends["ref"]["state"] == "reference"
        assert backends["scalar"]["state"] == "agrees", op
        assert all(b["state"] != "differs" for b in backends.values()), op
        in_use = backends[info["instruction_set_in_use"]]
        assert in_use["state"] == "agrees" and in_use["rel_l2"] < 1e-4
    assert "KdaChunk" in k3("info").stdout
