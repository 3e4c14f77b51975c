"""python -m infer humaneval: solve programming problems with a checkpoint and score the solutions, or score existing
samples.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from laneformer.checkpoint import checkpoint_files, complete_steps, newest_step
from laneformer.errors import ConfigError, InputError
from laneformer.infer.engine.job import is_first_process, open_engine, show_log, take_devices
from laneformer.infer.engine.options import Integer, JobEngineOptions
from laneformer.infer.evaluate.humaneval import Report, data_report, generate, generation_settings, score
from laneformer.infer.evaluate.problems import ProblemSet, load_problems
from laneformer.infer.evaluate.sample_files import Sample, SampleFile, VerdictFile, read_samples, replace, settings_path
from laneformer.infer.evaluate.scoring import Judge
from laneformer.infer.sampling import Sampling
from laneformer.infer.sandbox import levels
from laneformer.infer.text.chat_template import ChatTemplate

OPTIONAL = {"metavar": "FILE"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Generate and score solutions of HumanEval, HumanEval+, MBPP or MBPP+; with --samples but without --checkpoint
    only score. Run the same command again to resume.
    """

    data: str
    """Problems: a file (.jsonl, .jsonl.gz, .json; for HumanEval+ and MBPP+ the -OriginFmt file), or humaneval,
    humaneval+, mbpp, mbpp-sanitized or mbpp+ to download them with `datasets`.
    """
    engine: tyro.conf.OmitArgPrefixes[JobEngineOptions] = JobEngineOptions(checkpoint="")  # noqa: RUF009  frozen
    """Engine that generates the samples; without --checkpoint nothing is generated."""
    samples: Annotated[Path | None, tyro.conf.arg(**OPTIONAL)] = None
    """File of samples, JSON lines with task_id and completion or solution, or with task_id, answer (a model's raw text)
    and form (completion or chat); with --checkpoint samples are written to it, by default beside --json.
    """
    json: Annotated[Path | None, tyro.conf.arg(**OPTIONAL)] = None
    """Write the report to this file; by default beside the samples, with the ending .report.json."""
    mode: Literal["completion", "chat"] = "completion"
    """completion: continue the prompt. chat: ask through the chat template."""
    chat_template: Annotated[Path | None, tyro.conf.arg(**OPTIONAL)] = None
    """Template for --mode chat, instead of the checkpoint's."""
    prefill: bool = False
    """With --mode chat: begin each answer for the model, as EvalPlus does: "Below is a Python script ..." and an open
    code block.
    """
    token_healing: bool = True
    """With --mode completion: let the model choose the tokens at the end of the prompt (backends cpu and xla)."""
    samples_per_problem: int = 1
    """Number of samples of each problem; pass@k is reported for k = 1, 10, 100 up to this number."""
    limit: Integer = None
    """Use only the first problems, this many."""
    max_new_tokens: int = 768
    """Maximum number of tokens of a sample; the context also ends it."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()  # noqa: RUF009  frozen
    """How tokens are chosen (infer/sampling.py has the definition)."""
    sandbox: Literal["auto", "bwrap", "unshare", "rlimits"] = "auto"
    """How to isolate programs. auto: bubblewrap if installed, else unshare. rlimits: limits only, for use in VMs."""
    workers: Integer = None
    """Number of programs that run at a time; by default one per core."""
    generate_only: bool = False
    """Write the samples without running them."""


def run(options: Options) -> int:
    show_log()
    check(options)
    if options.engine.checkpoint:
        take_devices(options.engine)
        if not is_first_process():
            open_engine(options.engine).follow()
            return 0
    problems = load_problems(options.data)
    chosen = problems if options.limit is None else problems.first(options.limit)
    samples_path, report_path = paths(options, problems)
    if options.generate_only:
        samples, _ = written(options, problems, chosen, samples_path)
        print(f"{samples_path}: {len(samples)} samples")
        return 0
    with Judge(options.sandbox, options.workers) as judge:
        check_hidden(options, judge)
        if not options.engine.checkpoint:
            samples, settings = read_samples(samples_path, problems), None
            if settings_path(samples_path).exists():
                settings = json.loads(settings_path(samples_path).read_text(encoding="utf-8"))
        else:
            judge.verify(chosen.problems, progress=True)  # first: generating is useless if the sandbox is broken
            samples, settings = written(options, problems, chosen, samples_path)
        ids = {problem.task_id for problem in chosen}
        samples = [sample for sample in samples if sample.task_id in ids]
        if not samples:
            raise InputError(f"{samples_path} has no samples of the first {len(chosen)} problems: raise --limit")
        report = scored(samples, settings, chosen, judge, report_path)
    print(report.summary)
    print(f"report in {report_path}", file=sys.stderr)
    return 0


def check(options: Options) -> None:
    """Raises ConfigError for values outside their range, and for options that exclude each other."""
    if not options.engine.checkpoint and options.samples is None:
        raise ConfigError("give --checkpoint to generate samples, --samples to score some, or both")
    for name, given in (("generate-only", options.generate_only), ("distributed", options.engine.distributed)):
        if given and not options.engine.checkpoint:
            raise ConfigError(f"--{name} needs --checkpoint")
    if options.chat_template is not None and options.mode != "chat":
        raise ConfigError("--chat-template needs --mode chat")
    if options.prefill and options.mode != "chat":
        raise ConfigError("--prefill needs --mode chat")
    options.engine.check()
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {options.limit}")


def check_hidden(options: Options, judge: Judge) -> None:
    """Raises ConfigError if the file of problems is in a folder that programs can read."""
    folder = levels.shown(Path(options.data)) if judge.sandbox.level.tools and Path(options.data).exists() else None
    if folder is not None:
        raise ConfigError(f"--data {options.data} is in {folder}, which programs can read: move the file elsewhere")


def paths(options: Options, problems: ProblemSet) -> tuple[Path, Path]:
    """The paths of the samples and of the report; by default both are in the same folder."""
    samples, report = options.samples, options.json
    if samples is None:
        samples = (
            report.with_suffix(".samples.jsonl")
            if report
            else Path(f"{Path(options.engine.checkpoint).absolute().name}-{problems.kind}.jsonl")
        )
    return samples, report or samples.with_suffix(".report.json")


def written(
    options: Options, problems: ProblemSet, chosen: ProblemSet, path: Path
) -> tuple[list[Sample], dict[str, Any]]:
    """Generates the samples of the chosen problems that the file does not contain yet. Returns all samples of the file,
    and their settings.
    """
    checkpoint = Path(options.engine.checkpoint)
    weights = newest_step(checkpoint) if complete_steps(checkpoint) else checkpoint
    engine = open_engine(options.engine)
    is_chat = options.mode == "chat"
    chat = ChatTemplate.load(checkpoint_files(checkpoint), options.chat_template) if is_chat else None
    how = {name: getattr(options, name) for name in ("max_new_tokens", "sampling", "prefill", "token_healing")}
    how["chat"] = chat
    settings = {"checkpoint": str(weights.absolute()), **generation_settings(engine, problems, **how)}
    with engine.leading(), SampleFile(path, settings, problems) as file:
        for sample in generate(
            engine, chosen, samples=options.samples_per_problem, done=file.counts, progress=True, **how
        ):
            file.add(sample)
        return file.samples, settings


def scored(
    samples: list[Sample], settings: dict[str, Any] | None, problems: ProblemSet, judge: Judge, path: Path
) -> Report:
    """Scores the samples and writes the report to `path`. Until then, verdicts are kept in a file beside it."""
    conditions = {"data": data_report(problems), "sandbox": judge.sandbox.report}
    with VerdictFile(path.with_name(path.name + ".verdicts.jsonl"), conditions) as verdicts:
        if verdicts.known:
            print(f"resuming with {len(verdicts.known)} verdicts", file=sys.stderr)
        report = score(samples, problems, judge, settings=settings, verdicts=verdicts, progress=True)
        replace(path, report.as_json())
        verdicts.remove()
    return report
