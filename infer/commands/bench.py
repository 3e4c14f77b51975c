"""python -m infer bench: measure the latency of decoding, print a table, and write a record and a trace on request."""

import dataclasses
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from laneformer.config import ModelConfig
from laneformer.custom_calls import DecodeSession
from laneformer.custom_calls.trace import spans_needed, write_perfetto
from laneformer.errors import ConfigError, InputError
from laneformer.infer.bench import record as bench_record
from laneformer.infer.bench import table as bench_table
from laneformer.infer.bench.latency import Case, Measured, Text, measure
from laneformer.infer.bench.mixed import SHORT, Load, report, table
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.job import is_first_process, open_engine, show_log, take_devices
from laneformer.infer.engine.options import Integer, JobEngineOptions
from laneformer.infer.engine.sources import is_recipe, model_config
from laneformer.infer.sampling import Sampling
from laneformer.infer.text.tokenizer import Tokenizer

USUAL_OUTPUT = 2048
TRACED = 32  # tokens of the traced run

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure time to first token, time per token and tokens per second at batch 1, and record all conditions."""

    engine: tyro.conf.OmitArgPrefixes[JobEngineOptions] = JobEngineOptions(checkpoint="")  # noqa: RUF009  frozen
    """The engine to measure."""
    compare: str = ""
    """Measure several backends in turn, in one process, with the same prompts, for example cpu,xla."""
    layouts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAYOUT [LAYOUT ...]")] = ()
    """Measure a recipe's model under several layouts in turn, with the same weights, for example tp 'dtp(2)' none."""
    context: str = "512"
    """Prompt lengths, tokens, for example 128,512,4096; one record each."""
    text: File = None
    """Force every answer to this text, as if the model wrote it, to measure the gain from drafts on backend cpu."""
    prompt_file: File = None
    """With --text, a file with the prompt, instead of random prompts."""
    tokenizer: File = None
    """With --text and a recipe, the tokenizer.json to use."""
    mixed: bool = False
    """Report instead the gain of several concurrent requests, how they and a long prompt slow each other down, the
    parts of the time to the first token, the cost of prompt length, and peak against sustained speed.
    """
    parallel: Integer = None
    """With --mixed, the number of requests that may run together; by default as in `infer serve`."""
    output_tokens: Integer = None
    """Number of tokens to generate in each run; by default 2048, or as many as fit the model's context."""
    runs: int = 10
    """Number of measured runs."""
    warmup_runs: int = 3
    """Number of full-length runs before the measured ones."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()  # noqa: RUF009  frozen
    """How tokens are chosen. The seed is also that of the random prompts."""
    tokens_per_dispatch: Integer = None
    """Number of tokens that reach the host together, 1 to time each; by default the engine's choice."""
    bandwidth_spec: Annotated[float | None, tyro.conf.arg(metavar="GB/S")] = None
    """Specified memory bandwidth of one device, 10^9 bytes/s, to report the share that is used."""
    json: File = None
    """Write the records to this file, and the times of all tokens to an .npz file beside it."""
    trace: File = None
    """Trace one more run of a native backend, op by op, for ui.perfetto.dev; compressed if the name ends in .gz."""
    table: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")] = ()
    """Instead of measuring, print the records of these files as a Markdown table."""


def run(options: Options) -> int:
    show_log()
    if bool(options.table) == bool(options.engine.checkpoint):
        raise ConfigError("give either --checkpoint to measure, or --table to print records")
    if options.table:
        print(bench_table.markdown([record for path in options.table for record in bench_record.read(path)]))
        return 0
    check(options)
    take_devices(options.engine)
    if options.mixed:
        return report_mixed(options)
    wanted = cases(options, model_config(options.engine.checkpoint, options.engine.lanes))
    engines = open_engines(options)
    records, measured = [], []
    for case in wanted:
        found = measure(engines, case, print_progress)
        records += make_records(options, found)
        measured += found
        if options.json and is_first_process():  # after each case, because a later case may be interrupted
            bench_record.write(options.json, records, measured)
    print(bench_table.terminal(records))
    if options.layouts:
        print("", *bench_table.layouts(records), sep="\n")
    for note in dict.fromkeys(note for record in records for note in record["notes"]):
        print(f"Note: {note}.")
    if options.trace:
        traced = next((engine, engine.session) for engine in engines if engine.session)
        trace(options.trace, *traced, measured[0].case)
    return 0


