"""k3 bench: figures with their method, one at a time on a machine that is quiet."""

import fcntl
import os
import statistics
import time

import pytest

from models import base  # noqa: F401 (a fixture)


def test_bench_reports_what_it_measured(k3, base):
    out = k3("bench", base, "--prefill", "5,20", "--decode", 4, "--repeats", 2, "--batch", 2,
             "--force", "--check", 3, "--profile", "--json").json()
    assert [(r["phase"], r["tokens"]) for r in out["results"]] == [
        ("prefill", 5), ("prefill", 20), ("decode", 4)]
    for r in out["results"]:
        assert 0 < r["slowest"] <= r["tokens_per_s"] <= r["fastest"]
        assert len(r["samples"]) == 2, "the warm-up does not count"
    assert out["math"] == "exact"
    assert out["reference_check"]["passed"] and out["reference_check"]["tokens"] == 3
    ops = {p["op"]: p for p in out["results"][0]["profile"]}
    assert ops["KdaRecurrent"]["gflop_per_s"] > 0 and out["ceilings"]["read_gb_per_s"] > 0
    assert abs(sum(p["share"] for p in out["results"][0]["profile"]) - 1) < 1e-6
    assert ops["RmsNorm"]["gb_per_s"] is None, "nobody counts its bytes"
    assert "tok/s" in k3("bench", base, "--prefill", "5", "--decode", 2, "--repeats", 1,
                         "--force").stdout


@pytest.mark.parametrize("repeats", [3, 4])
def test_bench_statistics_are_those_of_the_repeats(k3, base, repeats):
    out = k3("bench", base, "--prefill", "24,40", "--decode", 6, "--repeats", repeats, "--force",
             "--json").json()
    for r in out["results"]:
        assert len(r["samples"]) == repeats
        assert r["tokens_per_s"] == pytest.approx(statistics.median(r["samples"]))
        assert (r["slowest"], r["fastest"]) == (min(r["samples"]), max(r["samples"]))


@pytest.mark.parametrize("batch", [1, 4])
def test_bench_figures_are_tokens_by_time(k3, demo_model, batch):
    """The profile times the same passes apart: as often, and as long in all, as the figures say."""
    start = time.monotonic()
    out = k3("bench", demo_model, "--prefill", 200, "--decode", 12, "--repeats", 3, "--batch", batch,
             "--force", "--profile", "--json").json()
    wall = time.monotonic() - start
    for r, passes in zip(out["results"], (1, 12)):
        seconds = sum(r["tokens"] * batch / rate for rate in r["samples"])
        in_ops = sum(p["seconds"] for p in r["profile"])
        assert 0.3 * seconds < in_ops < seconds < wall
        wide = next(p for p in r["profile"] if p["op"] == "Gemm 768x256 bf16")  # of every token
        rows = batch * (r["tokens"] if passes == 1 else 1)
        assert wide["gflop_per_s"] * wide["seconds"] * 1e9 == pytest.approx(
            wide["calls"] * 2 * 768 * 256 * rows)
        assert wide["gb_per_s"] * wide["seconds"] * 1e9 == pytest.approx(
            wide["calls"] * 2 * 768 * 256)
        calls = {p["op"]: p["calls"] for p in r["profile"]}
        assert calls["Embed"] == 3 * passes, "neither the warm-up nor the prompt of decoding counts"
        assert r["tokens_per_s"] / r["tokens_per_cpu_s"] < 1.1 * out["threads"]


@pytest.mark.parametrize("asked", ["map", "copy"])
def test_bench_says_where_weights_lie(k3, base, asked):
    out = k3("bench", base, "--prefill", 5, "--decode", 0, "--repeats", 1, "--force", "--weights",
             asked, "--json").json()
    assert out["weights"] == asked


@pytest.mark.parametrize("args", [("--prefill", "5,99999999"), ("--prefill", 0),
                                  ("--decode", 99999999), ("--prefill", "", "--decode", 0)])
def test_bench_refuses_lengths_before_it_measures(k3, base, args):
    done = k3("bench", base, "--repeats", 1, "--force", *args, code=2)
    assert args[0] in done.stderr and not done.stdout


def test_bench_refuses_more_than_the_memory(k3, base):
    args = ("bench", base, "--prefill", 64, "--decode", 0, "--repeats", 1, "--force", "--batch")
    k3(*args, 1, "--memory", "100M")
    assert "bytes of memory" in k3(*args, 1024, "--memory", "100M", code=3).stderr


def refused_lock(k3, base, lock):
    return k3("bench", base, "--prefill", "5", env={"K3_BENCH_LOCK": str(lock)}, code=1).stderr


def test_bench_waits_for_nobody(k3, base, tmp_path):
    with open(tmp_path / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = refused_lock(k3, base, tmp_path / "lock")
        assert "another k3 bench" in said and "--force" in said
        forced = k3("bench", base, "--prefill", 5, "--decode", 0, "--repeats", 1, "--force",
                    "--json", env={"K3_BENCH_LOCK": str(tmp_path / "lock")}).json()
        assert forced["forced"] and not forced["alone"]


def test_bench_tells_a_bad_lock_from_another_bench(k3, base, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "aim")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("link", "symbolic link"), ("folder", "not a file"), ("pipe", "not a file"),
                      ("no/where", "No such file")):
        said = refused_lock(k3, base, tmp_path / name)
        assert why in said and "another k3 bench" not in said and "--force" in said
    assert not (tmp_path / "aim").exists()


def test_bench_lock_of_others_can_be_taken(k3, base, tmp_path):
    """A lock file that a finished run left is no obstacle, and any user can open it."""
    lock = tmp_path / "lock"
    before = os.umask(0o077)
    try:
        k3("bench", base, "--prefill", "5", "--decode", 0, "--repeats", 1, "--force",
           env={"K3_BENCH_LOCK": str(lock)})
    finally:
        os.umask(before)
    assert lock.stat().st_mode & 0o777 == 0o644
    lock.chmod(0o444)  # as another user's file is: readable only
    out = k3("bench", base, "--prefill", "5", "--decode", 0, "--repeats", 1, "--force", "--json",
             env={"K3_BENCH_LOCK": str(lock)}).json()
    assert out["alone"]
