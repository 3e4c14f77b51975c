"""Functional correctness of generated programs: samples for programming problems, their verdicts, and pass@k.

    problems = infer.evaluate.problems.load_problems("HumanEval.jsonl.gz")
    print(infer.evaluate.humaneval.evaluate(engine, problems, max_new_tokens=512).summary)

The problems and tests are those of Chen et al. (HumanEval, arXiv 2107.03374), Austin et al. (MBPP, arXiv 2108.07732)
and Liu et al. (EvalPlus: HumanEval+ and MBPP+, arXiv 2305.01210).
"""

import contextlib
import dataclasses
import hashlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laneformer.errors import ConfigError, InputError
from laneformer.infer.engine.engine import Engine
from laneformer.infer.evaluate.answers import (
    CHAT_STOPS,
    PREFILL,
    REQUEST,
    from_chat,
    from_completion,
    sanitized,
    stop_strings,
)
from laneformer.infer.evaluate.problems import Problem, ProblemSet
from laneformer.infer.evaluate.sample_files import Sample, VerdictFile
from laneformer.infer.evaluate.scoring import Judge, pass_at_k, progress_bar, wilson
from laneformer.infer.sampling import Sampling
from laneformer.infer.sandbox.sandbox import Outcome
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.tokenizer import Tokenizer
from laneformer.model import Laneformer

