"""The gain of drafts on real texts, with a simulated clock: drafts are never slower than none, and wrong prices are
corrected. The texts are old versions of this project's files, in answers of a model that copies well.
"""

import ast
import difflib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from laneformer.custom_calls import build

HERE = Path(__file__).parent
ROWS = range(1, 17)
# Prices of passes by their rows. The first three were measured: AVX2, AVX-512 on a quiet machine, AVX-512 beside other
# processes.
PRICES = {
    "avx2": {1: 1, 2: 1.01, 3: 1.25, 4: 1.48, 6: 1.58, 8: 2.51, 12: 3.21, 16: 4.48},
    "avx512": {1: 1, 2: 1.15, 4: 1.27, 8: 1.80, 12: 2.1, 16: 2.46},
    "dear": {1: 1, 2: 1.30, 4: 1.61, 8: 2.0, 16: 2.65},
    "as many passes": {1: 1, 16: 16},
    "free": {1: 1, 16: 1},
}

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


class Found(NamedTuple):
    """The result of one answer."""

    tokens: int
    time: float
    """Time as a multiple of the time without drafts."""
    drafted: int
    """Number of drafts."""
    right: int
    """Number of right drafts."""


class Text(NamedTuple):
    prompt: str
    answer: str


def edited(text: str, other: str) -> str:
    """The text after an edit in several places: one name is changed, lines are dropped, and lines of another text are
    inserted.
    """
    names = sorted(set(re.findall(r"\b[a-z_]{7,}\b", text)), key=lambda name: (-text.count(name), name))
    lines, others = text.replace(names[2], f"{names[2]}_of").splitlines(), other.splitlines()
    for part in (1, 2, 3):
        at = part * len(lines) // 4
        lines[at : at + part] = others[40 * part : 40 * part + 3 * part]
    return "\n".join(lines) + "\n"


def blocks(before: str, after: str) -> Iterator[str]:
    """The lines of the edit as search/replace blocks."""
    a, b = before.splitlines(), after.splitlines()
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            first, last = a[max(0, a0 - 2) : a0], a[a1 : a1 + 2]
            yield from (
                "<<<<<<< SEARCH",
                *first,
                *a[a0:a1],
                *last,
                "=======",
                *first,
                *b[b0:b1],
                *last,
                ">>>>>>> REPLACE",
            )