def check(options: Options) -> None:
    """Raises ConfigError for wrong options, because some would otherwise fail only after minutes of measuring. Makes
    the folders of the output files.
    """
    if options.bandwidth_spec is not None and options.bandwidth_spec <= 0:
        raise ConfigError(
            f"--bandwidth-spec must be above 0, in 10^9 bytes/s of one device, got {options.bandwidth_spec}"
        )
    if options.compare and options.engine.backend != "auto":
        raise ConfigError("give either --backend, or several backends with --compare")
    names = backends(options)
    if len(set(names)) < len(names):
        raise ConfigError(f"--compare {options.compare}: name each backend once")
    if options.layouts:
        if not is_recipe(options.engine.checkpoint):
            raise ConfigError(
                "--layouts needs a recipe as --checkpoint: a trained model is only correct under its own layout"
            )
        if len(set(options.layouts)) < len(options.layouts):
            raise ConfigError(f"--layouts {' '.join(options.layouts)}: name each layout once")
        for layout in options.layouts:
            model_config(options.engine.checkpoint).replace(layout=layout)
    threads = options.engine.threads
    if threads is not None and options.compare and "cpu" not in names:
        raise ConfigError(f"--threads {threads} needs backend cpu: add it to --compare")
    check_text(options)
    check_mixed(options)
    if options.trace and set(names) == {"xla"}:
        raise ConfigError("--trace needs a native backend: backend xla records no spans")
    if options.json and options.json.suffix != ".json":
        raise ConfigError(f"--json must end in .json, got {options.json}; the raw times are written beside it as .npz")
    for file in filter(None, (options.json, options.trace)):
        file.parent.mkdir(parents=True, exist_ok=True)


def report_mixed(options: Options) -> int:
    """Measures and prints the report of infer/bench/mixed.py. Raises ConfigError if the model's context is too
    short.
    """
    usual = Load()
    load = Load(options.output_tokens or usual.output_tokens, min(options.runs, usual.runs), options.sampling.seed)
    engine = open_engine(options.engine, prefix_cache=0, speculation=0, parallel=options.parallel or 0)
    least = SHORT + 4 * load.output_tokens
    if engine.config.max_position_embeddings < least:
        raise ConfigError(
            f"--mixed with {load.output_tokens} output tokens needs a context of {least}, the model's is"
            f" {engine.config.max_position_embeddings}: choose fewer --output-tokens"
        )
    rows = report(engine, load, print_progress)
    conditions = {**engine.conditions, "runs": load.runs, "output_tokens": load.output_tokens}
    conditions["random_weights"] = is_recipe(options.engine.checkpoint)
    if is_first_process():
        print(table(rows))
        print("\nConditions: " + ", ".join(f"{name} {value}" for name, value in conditions.items()))
        if options.json:
            text = json.dumps(
                {"conditions": conditions, "rows": [row._asdict() for row in rows]}, indent=2, default=str
            )
            options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def check_text(options: Options) -> None:
    """Raises ConfigError for options that need --text, or that --text needs."""
    if (options.text is None) != (options.prompt_file is None):
        raise ConfigError("give --text and --prompt-file together: an answer and its prompt")
    if options.text is None and options.engine.draft_max:
        raise ConfigError("--draft-max needs --text and --prompt-file: random prompts have nothing to copy")
    if options.text is not None and is_recipe(options.engine.checkpoint) != (options.tokenizer is not None):
        raise ConfigError("--text needs --tokenizer with a recipe; with a checkpoint, leave --tokenizer out")


def check_mixed(options: Options) -> None:
    """Raises ConfigError for options that exclude or need --mixed."""
    if options.parallel is not None and not options.mixed:
        raise ConfigError(f"--parallel {options.parallel} needs --mixed: other measurements run one request at a time")
    if options.parallel is not None and options.parallel < 1:
        raise ConfigError(f"--parallel must be at least 1, got {options.parallel}")
    several = {"--compare": options.compare, "--layouts": options.layouts, "--text": options.text}
    for name, given in (several | {"--trace": options.trace}).items():
        if options.mixed and given:
            raise ConfigError(f"give either --mixed or {name}")
    if options.mixed and "," in (options.engine.weights or ""):
        raise ConfigError(f"--mixed measures one format of weights, got --weights {options.engine.weights}")


