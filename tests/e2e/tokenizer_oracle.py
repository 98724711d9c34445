"""The reference encoder for comparisons: tiktoken with the Kimi pattern and the cuts around it."""

import base64
import pathlib
import os

ROOT = pathlib.Path(__file__).resolve().parents[2]

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"\p{Han}+",  # in this engine the property Script, not Script_Extensions
        LEAD + UPPER + "*" + LOWER + "+" + TAIL,
        LEAD + UPPER + "+" + LOWER + "*" + TAIL,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
PART_CHARS, RUN_CHARS = 400_000, 25_000


def load_ranks(path):
    ranks = {}
    for line in pathlib.Path(path).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def encoding(ranks):
    import tiktoken

    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def parts(text):
    """The parts of a text that are matched by themselves (spec section 12)."""
    for base in range(0, len(text), PART_CHARS):
        part, first, run, last = text[base : base + PART_CHARS], 0, 0, None
        for i, ch in enumerate(part):
            space = ch.isspace()
            run, last = (run + 1 if space == last else 1), space
            if run > RUN_CHARS:
                yield part[first:i]
                first, run = i, 1
        yield part[first:]


def encode(enc, text):
    ids = []
    for part in parts(text):
        ids += enc.encode_ordinary(part)
    return ids


def data_file(name):
    """A file of $K3_DATA, or of shared/data beside the repository; None when absent."""
    for folder in (os.environ.get("K3_DATA"), ROOT.parent / "shared" / "data"):
        if folder and (pathlib.Path(folder) / name).is_file():
            return pathlib.Path(folder) / name
    return None
