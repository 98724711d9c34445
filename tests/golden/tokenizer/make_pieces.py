#!/usr/bin/env python3
"""Writes pieces.json: random texts split by the Kimi pattern with `regex` (Unicode 16.0.0).

.venv/bin/python tests/golden/tokenizer/make_pieces.py
"""

import json
import pathlib
import random

import regex

UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Script=Han}]"
LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Script=Han}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = regex.compile(
    "(?V1)"
    + "|".join(
        [
            r"\p{Script=Han}+",
            LEAD + UPPER + "*" + LOWER + "+" + TAIL,
            LEAD + UPPER + "+" + LOWER + "*" + TAIL,
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
)

# One or more of every kind that the pattern tells apart, the odd ones in RARE: title case, modifier
# letters, marks (one of them Han), Han numbers and symbols, CJK marks not Han, unassigned.
COMMON = list("aabbzAABZ019  \t\r\n''.-!") + ["'s", "'LL", "'re", "中", "文", "é"]
RARE = list(
    "\u01c5\u02b0\u00aa\u0301\u0903\U00016ff0\u3005\u3007\u3021\u2e80\u3006\u3001\u30fc\u0e20"
    "\u0663\u00b2\u2167\u017f\u00a0\u2003\u3000\u0085\u180e\u200b\u200d\ufeff\x00\x1c\u0378\u2603"
    "\u0295\u1c89\U0001f600\U0001e900\U0001e922\U00020000\U000323af\U000e0100\U0010ffff"
) + ["'ſ"]


def texts(rng):
    for _ in range(500):
        yield "".join(
            rng.choice(COMMON if rng.random() < 0.6 else RARE) for _ in range(rng.randint(1, 14))
        )
    for _ in range(100):
        yield "".join(
            chr(
                rng.choice(
                    [
                        rng.randint(0, 0x2FF),
                        rng.randint(0, 0xD7FF),
                        rng.randint(0xE000, 0x33000),
                        rng.randint(0x1E000, 0x1F000),
                    ]
                )
            )
            for _ in range(rng.randint(5, 20))
        )


def main():
    rows = []
    for text in texts(random.Random(16)):
        pieces = PATTERN.findall(text)
        assert "".join(pieces) == text
        rows.append(json.dumps(pieces, separators=(",", ":")))
    target = pathlib.Path(__file__).with_name("pieces.json")
    target.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