def functions(source: str) -> Iterator[Text]:
    """The head and the body of each long function, as prompt and answer."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 3:
            head = node.body[1].lineno - 1
            yield Text("".join(lines[node.lineno - 1 : head]), "".join(lines[head : node.end_lineno]))


def texts() -> dict[str, list[Text]]:
    """Prompts and answers by kind of task."""

    def read(*names: str) -> list[str]:
        return [(HERE / "texts" / f"{name}.txt").read_text(encoding="utf-8") for name in names]

    code = read("plan.py", "build.py", "library.py", "session.py", "words.py")
    tests, pages = read("test_plan.py", "test_build.py"), read("agent.md", "roofline.md", "peers.md")
    edits = [Text(text, edited(text, code[i - 1])) for i, text in enumerate(code)]
    bodies = [text for source in code for text in functions(source)]
    diffs = ["\n".join(difflib.unified_diff(*map(str.splitlines, edit), lineterm="")) for edit in edits]
    lines = [line for page in pages for line in page.splitlines() if len(line) > 60]
    quoted = "".join(f"> {line}\n{other[:50]}\n" for line, other in zip(lines[3:60:5], lines[61::3], strict=False))
    return {
        "page rewritten": [Text(text, edited(text, pages[i - 1])) for i, text in enumerate(pages)],
        "file rewritten": edits,
        "the prompt, then the solution": [Text(head, f"```python\n{head}{body}```") for head, body in bodies],
        "blocks": [Text(edit.prompt, "\n".join(blocks(*edit))) for edit in edits],
        "diff": [Text(edit.prompt, diff) for edit, diff in zip(edits, diffs, strict=True)],
        "log read": [Text("\n".join(lines), quoted)],
        "module": [Text(test, text) for test, text in zip(tests, code, strict=False)],
        "solution": bodies,
        "prose about a diff": [Text(diff, page[:3000]) for diff, page in zip(diffs, pages, strict=False)],
    }


def by_words() -> Callable[[str], list[int]]:
    """A tokenizer that makes about as many tokens of code as a large BPE."""
    ids: dict[str, int] = {}
    return lambda text: [ids.setdefault(word, len(ids)) for word in re.findall(r"\w+| *[^\w\s]+|\n *| +", text)]


TOKENIZERS = {"bytes": lambda text: list(text.encode()), "words": by_words()}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    made = tmp_path_factory.mktemp("simulation") / "simulation"
    sources = [str(build.HERE / "common" / "drafts.cc"), str(HERE / "drafts_simulation.cc")]
    build.write_generated(made.parent)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{made.parent}", f"-I{build.HERE}/cpu"]
    flags += ["-o", str(made)]
    subprocess.run([*build.compiler(), *flags, *sources], check=True)
    return made


@pytest.fixture(scope="module", params=TOKENIZERS)
def simulate(request, program, tmp_path_factory):
    """A function simulate(listed, truth, ...) that returns the results of all texts by kind. listed, truth: names in
    PRICES of the prices at the start and of the true prices. apart: whether each text has its own session.
    """
    folder, encode, made = tmp_path_factory.mktemp("texts"), TOKENIZERS[request.param], texts()
    for kind, given in made.items():
        with (folder / kind).open("wb") as file:
            for prompt, answer in given:
                tokens = [encode(prompt), encode(answer)]
                np.array([*map(len, tokens), *tokens[0], *tokens[1]], np.int32).tofile(file)

    def run(listed: str, truth: str, *, apart: bool, deviation: float = 0.03, disturbed: float = 0.05):
        found = {}
        for kind, given in made.items():
            prices = (np.interp(ROWS, list(price), list(price.values())) for price in (PRICES[listed], PRICES[truth]))
            options = [str(folder / kind), str(int(apart)), "1", str(deviation), str(disturbed)]
            command = [str(program), *options, *(f"{price:.4f}" for each in prices for price in each)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows = [line.split() for line in printed.splitlines()]
            assert len(rows) == len(given)
            found[kind] = [
                Found(int(passes) + int(right), float(time), int(drafted), int(right))
                for time, passes, drafted, right, *_ in rows
            ]
        return found

    return run


def lost(one: Found, share: float = 0.01) -> float:
    """Passes that an answer lost beyond the share that it may lose."""
    return one.tokens * (one.time - 1 - share)


def speed(found: list[Found]) -> float:
    """Speed of all answers together, as a multiple of the speed without drafts."""
    return sum(one.tokens for one in found) / sum(one.tokens * one.time for one in found)


@pytest.mark.parametrize("truth", ["avx2", "avx512", "dear"])
def test_no_answer_is_slower_and_copies_are_faster(truth, simulate):
    found = simulate(truth, truth, apart=True)
    for kind, answers in found.items():
        assert speed(answers) > 0.99 and max(map(lost, answers)) < 0.3, (kind, answers)
    least = {"avx2": 2.2, "avx512": 3.0, "dear": 2.5}[truth]
    assert speed(found["file rewritten"]) > least and speed(found["page rewritten"]) > least
    assert speed(found["the prompt, then the solution"]) > 1.3 and speed(found["blocks"]) > 1.3


def test_drafts_that_save_no_time_are_rarely_checked(simulate):
    for kind, answers in simulate("as many passes", "as many passes", apart=True).items():
        assert speed(answers) > 0.98 and max(lost(one, 0.04) for one in answers) < 1.2, (kind, answers)


@pytest.mark.parametrize(
    ("listed", "truth", "share"),
    [
        ("free", "dear", 0.01),
        ("avx2", "dear", 0.01),
        ("avx512", "as many passes", 0.02),
        ("free", "as many passes", 0.02),
    ],
)
def test_prices_that_are_too_low_are_corrected(listed, truth, share, simulate):
    """The correction is quick: all answers of a session together lose a few passes beyond a small share."""
    for kind, answers in simulate(listed, truth, apart=False).items():
        assert sum(lost(one, share) for one in answers) < 12, (kind, answers)
        assert speed(answers[len(answers) // 2 :]) > 1 - share or len(answers) < 5, (kind, answers)


@pytest.mark.parametrize("truth", ["avx2", "avx512", "dear"])
def test_prices_that_are_too_high_are_corrected(truth, simulate):
    """Trials correct them, and cost less than 1 %."""
    found, right = simulate("as many passes", truth, apart=False), simulate(truth, truth, apart=False)
    for kind, answers in found.items():
        assert max(map(lost, answers)) < 1.2, (kind, answers)
    for kind in ("file rewritten", "page rewritten"):
        assert speed(found[kind]) > 0.5 * speed(right[kind]), (kind, speed(found[kind]), speed(right[kind]))
        assert speed(found[kind][-1:]) > 0.6 * speed(right[kind][-1:]), "the session has learned"
