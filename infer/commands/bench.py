"""python -m infer bench: the latency of decoding with all its conditions; a table and, if asked for, a record and a
trace.
"""

import dataclasses
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from custom_calls.trace import spans_needed, write_perfetto
from infer.bench import record as bench_record
from infer.bench import table as bench_table
from infer.bench.latency import Case, Measured, measure
from infer.engine.engine import Engine
from infer.engine.job import is_first_process, open_engine, show_log, take_devices
from infer.engine.options import Integer, JobEngineOptions
from infer.engine.sources import is_recipe, model_config
from infer.sampling import Sampling
from laneformer.errors import ConfigError

USUAL_OUTPUT = 2048
TRACED = 32  # tokens of the traced run

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure time to first token, time per token and tokens per second at batch 1. The table goes to standard
    output.
    """

    engine: tyro.conf.OmitArgPrefixes[JobEngineOptions] = JobEngineOptions(checkpoint="")  # noqa: RUF009  frozen
    """What is measured."""
    compare: str = ""
    """Several backends instead, as in cpu,xla: a run of each in turn, in one process, with the same prompts."""
    layouts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAYOUT [LAYOUT ...]")] = ()
    """A recipe's shape under each of these layouts instead of its own, as in tp 'dtp(2)' laneformer none, with the same
    weights: runs take turns, and a table says what their exchanges cost.
    """
    context: str = "512"
    """Prompt lengths in tokens, as in 128,512,4096: a record for each."""
    output_tokens: Integer = None
    """Tokens to generate in each run; by default 2048, or as many as the model's context has room for."""
    runs: int = 10
    """Measured runs."""
    warmup_runs: int = 3
    """Runs of full length before them, which do not count."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()  # noqa: RUF009  frozen
    """How tokens are chosen; the seed is that of the prompts too."""
    tokens_per_dispatch: Integer = None
    """Tokens between two looks of the host, 1 for a host time of each; by default the engine's choice."""
    bandwidth_spec: Annotated[float | None, tyro.conf.arg(metavar="GB/S")] = None
    """Memory bandwidth of one device as its maker specifies it, 10^9 bytes per second; for the share of it that is
    used.
    """
    json: File = None
    """Write the records to this file, and the times of every token beside it as .npz."""
    trace: File = None
    """Write one more run of a native backend, op by op, for ui.perfetto.dev; compressed if it ends in .gz."""
    table: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")] = ()
    """Measure nothing: print the records of these files as a Markdown table; incomplete ones are refused."""


def run(options: Options) -> int:
    show_log()
    if bool(options.table) == bool(options.engine.checkpoint):
        raise ConfigError("give either --checkpoint, to measure, or --table, to print records")
    if options.table:
        print(bench_table.markdown([record for path in options.table for record in bench_record.read(path)]))
        return 0
    check(options)
    take_devices(options.engine)
    wanted = cases(options, model_config(options.engine.checkpoint, options.engine.lanes).max_position_embeddings)
    engines = open_engines(options)
    records, measured = [], []
    for case in wanted:
        found = measure(engines, case, say)
        records += make_records(options, found)
        measured += found
        if options.json and is_first_process():  # after each case: a later one may be interrupted
            bench_record.write(options.json, records, measured)
    print(bench_table.terminal(records))
    if options.layouts:
        print("", *bench_table.layouts(records), sep="\n")
    for note in dict.fromkeys(note for record in records for note in record["notes"]):
        print(f"Note: {note}.")
    if options.trace:
        trace(options.trace, next(engine for engine in engines if engine.session), measured[0].case)
    return 0


