"""POST /slots/ID?action=save|restore|erase: a text is warm again after a restart."""

import json

import pytest

from models import CASES, base  # noqa: F401 (a fixture)
from serving import serving

NAMES = json.loads((CASES / "server" / "slot_names.json").read_text())["names"]
TEXT = "The lighthouse keeper counted the ships, one after the other, until the fog came in. " * 6
CHAT = [{"role": "system", "content": TEXT}, {"role": "user", "content": "How many ships?"}]
ASK = {"temperature": 0, "max_tokens": 12}


def slot(server, action, body, headers=None):
    return server.post(f"/slots/0?action={action}", body, headers=headers)


@pytest.mark.parametrize("math", ["exact", "fast"])
def test_warm_after_a_restart_is_like_cold(k3_bin, base, tmp_path, math):
    """In exact mode, and as the prompts are cut on the grid in fast mode too."""
    options = ["--math", math, "--state-dir", tmp_path]
    longer = {**ASK, "prompt": TEXT + "Then she"}
    other_question = {**ASK, "messages": [CHAT[0], {"role": "user", "content": "Who counted?"}]}
    with serving(k3_bin, base, *options) as s:
        cold = s.post("/v1/completions", {**longer, "cache_prompt": False}).json()
        cold_chat = s.chat({**other_question, "cache_prompt": False}).json()
        assert cold["usage"]["cached_tokens"] == 0
        saved = slot(s, "save", {"filename": "ships.bin", "prompt": TEXT}).json()
        assert saved["id_slot"] == 0 and saved["filename"] == "ships.bin"
        assert saved["n_saved"] > 100 and saved["timings"]["save_ms"] > 0
        path = tmp_path / "ships.bin"
        assert saved["n_written"] == path.stat().st_size and path.stat().st_mode & 0o777 == 0o600
        reply = slot(s, "save", {"filename": "chat.bin", "messages": CHAT})
        assert reply.status == 200, reply
    with serving(k3_bin, base, *options) as s:
        for name in ("ships.bin", "chat.bin"):
            reply = slot(s, "restore", {"filename": name})
            assert reply.status == 200, reply
            assert reply.json()["n_read"] == (tmp_path / name).stat().st_size
            assert name != "ships.bin" or reply.json()["n_restored"] == saved["n_saved"]
        warm = s.post("/v1/completions", {**longer, "id_slot": 5}).json()
        assert warm["choices"] == cold["choices"]
        assert warm["usage"]["cached_tokens"] >= saved["n_saved"] - (64 if math == "fast" else 0)
        warm_chat = s.chat(other_question).json()
        assert [c["message"] for c in warm_chat["choices"]] == [
            c["message"] for c in cold_chat["choices"]]
        assert warm_chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        by_slot = s.post("/slots/5?action=save", {"filename": "chat.bin"}).json()
        assert by_slot["id_slot"] == 5 and by_slot["n_saved"] == warm["usage"]["prompt_tokens"]
        assert slot(s, "erase", {"filename": "chat.bin"}).status == 200
        assert slot(s, "restore", {"filename": "chat.bin"}).status == 404
    assert [p.name for p in tmp_path.iterdir()] == ["ships.bin"]


def test_sv16_names_lead_nowhere(k3_bin, base, tmp_path):
    folder, outside = tmp_path / "states", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "linked").write_bytes(b"untouched")
    (folder / "link.bin").symlink_to(outside / "linked")
    with serving(k3_bin, base, "--state-dir", folder, "--api-key", "secret") as s:
        key = {"Authorization": "Bearer secret"}
        for name in [*NAMES, "a\0b", "a" * 129, ".hidden", None, 7, ["a"]]:
            for action in ("save", "restore", "erase"):
                reply = slot(s, action, {"filename": name, "prompt": "Hello there"}, key)
                assert reply.status == 400 and reply.error()["param"] == "filename", (name, reply)
        good = {"filename": "good.bin", "prompt": "Hello there"}
        assert slot(s, "save", good).status == 401, "files are for those with a key"
        for path, param in (("/slots/0", "action"), ("/slots/0?action=copy", "action"),
                            ("/slots/x?action=save", "id_slot"), ("/slots/-1?action=save", "id_slot")):
            reply = s.post(path, good, headers=key)
            assert reply.status == 400 and reply.error()["param"] == param, reply
        assert slot(s, "save", {"filename": "good.bin"}, key).error()["param"] == "prompt"
        assert slot(s, "save", {**good, "prompt": ["a", "b"]}, key).error()["param"] == "prompt"
        assert slot(s, "save", good, key).status == 200
    assert (outside / "linked").read_bytes() == b"untouched"
    assert sorted(p.name for p in folder.iterdir()) == ["good.bin", "link.bin"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "states"]


def test_a_state_of_another_model_or_a_damaged_one(k3_bin, k3, base, tmp_path):
    from conftest import DEMO_MODEL
    good = {"filename": "a.bin", "prompt": "Once upon a time there was a lighthouse"}
    options = ["--state-dir", tmp_path]
    with serving(k3_bin, DEMO_MODEL, *options) as s:
        assert slot(s, "save", good).status == 200
    kept = (tmp_path / "a.bin").read_bytes()
    with serving(k3_bin, base, *options, "--state-dir-limit", len(kept) + 100) as s:
        error = slot(s, "restore", good).error()
        assert error["code"] == "invalid_state" and "another model" in error["message"]
        assert slot(s, "save", {**good, "filename": "b.bin"}).error()["code"] == "state_dir_full"
        for bad in (kept[:-1], kept[:100] + bytes([kept[100] ^ 1]) + kept[101:], b"", b"K3SAVED\0"):
            (tmp_path / "a.bin").write_bytes(bad)
            reply = slot(s, "restore", good)
            assert reply.status == 400 and reply.error()["code"] == "invalid_state", bad[:20]
            assert str(tmp_path) not in reply.body.decode()
            assert (tmp_path / "a.bin").read_bytes() == bad
        s.alive()
    r = k3("serve", base, "--port", 0, "--state-dir", tmp_path / "no", code=1)
    assert "no: cannot open the folder" in r.stderr