def backends(options: Options) -> list[str]:
    """The names of the backends to measure."""
    return options.compare.split(",") if options.compare else [options.engine.backend]


def read_text(options: Options, prompt_file: Path, answer_file: Path, config: ModelConfig) -> Text:
    """The text to measure. Raises InputError for a file that is not UTF-8, ConfigError without a tokenizer."""
    if options.tokenizer is None:
        tokenizer = Tokenizer.find(options.engine.checkpoint, config.bos_token_id)
    else:
        tokenizer = Tokenizer(options.tokenizer)
    if tokenizer is None:
        raise ConfigError(f"--text needs a tokenizer.json beside the checkpoint {options.engine.checkpoint}")
    texts = []
    for path, encode in ((prompt_file, tokenizer.encode), (answer_file, tokenizer.encode_continuation)):
        try:
            texts.append(encode(path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text: convert it") from None
    prompt, answer = texts
    return Text(tuple(prompt), tuple(answer), f"{prompt_file}, answers forced to {answer_file}")


def cases(options: Options, config: ModelConfig) -> list[Case]:
    """The cases to measure: one for each prompt length, or one for a text. Raises ConfigError for a case that exceeds
    the model's context.
    """
    context = config.max_position_embeddings
    if options.text is not None and options.prompt_file is not None:
        text = read_text(options, options.prompt_file, options.text, config)
        output = len(text.answer) if options.output_tokens is None else min(options.output_tokens, len(text.answer))
        sizes = (len(text.prompt), output, options.runs, options.warmup_runs)
        case = Case(*sizes, options.sampling, options.tokens_per_dispatch, text)
        case.check(context)
        return [case]
    try:
        prompts = [int(word) for word in options.context.split(",")]
    except ValueError:
        raise ConfigError(
            f"--context must be whole numbers separated by commas, as in 128,512, got {options.context}"
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
    """Opens an engine for each layout, backend and format of weights. Raises ConfigError if one is not available, or if
    --trace is given and none can be traced.
    """
    made = []
    ways = (options.engine.weights or "").split(",")
    for layout, name, weights in itertools.product(options.layouts or (None,), backends(options), ways):
        engine = dataclasses.replace(options.engine, backend=name, weights=weights or None)
        if options.compare and name != "cpu":
            if weights != ways[0]:
                continue
            engine = dataclasses.replace(engine, threads=None, weights=None if name == "xla" else engine.weights)
        plain = options.text is None or (options.compare and name != "cpu")
        drafts = {"speculation": 0} if plain else engine.drafts()
        made.append(open_engine(engine, layout, prefix_cache=0, **drafts))  # every prompt must be computed
    if options.trace and not any(engine.session for engine in made):
        raise ConfigError(f"--trace needs a native backend: backend {made[0].backend} records no spans")
    return made


def _label(options: Options, measured: Measured) -> str:
    """A name that distinguishes the engines of one layout."""
    several = "," in (options.engine.weights or "")
    facts, backend = measured.engine.conditions, measured.engine.backend
    return f"{backend} {bench_record.weights_of(facts)}" if several else backend


def make_records(options: Options, measured: list[Measured]) -> list[dict]:
    """The records of one case, with notes on the ratios between engines."""
    notes = []
    for layout in dict.fromkeys(one.engine.config.layout for one in measured):
        same = [one for one in measured if one.engine.config.layout == layout]
        medians = {_label(options, one): statistics.median(run.rate for run in one.runs) for one in same}
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


def trace(path: Path, engine: Engine, session: DecodeSession, case: Case) -> None:
    """Traces one more run of a few tokens and writes the trace. It contains the devices of this process only."""
    tokens = min(TRACED, case.output_tokens)
    session.trace(spans_needed(engine.config.num_hidden_layers, case.prompt_tokens, tokens))
    try:
        prompt = case.prompt(0, engine.config.vocab_size)
        list(engine.generate(prompt, max_new_tokens=tokens, sampling=case.sampling, stop_tokens=()))
        count = write_perfetto(path, session) if is_first_process() else 0
    finally:
        session.trace(0)
    print_progress(
        f"{path}: {count:,} spans of a prompt of {case.prompt_tokens} and {tokens} tokens, for ui.perfetto.dev"
    )


def print_progress(line: str) -> None:
    """Prints a line of progress, in the first process of a job."""
    if is_first_process():
        print(line, file=sys.stderr, flush=True)
