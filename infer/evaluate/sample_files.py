"""Files of samples and of verdicts. They are written line by line, and can be resumed after a kill."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from laneformer.errors import ConfigError, InputError
from laneformer.infer.evaluate.answers import from_chat, from_completion
from laneformer.infer.evaluate.problems import Problem, ProblemSet, read_jsonl, task_name
from laneformer.infer.sandbox.sandbox import Outcome


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One program for one problem. Samples that were not generated here may lack the fields after `solution`."""

    task_id: str
    solution: str
    """The whole program."""
    completion: str | None = None
    """The part of the program after the problem's prompt."""
    raw: str | None = None
    """The text that the model wrote."""
    finish_reason: str | None = None
    """stop, length, or "prompt too long" if the prompt exceeds the model's context."""
    prompt_tokens: int | None = None
    n_tokens: int | None = None
    seconds: float | None = None
    """Time from the request to the last token, without compilation."""
    seconds_per_token: float | None = None
    """Sustained time per token after the first token."""


def read_samples(path: Path, problems: ProblemSet) -> list[Sample]:
    """Samples from JSON lines in either published form: {"task_id", "completion"} (OpenAI) or {"task_id", "solution"}
    (EvalPlus), or texts as a model wrote them: {"task_id", "answer", "form"}, with the form "completion" or "chat".

    Raises InputError for lines of another form and for problems that are not in the set.
    """
    samples, known = [], set(Sample.__dataclass_fields__)
    for n, given in enumerate(read_jsonl(path), 1):
        row = given
        try:
            task_id = task_name(row["task_id"])
            if "answer" in given:
                row = given | _from_answer(problems[task_id], given["answer"], given["form"])
            solution = row["solution"] if "solution" in row else problems[task_id].prompt + row["completion"]
            if not isinstance(solution, str):
                raise TypeError
            more = {field: row.get(field) for field in known - {"task_id", "solution"}}
            samples.append(Sample(task_id=problems[task_id].task_id, solution=solution, **more))
        except KeyError as error:
            if error.args[0] in ("task_id", "completion", "form"):
                raise InputError(
                    f"{path}: sample {n} has no {error.args[0]!r}: add task_id, and completion, solution, or answer"
                    " and form"
                ) from None
            raise InputError(
                f"{path}: sample {n} is for {row['task_id']!r}, which is not in {problems.name}: give --data the file"
                " with its problem"
            ) from None
        except (TypeError, AttributeError):
            raise InputError(
                f"{path}: sample {n} must have task_id, and completion, solution, or answer with the form completion or"
                " chat, as text"
            ) from None
    if not samples:
        raise InputError(f"{path} contains no samples: name another file, or generate some with --checkpoint")
    return samples


def _from_answer(problem: Problem, answer: str, form: str) -> dict[str, str]:
    """The fields of a sample that a raw answer gives. Raises TypeError for values of other types and unknown forms."""
    if not isinstance(answer, str) or form not in ("completion", "chat"):
        raise TypeError
    made = (from_completion if form == "completion" else from_chat)(problem, answer)
    return {"solution": made.solution, "completion": made.completion, "raw": answer}


class SampleFile:
    """A file that samples are appended to. An existing file with the same settings is resumed; a partial last line is
    dropped.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], problems: ProblemSet):
        """settings: all settings that the samples depend on, as JSON values; they are written beside the file. Raises
        ConfigError for a file with other settings.
        """
        self._path, kept = path, settings_path(path)
        settings = json.loads(json.dumps(settings))
        if path.exists() and path.stat().st_size:
            before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
            if other := sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key)):
                raise ConfigError(
                    f"{path} contains samples of other settings ({', '.join(other)}): name another file, or remove it"
                )
            _drop_partial_line(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(kept, settings)
        self.samples = read_samples(path, problems) if path.exists() and path.stat().st_size else []
        self._file = path.open("a", encoding="utf-8")

    @property
    def counts(self) -> Counter[str]:
        """Number of samples of each problem."""
        return Counter(sample.task_id for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Appends a sample to the file."""
        self.samples.append(sample)
        self._file.write(json.dumps(asdict(sample)) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


class VerdictFile:
    """A file that outcomes are appended to, so that a killed scoring can be resumed. `remove` it after the report."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]):
        """conditions: everything that verdicts depend on besides the program. A file with other conditions is
        overwritten.
        """
        self._path = path
        self.known: dict[str, Outcome] = {}
        header = json.loads(json.dumps(conditions))
        if path.exists():
            _drop_partial_line(path)
            rows = read_jsonl(path)
            if rows and rows[0] == header:
                self.known = {row.pop("program"): Outcome(**row) for row in rows[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if self.known else "w", encoding="utf-8")
        if not self.known:
            self._file.write(json.dumps(header) + "\n")

    @staticmethod
    def key(task_id: str, program: str) -> str:
        """The key of a program for a problem in `known`."""
        return hashlib.sha256(f"{task_id}\n{program}".encode(errors="surrogatepass")).hexdigest()

    def add(self, key: str, outcome: Outcome) -> None:
        self.known[key] = outcome
        self._file.write(json.dumps({"program": key, **asdict(outcome)}) + "\n")
        self._file.flush()

    def remove(self) -> None:
        self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


def settings_path(samples: Path) -> Path:
    """The path of the settings beside a file of samples."""
    return samples.with_suffix(".settings.json")


def replace(path: Path, content: Any) -> None:
    """Writes a value as JSON to a file, atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _drop_partial_line(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