def check(options: Options) -> None:
    """Raises ConfigError for what would fail only after minutes of measuring, or cannot be meant."""
    if options.bandwidth_spec is not None and options.bandwidth_spec <= 0:
        raise ConfigError(
            f"--bandwidth-spec {options.bandwidth_spec}: give 10^9 bytes per second of one device, as in 4800"
        )
    if options.compare and options.engine.backend != "auto":
        raise ConfigError("give --backend, or several with --compare, not both")
    names = backends(options)
    if len(set(names)) < len(names):
        raise ConfigError(f"--compare {options.compare}: name each backend once")
    if options.layouts:
        if not is_recipe(options.engine.checkpoint):
            raise ConfigError(
                "--layouts is for recipes, whose weights are random: a trained model is right under its own layout only"
            )
        if len(set(options.layouts)) < len(options.layouts):
            raise ConfigError(f"--layouts {' '.join(options.layouts)}: name each layout once")
        for layout in options.layouts:
            model_config(options.engine.checkpoint).replace(layout=layout)
    threads = options.engine.threads
    if threads is not None and options.compare and "cpu" not in names:
        raise ConfigError(f"--threads {threads}: only backend cpu has threads to set")
    if options.trace and set(names) == {"xla"}:
        raise ConfigError("--trace: backend xla writes no spans, the others do")
    if options.json and options.json.suffix != ".json":
        raise ConfigError(
            f"--json {options.json}: give a name that ends in .json; the raw times get the same with .npz"
        )
    for file in filter(None, (options.json, options.trace)):
        file.parent.mkdir(parents=True, exist_ok=True)


def backends(options: Options) -> list[str]:
    """The backends to measure, by name."""
    return options.compare.split(",") if options.compare else [options.engine.backend]


def cases(options: Options, context: int) -> list[Case]:
    """One for each prompt length, all of which fit the model. Raises ConfigError."""
    try:
        prompts = [int(word) for word in options.context.split(",")]
    except ValueError:
        raise ConfigError(
            f"--context {options.context}: write whole numbers with commas between them, as in 128,512"
        ) from None
    made = []
    for prompt in prompts:
        output = min(USUAL_OUTPUT, max(2, context - prompt)) if options.output_tokens is None else options.output_tokens
        made.append(
            Case(prompt, output, options.runs, options.warmup_runs, options.sampling, options.tokens_per_dispatch)
        )
        made[-1].check(context)
    return made


def open_engines(options: Options) -> list[Engine]:
    """One for each layout and backend. Raises ConfigError if one of them cannot be had, or --trace has nothing to
    trace.
    """
    made = []
    for layout, name in itertools.product(options.layouts or (None,), backends(options)):
        threads = options.engine.threads if not options.compare or name == "cpu" else None
        made.append(open_engine(dataclasses.replace(options.engine, backend=name, threads=threads), layout))
    if options.trace and not any(engine.session for engine in made):
        raise ConfigError(f"--trace: backend {made[0].backend} writes no spans, the others do")
    return made


def make_records(options: Options, measured: list[Measured]) -> list[dict]:
    """The records of one case; where several backends ran, with their ratios."""
    notes = []
    for layout in dict.fromkeys(one.engine.config.layout for one in measured):
        same = [one for one in measured if one.engine.config.layout == layout]
        medians = {one.engine.backend: statistics.median(run.rate for run in one.runs) for one in same}
        notes += [
            f"prompt of {measured[0].case.prompt_tokens}{f', layout {layout}' if options.layouts else ''}: ratio of the"
            f" medians of tokens/s, {a} / {b} = {medians[a] / medians[b]:.3f}; their runs took turns in one process"
            for a, b in itertools.combinations(medians, 2)
        ]
    spec = None if options.bandwidth_spec is None else 1e9 * options.bandwidth_spec
    records = []
    for one in measured:
        same = [other for other in measured if other.engine.config.layout == one.engine.config.layout]
        reference = next((other for other in same if other.engine.backend == "xla"), same[0])
        records.append(
            bench_record.make_record(
                one,
                random_weights=is_recipe(options.engine.checkpoint),
                bandwidth_spec=spec,
                notes=notes,
                beside=None if one is reference else reference,
            )
        )
    return records


def trace(path: Path, engine: Engine, case: Case) -> None:
    """One more run, of a few tokens: it shows where the microseconds go. The file has the devices of this process."""
    tokens = min(TRACED, case.output_tokens)
    engine.session.trace(spans_needed(engine.config.num_hidden_layers, case.prompt_tokens, tokens))
    try:
        prompt = case.prompt(0, engine.config.vocab_size)
        list(engine.generate(prompt, max_new_tokens=tokens, sampling=case.sampling, stop_tokens=()))
        count = write_perfetto(path, engine.session) if is_first_process() else 0
    finally:
        engine.session.trace(0)
    say(f"{path}: {count:,} spans of a prompt of {case.prompt_tokens} and {tokens} tokens, for ui.perfetto.dev")


def say(line: str) -> None:
    """Progress."""
    if is_first_process():
        print(line, file=sys.stderr, flush=True)
