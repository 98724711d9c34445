"""Threads on less than a processor: a quota of half a core, and an affinity of one."""
import json
import os
import subprocess

import pytest

ARGS = ["--prefill", "64", "--decode", "8", "--repeats", "2", "--force", "--json"]


@pytest.fixture
def half_core():
    """Path of the file that a process writes itself into to have half a core."""
    v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    group = f"/sys/fs/cgroup/{'' if v2 else 'cpu/'}k3-test-{os.getpid()}"
    try:
        os.mkdir(group)
    except OSError as e:
        pytest.skip(f"SKIP: no control group can be made: {e}")
    try:
        try:
            for name, value in ([("cpu.max", "50000 100000")] if v2 else
                                [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "50000")]):
                with open(f"{group}/{name}", "w", encoding="ascii") as file:
                    file.write(value)
        except OSError as e:
            pytest.skip(f"SKIP: no quota can be set: {e}")
        yield f"{group}/cgroup.procs"
    finally:
        os.rmdir(group)


def bench(k3_bin, threads, before=None):
    done = subprocess.run([k3_bin, "bench", *ARGS, "--threads", str(threads)], preexec_fn=before,
                          capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


def test_half_a_core_wastes_little(k3_bin, half_core):
    def enter():
        with open(half_core, "w", encoding="ascii") as file:
            file.write("0")

    free = bench(k3_bin, 1)["results"]
    for threads in (1, 2):
        for got, want in zip(bench(k3_bin, threads, enter)["results"], free):
            # A worker that is put aside with a piece of work costs waiting, not processor time.
            assert got["tokens_per_cpu_s"] > 0.4 * want["tokens_per_cpu_s"], (threads, got, want)


def test_half_a_core_gives_one_thread(k3_bin, half_core):
    """Also where the quota is that of a group inside the mount, as of a service."""
    def enter():
        with open(half_core, "w", encoding="ascii") as file:
            file.write("0")

    assert bench(k3_bin, 0, enter)["threads"] == 1


def test_affinity_of_one_gives_one_thread(k3_bin):
    one = min(os.sched_getaffinity(0))

    def pin():
        os.sched_setaffinity(0, {one})

    alone = bench(k3_bin, 0, pin)
    assert alone["threads"] == 1
    two = bench(k3_bin, 2, pin)  # more threads than processors: slower, but not by spinning
    for got, want in zip(two["results"], alone["results"]):
        assert got["tokens_per_cpu_s"] > 0.4 * want["tokens_per_cpu_s"], (got, want)
