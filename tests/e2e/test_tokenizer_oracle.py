"""Our ids equal those of tiktoken, on small and on real ranks, over every kind of text.

K3_ENCODE names the helper program (tests/tools/k3_encode.cc); without it the one beside K3_BIN.
"""

import array
import os
import pathlib
import random
import string
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tokenizer_oracle as oracle  # noqa: E402

tiktoken = pytest.importorskip("tiktoken", reason="tests/requirements.txt is not installed")

WORDS = (
    "the of and to in a is that for it as was with be by on not he I his but at are this have "
    "from or had an they which you were her all she there would their we him been has when who "
    "will more no if out so said what up its about into than them can only other new some could "
    "time these two may then do first any my now such like our over man me even most made after "
    "Kimi delta attention residual expert latent quantile router balancing straße façade naïve "
    "Москва Ελλάδα İstanbul ǅ NASA "
    "HTTPServer parseURL don't it's WE'LL they'Re I'm he'd you'Ve"
).split()
# What the pattern tells apart: title case, modifier letters, marks, Han numbers and symbols, CJK
# marks that are not Han, long s, odd white space, unassigned code points.
ODD = (
    "aAbB01 9'\"-.!\t\r\n \u01c5\u02b0\u00aa\u0301\u0903\U00016ff0\u3005\u3007\u3021"
    "\u2e80\u3006\u3001"
    "\u30fc\u0e20\u0663\u00b2\u2167\u017f\u00a0\u2003\u3000\u0085\u180e\u200b\u200d\ufeff"
    "\x00\x1c\x1f"
    "\u0378\u2603\u0295\u1c89\U0001f600\U0001e900\U0001e922\U00020000\U000323af\U000e0100\U0010ffff"
    "中文字世界éÉ"
)
SNIPPETS = [
    "def f(x):\n    return x**2  # comment\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "{\"key\": [1, 2.5, null], \"名\": \"值\"}\n",
    "<|open|>message role=\"user\"<|sep|>",
    "https://example.org/a?b=c&d=%20#frag\r\n",
    "SELECT * FROM t WHERE id >= 1000000;\n",
    "| a | b |\n|---|---|\n",
    "$$\\sum_{i=1}^{n} x_i^2$$\n",
    "    \n\n\n\t\n",
    "x=1;y=2;z=3\n",
]


def prose(rng, size):
    out, length = [], 0
    while length < size:
        word = rng.choice(WORDS)
        word = rng.choice([word, word, word, word, word.title(), word.upper(), word.lower()])
        out.append(
            word + rng.choice([" ", " ", " ", " ", ", ", ". ", "\n", "\n\n", "  ", " — ", "; "])
        )
        length += len(out[-1])
    return "".join(out)


def mixed(rng, size):
    """Code, CJK, emoji, digits and identifiers in short stretches."""
    makers = [
        lambda: rng.choice(SNIPPETS),
        lambda: "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(rng.randint(1, 30))),
        lambda: "".join(chr(rng.randint(0x3040, 0x30FF)) for _ in range(rng.randint(1, 20))),
        lambda: "".join(chr(rng.randint(0xAC00, 0xD7A3)) for _ in range(rng.randint(1, 12))),
        lambda: "".join(
            chr(rng.randint(0x1F300, 0x1FAFF)) + rng.choice(["", "\u200d", "\ufe0f"])
            for _ in range(rng.randint(1, 6))
        ),
        lambda: str(rng.randint(0, 10 ** rng.randint(1, 20))),
        lambda: "".join(rng.choice(string.ascii_letters + "_") for _ in range(rng.randint(1, 90))),
        lambda: "".join(rng.choice(string.punctuation) for _ in range(rng.randint(1, 9))),
        lambda: rng.choice(" \t\n\r") * rng.randint(1, 12),
        lambda: "".join(rng.choice(ODD) for _ in range(rng.randint(1, 40))),
    ]
    out, length = [], 0
    while length < size:
        out.append(rng.choice(makers)())
        length += len(out[-1])
    return "".join(out)


def random_unicode(rng, size):
    def one():
        c = rng.randint(0, rng.choice([0x7F, 0x2FF, 0xFFFF, 0x10FFFF]))
        return "?" if 0xD800 <= c < 0xE000 else chr(c)

    return "".join(one() for _ in range(size))


def long_runs(rng):
    return "".join(
        [
            "A" * 60_000,
            " " * 51_000,
            "\n" * 26_000,
            "世" * 30_000,
            "7" * 30_000,
            "".join(rng.choice("abcdef") for _ in range(70_000)),
            " \x1c" * 20_000,
            "!" * 27_000,
        ]
    )


def every_code_point():
    """Each code point alone between letters, digits and spaces: shows every class of the tables."""
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    rng = random.Random(5)
    return "".join(c + rng.choice(["a", "A", "1", " a", " ", "\n", "'", ""]) for c in points)


def corpus():
    rng = random.Random(2031)
    texts = {
        "prose": prose(rng, 700_000),
        "mixed": mixed(rng, 700_000),
        "odd": mixed(rng, 1) + "".join(rng.choice(ODD) for _ in range(300_000)),
        "random": random_unicode(rng, 300_000),
        "runs": long_runs(rng),
        "code_points": every_code_point(),
    }
    books = oracle.data_file("books-valid.txt")
    if books:
        texts["books"] = books.read_text(encoding="utf-8")
    assert sum(len(t.encode()) for t in texts.values()) > 2_000_000
    return texts


TEXTS = corpus()


def encode_program():
    default = (
        pathlib.Path(os.environ.get("K3_BIN", oracle.ROOT / "build/release/k3")).resolve().parent
    )
    path = os.environ.get("K3_ENCODE", str(default / "tests/tools/k3_encode"))
    if not os.access(path, os.X_OK):
        pytest.skip(f"{path} is not built")
    return path


def demo_ranks():
    demo = oracle.ROOT / "models/k3-books-27m/tiktoken.model"
    return demo if demo.is_file() else oracle.ROOT / "tests/golden/tiny-k3/tiktoken.model"


@pytest.fixture(scope="module", params=["demo", "real"])
def ranks(request):
    """(path, tiktoken encoding)"""
    path = demo_ranks() if request.param == "demo" else oracle.data_file("kimi-ranks.tiktoken")
    if path is None:
        pytest.skip("kimi-ranks.tiktoken is neither in $K3_DATA nor in ../shared/data")
    return path, oracle.encoding(oracle.load_ranks(path))


@pytest.mark.parametrize("name", TEXTS)
def test_ids_equal_tiktoken(ranks, name, tmp_path):
    path, enc = ranks
    text, out = tmp_path / "text", tmp_path / "ids"
    text.write_bytes(TEXTS[name].encode())
    subprocess.run(
        [encode_program(), path, text, out], check=True, timeout=120, capture_output=True
    )
    ours = array.array("i", out.read_bytes()).tolist()
    theirs = oracle.encode(enc, TEXTS[name])
    for at, (a, b) in enumerate(zip(ours, theirs)):
        before = enc.decode(theirs[max(0, at - 12) : at])
        assert a == b, f"id {at}: ours {a}, tiktoken {b}, after {before!r}"
    assert len(ours) == len(theirs)


def test_unicode_tables_are_those_of_the_pinned_module():
    pytest.importorskip("regex", reason="tests/requirements.txt is not installed")
    script = oracle.ROOT / "tools/make_unicode_tables.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
