"""Programming problems with tests: HumanEval, HumanEval+, MBPP and MBPP+, from the published files or `datasets`."""

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from laneformer.errors import ConfigError, InputError
from laneformer.files import parse_json, unzip

# Name -> data set on the Hugging Face hub, its configuration, its split.
HUB = {
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "humaneval+": ("evalplus/humanevalplus", None, "test"),
    "mbpp": ("google-research-datasets/mbpp", "full", "test"),
    "mbpp-sanitized": ("google-research-datasets/mbpp", "sanitized", "test"),
    "mbpp+": ("evalplus/mbppplus", None, "test"),
}
# Defects of the published -OriginFmt files: part of a test, its replacement, and the reason. The replacements compare
# as EvalPlus's evaluator does, which uses other tests.
REPAIRS = (
    (
        "        assert _poly(*candidate(*inp), inp) <= 0.0001",  # HumanEval/32
        '        assert abs(_poly(*inp, candidate(*__import__("copy").deepcopy(inp)))) <= 0.0001',
        "no solution passed: coefficients and result in the wrong places",
    ),
    (
        "        exact_match = exp == (out is not None)\n\n",  # Mbpp/737, 787 and 794
        "        exact_match = exp == (out is not None)\n    assert exact_match\n\n",
        "every solution passed: compared, but not asserted",
    ),
    (
        "        assert np.allclose(out, exp, rtol=1e-07, atol=atol)\n",  # nearly all
        "        assert np.shape(out) == np.shape(exp)\n        assert np.allclose(out, exp, rtol=1e-07, atol=atol)\n",
        "an empty list passed for numbers: it was repeated to their shape",
    ),
    (
        "(*inp), ref_func(*inp), 0)",  # HumanEval/14, Mbpp/88 and others
        '(*__import__("copy").deepcopy(inp)), ref_func(*inp), 0)',
        "a solution could change the reference's input",
    ),
)
MOST_NAMES = 10  # names of problems listed in a note
URL = re.compile(r"https?://\S+")
BASE_SECONDS, PLUS_SECONDS = 5.0, 60.0


