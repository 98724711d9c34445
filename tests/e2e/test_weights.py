"""--weights: where they lie, and what is left of a run when its file goes away."""
import os
import pathlib
import resource

import pytest

MODEL_BYTES = 29_300_000  # of the demo model's files
ARGS = ["bench", "--force", "--prefill", 4, "--decode", 0, "--repeats", 1, "--json"]


@pytest.fixture
def memory_group():
    """memory_group(bytes): path of the file that a process writes itself into to have so much."""
    v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    group = pathlib.Path("/sys/fs/cgroup", "" if v2 else "memory", f"k3-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"SKIP: no control group can be made: {e}")

    def limit(most):
        try:
            name = "memory.max" if v2 else "memory.limit_in_bytes"
            (group / name).write_text(str(most), encoding="ascii")
        except OSError as e:
            pytest.skip(f"SKIP: no limit can be set: {e}")
        return group / "cgroup.procs"

    yield limit
    group.rmdir()


@pytest.mark.parametrize("most, where", [(1.5 * MODEL_BYTES, "map"), (6 * MODEL_BYTES, "copy")])
def test_auto_copies_when_twice_their_size_is_free(k3, memory_group, most, where):
    procs = memory_group(int(most))
    out = k3(*ARGS, before=lambda: procs.write_text("0", encoding="ascii")).json()
    assert out["weights"] == where


def test_no_memory_for_a_copy(k3):
    """auto does without, copy says what it lacks."""
    def limit(most):
        return lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most))

    for most in range(20_000_000, 400_000_000, 10_000_000):  # what the program alone takes varies
        if k3(*ARGS, "--weights", "map", before=limit(most), code=None).exit_code == 0:
            break
    refused = k3(*ARGS, "--weights", "copy", before=limit(most), code=3)
    assert "no memory for a copy" in refused.stderr and ".safetensors" in refused.stderr
    assert k3(*ARGS, "--weights", "auto", before=limit(most)).json()["weights"] == "map"


@pytest.mark.parametrize("where", ["map", "copy"])
def test_same_text_wherever_they_lie(k3, where):
    text = ["run", "-p", "Once upon a time", "-n", 12, "--temp", 0, "--weights"]
    assert k3(*text, where).stdout == k3(*text, "auto").stdout
