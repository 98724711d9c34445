#!/usr/bin/env python3
"""Takes the fixed texts of the chat format from a release's own encoder into chat_bodies.json.

usage: chat_bodies.py MODEL_DIR [ENCODER.py]

The texts belong to the release, so they are not part of this project. ENCODER.py (default: every
*.py of MODEL_DIR) is read as text and never run. A text is taken when, filled in, it has the known
length and SHA-256; MODEL_DIR/chat_bodies.json is written when all are found. docs/chat.md
"""
import ast
import hashlib
import json
import pathlib
import sys

HOLE = "{}"

# name: [(what fills the hole, bytes, first 16 hex digits of the SHA-256), ...]
KNOWN = {
    "tool_declare": [("[]", 78, "404401a6b5b488dd")],
    "tool_declare_dynamic": [("[]", 194, "92608abb22d7bf3a")],
    "thinking_effort": [("low", 223, "003035f6bf61ffe6"), ("medium", 226, "5192c10d0ba2db1b"),
                        ("high", 224, "a8513c631231c09d"), ("max", 223, "20389202b5a9e0b3")],
    "tool_choice_required": [(None, 91, "e2c3dc236d94164a")],
    "tool_choice_none": [(None, 95, "efabd595d24633a1")],
    "json_object": [(None, 162, "a88696fd119e35ca")],
    "json_schema": [("{}", 224, "69953f7d950205b7")],
}


def literal(node):
    """The text of a string expression with HOLE for what is computed, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else HOLE for v in node.values]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left), literal(node.right)
        return (HOLE if left is None else left) + (HOLE if right is None else right)
    return None


def texts(source):
    for node in ast.walk(ast.parse(source)):
        text = literal(node)
        if text:
            yield text
            yield text.strip()


def fits(text, checks):
    for value, length, digest in checks:
        if text.count(HOLE) != (value is not None):
            return False
        raw = text.replace(HOLE, value or "").encode()
        if len(raw) != length or hashlib.sha256(raw).hexdigest()[:16] != digest:
            return False
    return True


def find(sources, known=None):
    found = {}
    for source in sources:
        for text in texts(source):
            for name, checks in (known or KNOWN).items():
                if fits(text, checks):
                    found[name] = text
    return found


def main(arguments):
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[0])
    files = [pathlib.Path(arguments[1])] if len(arguments) == 2 else sorted(folder.glob("*.py"))
    try:
        found = find([path.read_text(encoding="utf-8") for path in files])
    except (OSError, ValueError, SyntaxError) as error:
        print(f"chat_bodies: {error}", file=sys.stderr)
        return 1
    missing = sorted(set(KNOWN) - set(found))
    if missing:
        where = ", ".join(map(str, files)) or f"{folder}: no *.py"
        print(f"chat_bodies: {where}: not found: {', '.join(missing)}", file=sys.stderr)
        return 1
    target = folder / "chat_bodies.json"
    target.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
                      encoding="utf-8")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