@dataclass(frozen=True)
class Problem:
    """One programming problem."""

    task_id: str
    """Name of the problem, for example "HumanEval/0" or "Mbpp/2"."""
    prompt: str
    """Start of the program: imports, signature and docstring. For MBPP, a docstring with the text and the first
    assertion.
    """
    entry_point: str
    """Name of the function that the tests call."""
    reference: str
    """A program that passes the tests, including the prompt."""
    test: str
    """A program that runs after the solution, and raises if the solution is wrong."""
    seconds: float
    """CPU time limit of a program, in seconds on a machine of nominal speed."""

    @property
    def context(self) -> str:
        """The part of the prompt before the function (imports, helpers). Tests may use it, and solutions of chat
        answers start with it.
        """
        begin = re.search(rf"^def {re.escape(self.entry_point)}\b", self.prompt, re.MULTILINE)
        return self.prompt[: begin.start() if begin else 0]


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one source."""

    name: str
    """Name of the file, or the name that `load_problems` was given."""
    kind: str
    """HumanEval, HumanEval+, MBPP or MBPP+."""
    problems: tuple[Problem, ...]
    sha256: str
    """SHA-256 of the file, or of the downloaded rows as JSON, hexadecimal."""
    notes: tuple[str, ...] = ()
    """Descriptions of the changes that `load_problems` made to the tests."""

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, task_id: str | int) -> Problem:
        """The problem of this task id, which may be an MBPP number. Raises KeyError."""
        return self._by_id[task_name(task_id)]

    def __post_init__(self):
        if len(self._by_id) < len(self.problems):
            raise InputError(f"{self.name}: a task_id appears more than once; remove the duplicate")

    @cached_property
    def _by_id(self) -> dict[str, Problem]:
        return {problem.task_id: problem for problem in self.problems}

    def first(self, count: int) -> "ProblemSet":
        """The first `count` problems."""
        return ProblemSet(self.name, self.kind, self.problems[:count], self.sha256, self.notes)


def load_problems(source: str | Path) -> ProblemSet:
    """The problems of a file (.jsonl or .json, also with .gz), or of a data set in HUB, which `datasets` downloads.

    Raises InputError for a source that cannot be read or has another format, ConfigError if `datasets` is needed and
    not installed.
    """
    if Path(source).is_file():
        raw, name = Path(source).read_bytes(), Path(source).name
        rows = _rows(raw, name)
    elif str(source) in HUB:
        rows, name = _download(str(source)), str(source)
        raw = json.dumps(rows, sort_keys=True).encode()
    else:
        raise InputError(f"{source} is not a file: give the file of a data set, or one of {', '.join(HUB)}")
    if not rows:
        raise InputError(f"{name} contains no problems: get the file again")
    kind, read = _format(rows, name)
    try:
        problems: list[Problem] = []
        changed: dict[str, list[str]] = {why: [] for _, _, why in REPAIRS}
        for row in rows:
            problem = read(row, kind)
            for broken, repaired, why in REPAIRS:
                if broken in problem.test:
                    problem = replace(problem, test=problem.test.replace(broken, repaired))
                    changed[why].append(problem.task_id)
            problems.append(problem)
    except (LookupError, TypeError, AttributeError, SyntaxError, StopIteration) as error:
        raise InputError(
            f"{name} is not a complete {kind} file ({type(error).__name__}: {error}): get it again"
        ) from None
    notes = tuple(_note(names, why) for why, names in changed.items() if names)
    return ProblemSet(name, kind, tuple(problems), hashlib.sha256(raw).hexdigest(), notes)


def _note(names: list[str], why: str) -> str:
    if len(names) > MOST_NAMES:
        return f"{len(names)} problems: tests repaired ({why})"
    return f"{', '.join(names)}: {'test' if len(names) == 1 else 'tests'} repaired ({why})"


def task_name(task_id: str | int) -> str:
    """The name of a task. A number is a task of MBPP: 2 is "Mbpp/2"."""
    return f"Mbpp/{task_id}" if isinstance(task_id, int) or task_id.isdecimal() else task_id


def parse(source: str) -> ast.Module:
    """`ast.parse` without warnings about the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSON-lines file, plain or gzipped. Raises InputError with the number of the bad line."""
    return _rows(path.read_bytes(), path.name)


def _rows(raw: bytes, name: str) -> list[dict]:
    rows, at = [], "its text"
    try:
        text = unzip(raw).decode()
        if text.lstrip().startswith("["):
            rows = parse_json(text)
        else:
            for n, line in enumerate(text.split("\n"), 1):
                at = f"line {n}"
                if line.strip():
                    rows.append(parse_json(line))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except ValueError as error:
        raise InputError(f"{name}: {at} is not JSON ({error})") from None
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{name}: each line, or element of the list, must be a JSON object")
    return rows


def _download(name: str) -> list[dict]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{name} needs the datasets library: pip install -e '.[data]', or give --data the file of the data set"
        ) from None
    path, config, split = HUB[name]
    try:
        return [dict(row) for row in datasets.load_dataset(path, config, split=split)]
    except Exception as error:  # datasets raises many kinds of exceptions
        raise InputError(f"{path} could not be loaded ({error}): give --data the file of the data set") from None


def _format(rows: list[dict], name: str) -> tuple[str, Any]:
    """The kind of a problem set, and the function that reads a row. Raises InputError for an unknown format."""
    fields = set.intersection(*(set(row) for row in rows))
    if "plus_input" in fields:
        raise InputError(f"{name} has inputs instead of tests: give the -OriginFmt file of the same release")
    if {"prompt", "entry_point", "canonical_solution", "test"} <= fields:
        return ("HumanEval+" if all("inputs = [" in row["test"] for row in rows) else "HumanEval"), _humaneval
    if {"code", "test_list"} <= fields:
        return ("MBPP+" if "test" in fields else "MBPP"), _mbpp
    raise InputError(
        f"{name} has the fields {', '.join(sorted(fields))}: give a file of HumanEval, HumanEval+, MBPP or MBPP+"
    )


def _humaneval(row: dict, kind: str) -> Problem:
    return Problem(
        task_id=row["task_id"],
        prompt=row["prompt"],
        entry_point=row["entry_point"],
        reference=row["prompt"] + row["canonical_solution"],
        test=f"{row['test']}\ncheck({row['entry_point']})\n",
        seconds=PLUS_SECONDS if kind == "HumanEval+" else BASE_SECONDS,
    )


def _mbpp(row: dict, kind: str) -> Problem:
    text = URL.sub("", (row["prompt"] if "prompt" in row else row["text"]).strip())
    setup = [*row.get("test_imports", ()), row.get("test_setup_code", "")]
    return Problem(
        task_id=task_name(row["task_id"]),
        prompt=f'"""\n{text}\n{row["test_list"][0].strip()}\n"""\n',  # the form of EvalPlus's prompts
        entry_point=_called(row["code"], row["test_list"]),
        reference=row["code"],
        test="\n".join([*setup, *([row["test"]] if kind == "MBPP+" else row["test_list"])]) + "\n",
        seconds=PLUS_SECONDS if kind == "MBPP+" else BASE_SECONDS,
    )


def _called(code: str, tests: list[str]) -> str:
    """Name of the function or class of a program that the tests call first."""
    defined = {node.name for node in parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    calls = (node for test in tests for node in ast.walk(parse(test)) if isinstance(node, ast.Call))
    return next(call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id in defined)