SCHEMA = "laneformer.humaneval/3"  # 3 scores sanitized programs; in version 1, tests ran in the program's process
PASS_AT = (1, 10, 100)
TOO_LONG = "prompt too long"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one sample."""

    task_id: str
    sample: int
    """Number of the sample among those of its problem, from 0."""
    outcome: Outcome
    """Outcome of the sanitized program, which is the one that is scored."""
    as_written: Outcome
    """Outcome of the program with all that the model wrote at its top level."""

    @property
    def passed(self) -> bool:
        return self.outcome.verdict == "passed"


@dataclass(frozen=True)
class Report:
    """A scored set of samples."""

    problems: ProblemSet
    verdicts: tuple[Verdict, ...]
    samples: tuple[Sample, ...]
    """The samples in the order of `verdicts`."""
    sandbox: Mapping[str, Any]
    limits: Mapping[str, Any]
    settings: Mapping[str, Any] | None
    """The settings that the samples were generated with; None if unknown."""

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """task_id -> (samples, passed samples), for the problems that have samples."""
        return self._counts(False)

    def _counts(self, as_written: bool) -> dict[str, tuple[int, int]]:
        counts: dict[str, tuple[int, int]] = {}
        for verdict in self.verdicts:
            n, passed = counts.get(verdict.task_id, (0, 0))
            outcome = verdict.as_written if as_written else verdict.outcome
            counts[verdict.task_id] = n + 1, passed + (outcome.verdict == "passed")
        return counts

    @property
    def pass_at(self) -> dict[int, float]:
        """k -> pass@k as a share, for each k in PASS_AT such that every problem has at least k samples."""
        return {k: value for k in PASS_AT if (value := pass_at_k(self.counts, k)) is not None}

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of pass@1, which treats the problems as a sample of all similar problems."""
        return wilson(self.pass_at[1], len(self.counts))

    @property
    def as_written(self) -> dict[str, Any]:
        """The score of the programs with all that the model wrote at their top level: passed, and pass@k."""
        counts = self._counts(True)
        shares = {f"pass@{k}": share for k in PASS_AT if (share := pass_at_k(counts, k)) is not None}
        return {"passed": sum(passed for _, passed in counts.values()), **shares}

    @property
    def empty(self) -> int:
        """Number of generated samples without text."""
        return sum(sample.raw is not None and not sample.raw.strip() for sample in self.samples)

    @property
    def speed(self) -> dict[str, Any] | None:
        """Tokens and times (in seconds) of the generation; None for samples that were not generated here."""
        asked = [sample for sample in self.samples if sample.seconds is not None]
        if not asked:
            return None
        tokens = sum(sample.n_tokens or 0 for sample in asked)
        seconds = [sample.seconds for sample in asked if sample.seconds is not None]
        sustained = [1 / sample.seconds_per_token for sample in asked if sample.seconds_per_token]
        return {
            "tokens": tokens,
            "seconds": sum(seconds),
            "tokens_per_second": tokens / sum(seconds),
            "decode_tokens_per_second_median": statistics.median(sustained) if sustained else None,
            "seconds_per_sample": {
                "mean": statistics.mean(seconds),
                "median": statistics.median(seconds),
                "max": max(seconds),
            },
            "finish_reasons": dict(Counter(sample.finish_reason for sample in self.samples)),
        }

    @property
    def summary(self) -> str:
        """The result in a few lines."""
        passed, (low, high) = sum(verdict.passed for verdict in self.verdicts), self.interval
        shares = ", ".join(f"pass@{k} {100 * share:.1f} %" for k, share in self.pass_at.items())
        lines = [
            f"{self.problems.kind}: {passed}/{len(self.verdicts)} passed, {shares} (95 % interval of pass@1"
            f" {100 * low:.1f} to {100 * high:.1f} %); {', '.join(f'{n} {name}' for name, n in self.outcomes.items())};"
            f" sandbox {self.sandbox['level']}",
            f"scored: sanitized programs; as written {self.as_written['passed']}/{len(self.verdicts)} pass",
        ]
        if 2 * self.empty > len(self.samples):
            healed = (self.settings or {}).get("token_healing", True)
            lines.append(
                f"warning: {self.empty} of {len(self.samples)} samples are empty;"
                f" {'' if healed else 'leave --no-token-healing out, or '}use --mode chat for a model trained for chats"
            )
        if without := len(self.problems) - len(self.counts):
            lines.append(f"{without} of {len(self.problems)} problems have no samples and are not counted")
        if speed := self.speed:
            each = speed["seconds_per_sample"]
            long = speed["finish_reasons"].get(TOO_LONG)
            lines.append(
                f"{speed['tokens']:,} tokens, {speed['tokens_per_second']:,.1f} tokens/s with prefill, "
                f"{each['mean']:.2f} s per sample ({each['max']:.2f} s at most)"
                + (f"; {long} prompts did not fit the context and count as failed" if long else "")
            )
        return "\n".join(lines)

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of samples by verdict, the most frequent first."""
        return dict(Counter(verdict.outcome.verdict for verdict in self.verdicts).most_common())

    def as_json(self) -> dict[str, Any]:
        """The whole report for a file: shares from 0 to 1, times in seconds."""
        return {
            "schema": SCHEMA,
            "form": "sanitized",
            "passed": sum(verdict.passed for verdict in self.verdicts),
            "total": len(self.verdicts),
            **{f"pass@{k}": share for k, share in self.pass_at.items()},
            "pass@1_interval_95": list(self.interval),
            "as_written": self.as_written,
            "empty_samples": self.empty,
            "problems": len(self.counts),
            "problems_without_samples": len(self.problems) - len(self.counts),
            "outcomes": self.outcomes,
            "data": data_report(self.problems),
            "sandbox": dict(self.sandbox),
            "limits": dict(self.limits),
            "generation": (
                None
                if self.settings is None and self.speed is None
                else {**(self.settings or {}), **(self.speed or {})}
            ),
            "verdicts": [
                {
                    "task_id": verdict.task_id,
                    "sample": verdict.sample,
                    "passed": verdict.passed,
                    **dataclasses.asdict(verdict.outcome),
                    "as_written": verdict.as_written.verdict,
                    "tokens": sample.n_tokens,
                    "generation_seconds": sample.seconds,
                }
                for verdict, sample in zip(self.verdicts, self.samples, strict=True)
            ],
        }


def evaluate(
    model: Engine | Laneformer,
    problems: ProblemSet,
    *,
    max_new_tokens: int,
    samples: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    chat: ChatTemplate | None = None,
    prefill: bool = False,
    token_healing: bool = True,
    tokenizer: Tokenizer | None = None,
    judge: Judge | None = None,
    progress: bool = False,
) -> Report:
    """Generates `samples` solutions of each problem with a model, and scores them.

    model: an engine, or a model together with `tokenizer`. chat: template for asking the model for solutions; without
    it, the model continues the prompts. prefill: begin the answers of chats for the model, as EvalPlus does.
    token_healing: let the model choose the tokens at the end of a prompt that it continues, where the engine can;
    see Engine.generate. judge: pass the same judge to repeated calls, as in training, so that the
    sandbox is set up and the reference solutions are run only once.

    Raises ConfigError or InputError for invalid arguments, HarnessError if programs cannot be judged.
    """
    engine = Engine(model, tokenizer=tokenizer) if isinstance(model, Laneformer) else model
    settings = generation_settings(
        engine,
        problems,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        chat=chat,
        prefill=prefill,
        token_healing=token_healing,
    )
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Judge()) if judge is None else judge
        ours.verify(problems.problems, progress)  # before generating: a broken sandbox should not cost a generation
        made = generate(
            engine,
            problems,
            max_new_tokens=max_new_tokens,
            samples=samples,
            sampling=sampling,
            chat=chat,
            prefill=prefill,
            token_healing=token_healing,
            progress=progress,
        )
        return score(list(made), problems, ours, settings=settings, progress=progress)


def generate(
    engine: Engine,
    problems: ProblemSet,
    *,
    max_new_tokens: int,
    samples: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    chat: ChatTemplate | None = None,
    prefill: bool = False,
    token_healing: bool = True,
    done: Mapping[str, int] | None = None,
    progress: bool = False,
) -> Iterator[Sample]:
    """Yields samples, problem by problem. done: number of existing samples of each problem; the others as `evaluate`.

    The seed of a sample is a hash of the seed in `sampling`, the problem and the sample's number, so that a resumed
    generation makes the same samples. Raises ConfigError or InputError for invalid arguments.
    """
    if samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}")
    if samples > 1 and not sampling.temperature:
        raise ConfigError(f"{samples} samples per problem at temperature 0 are all equal: give --temperature")
    if engine.tokenizer is None:
        raise InputError("evaluation needs a tokenizer.json beside the checkpoint: add the file")
    jobs = [(problem, n) for problem in problems for n in range((done or {}).get(problem.task_id, 0), samples)]
    compiled: set[tuple[int, int]] = set()
    for problem, n in progress_bar(jobs, "generating", len(jobs), "sample", progress):
        key = f"{sampling.seed}/{problem.task_id}/{n}".encode()
        seeded = dataclasses.replace(sampling, seed=int.from_bytes(hashlib.sha256(key).digest()[:8], "big"))
        yield _sample(engine, engine.tokenizer, problem, max_new_tokens, seeded, chat, prefill, token_healing, compiled)


def _sample(
    engine: Engine,
    tokenizer: Tokenizer,
    problem: Problem,
    max_new_tokens: int,
    sampling: Sampling,
    chat: ChatTemplate | None,
    prefill: bool,
    token_healing: bool,
    compiled: set[tuple[int, int]],
) -> Sample:
    """Generates one sample. compiled: request sizes that the engine was warmed up for, so that times exclude
    compilation; a new size is added.
    """
    ends, opening = engine.config.eos_token_id, PREFILL if chat and prefill else ""
    prompt: str | list[int]
    if chat is None:
        prompt, stops = problem.prompt.strip() + "\n", stop_strings(problem)
        ids = tokenizer.encode(prompt)
    else:
        ends = chat.ends(ends)
        asked = [{"role": "user", "content": REQUEST.format(problem.prompt.strip())}]
        prompt = ids = chat.encode(asked, add_generation_prompt=True, opening=opening)
        stops = CHAT_STOPS if opening else ()
    room = engine.config.max_position_embeddings - len(ids)
    if room < 1:
        return Sample(
            task_id=problem.task_id,
            solution=problem.prompt,
            completion="",
            raw="",
            finish_reason=TOO_LONG,
            prompt_tokens=len(ids),
            n_tokens=0,
        )
    size = (len(ids) - 1).bit_length(), (len(ids) + min(max_new_tokens, room) - 1).bit_length()
    if size not in compiled:
        engine.warmup(len(ids), max_new_tokens)
        compiled.add(size)
    result = engine.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=ends,
        stop_strings=stops,
        channels=None if chat is None else chat.channels(ids),
        token_healing=chat is None and token_healing and engine.heals,
    ).result
    answer = (from_completion if chat is None else from_chat)(problem, opening + result.text)
    return Sample(
        task_id=problem.task_id,
        solution=answer.solution,
        completion=answer.completion,
        raw=result.text,
        finish_reason=result.finish_reason,
        prompt_tokens=len(ids),
        n_tokens=len(result.tokens),
        seconds=result.total_time,
        seconds_per_token=result.time_per_token,
    )


def score(
    samples: Sequence[Sample],
    problems: ProblemSet,
    judge: Judge,
    *,
    settings: Mapping[str, Any] | None = None,
    verdicts: VerdictFile | None = None,
    progress: bool = False,
) -> Report:
    """Judges samples after the reference solutions of their problems have passed: each sanitized, and as written.

    settings: settings that the samples were generated with. verdicts: a file of known verdicts, to which new ones are
    added. Raises HarnessError if a program cannot be judged; such a program never counts as a failed sample.
    """
    judge.verify([problems[task_id] for task_id in dict.fromkeys(sample.task_id for sample in samples)], progress)
    known = dict(verdicts.known) if verdicts else {}
    forms = [(sanitized(problems[each.task_id], each.solution), each.solution) for each in samples]
    keys = [[VerdictFile.key(each.task_id, form) for form in both] for each, both in zip(samples, forms, strict=True)]
    new = {
        key: (problems[each.task_id], form)
        for each, both, named in zip(samples, forms, keys, strict=True)
        for form, key in zip(both, named, strict=True)
        if key not in known
    }
    for at, outcome in judge.outcomes(list(new.values()), progress):
        known[list(new)[at]] = outcome
        if verdicts:
            verdicts.add(list(new)[at], outcome)
    numbers: Counter[str] = Counter()
    ended = []
    for sample, both in zip(samples, keys, strict=True):
        ended.append(Verdict(sample.task_id, numbers[sample.task_id], *(known[key] for key in both)))
        numbers[sample.task_id] += 1
    return Report(problems, tuple(ended), tuple(samples), judge.sandbox.report, judge.report, settings)


def generation_settings(
    engine: Engine,
    problems: ProblemSet,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    chat: ChatTemplate | None,
    prefill: bool = False,
    token_healing: bool = True,
) -> dict[str, Any]:
    """All settings that samples depend on, except their number."""
    return {
        "mode": "completion" if chat is None else "chat",
        "template_sha256": chat and chat.sha256,
        "request": chat and REQUEST,
        "answer_start": PREFILL if chat and prefill else None,
        "token_healing": chat is None and token_healing and engine.heals,
        "stops": (
            list(CHAT_STOPS if prefill else ())
            if chat
            else sorted({stop for problem in problems for stop in stop_strings(problem)})
        ),
        "max_new_tokens": max_new_tokens,
        "sampling": sampling.record(),
        "data": data_report(problems),
        "conditions": engine.conditions,
    }


def data_report(problems: ProblemSet) -> dict[str, Any]:
    """The origin of the problems, for reports."""
    return {"name": problems.name, "kind": problems.kind, "sha256": problems.sha256, "notes": list(problems.notes)}
