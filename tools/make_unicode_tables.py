#!/usr/bin/env python3
"""Writes src/k3/tokenizer/unicode_tables.cc from the pinned `regex` module.

Run with the project's virtual environment (tests/requirements.txt):
    .venv/bin/python tools/make_unicode_tables.py           rewrite the file
    .venv/bin/python tools/make_unicode_tables.py --check   exit 1 when it is out of date

The table maps every code point to a set of CharClass flags (unicode_tables.h). It has two stages:
`kBlockOf` gives the block of 128 code points, `kBlocks` packs two 4-bit indices into `kFlags` in
every byte.
"""

import argparse
import importlib.metadata
import pathlib
import re
import sys

import regex

UNICODE_VERSION = "16.0.0"  # what tiktoken's pinned version carries; see docs/tokenizer.md
BLOCK = 128
LATE_FIRST, LATE_LAST = 0xE0100, 0xE01EF  # variation selectors, far behind everything else
TARGET = pathlib.Path(__file__).resolve().parent.parent / "src/k3/tokenizer/unicode_tables.cc"

# Bit values of CharClass in unicode_tables.h.
HAN, LETTER, NUMBER, UPPER, LOWER, SPACE, NEWLINE = (1 << i for i in range(7))


def check_version():
    text = importlib.metadata.distribution("regex").read_text("METADATA") or ""
    found = re.search(r"supports Unicode ([0-9.]+[0-9])", text)
    if not found or found.group(1) != UNICODE_VERSION:
        sys.exit(
            f"regex {regex.__version__} has Unicode {found.group(1) if found else 'unknown'}, "
            f"expected {UNICODE_VERSION}: install tests/requirements.txt"
        )


def flags_of_all():
    flags = [0] * 0x110000
    text = "".join(map(chr, range(0x110000)))

    def mark(pattern, bit):
        for m in regex.finditer(pattern, text):
            for at in range(m.start(), m.end()):
                flags[at] |= bit

    mark(r"\p{Script=Han}+", HAN)
    mark(r"\p{L}+", LETTER)
    mark(r"\p{N}+", NUMBER)
    mark(r"(?V1)[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Script=Han}]+", UPPER)
    mark(r"(?V1)[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Script=Han}]+", LOWER)
    mark(r"\p{White_Space}+", SPACE)
    mark(r"[\r\n]+", NEWLINE)
    return flags


def tables(flags):
    kinds = sorted(set(flags))
    assert len(kinds) <= 16, f"{len(kinds)} kinds do not fit 4 bits"
    index = {k: i for i, k in enumerate(kinds)}
    blocks, block_of = {}, []
    for start in range(0, len(flags), BLOCK):
        kind = [index[f] for f in flags[start : start + BLOCK]]
        packed = tuple(kind[i] | kind[i + 1] << 4 for i in range(0, BLOCK, 2))
        block_of.append(blocks.setdefault(packed, len(blocks)))
    assert len(blocks) <= 256, f"{len(blocks)} blocks do not fit a byte"
    rest = block_of[-1]
    end = LATE_FIRST // BLOCK  # planes 3 to 13 behind this are empty, plane 14 holds one late range
    while block_of[end - 1] == rest:
        end -= 1
    late = flags[LATE_FIRST]
    tail = [late if LATE_FIRST <= c <= LATE_LAST else 0 for c in range(end * BLOCK, len(flags))]
    assert (
        flags[end * BLOCK :] == tail
    ), "Unicode grew a range that the table's form has no room for"
    return kinds, block_of[:end], late, [b for block in blocks for b in block]


def rows(values):
    out, line = [], "   "
    for v in values:
        item = f" {v},"
        if len(line) + len(item) > 100:
            out.append(line)
            line = "   "
        line += item
    return "\n".join(out + [line])


def render():
    kinds, block_of, late, packed = tables(flags_of_all())
    return f"""\
// Made by tools/make_unicode_tables.py from Unicode {UNICODE_VERSION}; do not edit.
#include "k3/tokenizer/unicode_tables.h"

namespace k3::unicode {{
namespace {{

constexpr std::uint8_t kFlags[{len(kinds)}] = {{
{rows(kinds)}
}};

constexpr std::uint32_t kListedBlocks = {len(block_of)};
constexpr std::uint32_t kLateFirst = {LATE_FIRST:#x}, kLateLast = {LATE_LAST:#x};
constexpr std::uint8_t kLateFlags = {late};

// clang-format off
constexpr std::uint8_t kBlockOf[kListedBlocks] = {{
{rows(block_of)}
}};

constexpr std::uint8_t kBlocks[{len(packed)}] = {{
{rows(packed)}
}};
// clang-format on

}}  // namespace

std::uint8_t ClassOf(std::uint32_t code_point) {{
  const std::uint32_t group = code_point / {BLOCK};
  if (group >= kListedBlocks) {{
    return code_point >= kLateFirst && code_point <= kLateLast ? kLateFlags : std::uint8_t{{0}};
  }}
  const std::uint32_t pair = kBlocks[kBlockOf[group] * {BLOCK // 2}u + code_point % {BLOCK} / 2];
  return kFlags[(pair >> (code_point % 2 * 4)) & 15u];
}}

}}  // namespace k3::unicode
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    check_version()
    text = render()
    if not args.check:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        sys.exit(f"{TARGET} is out of date: run {sys.argv[0]}")


if __name__ == "__main__":
    main()
