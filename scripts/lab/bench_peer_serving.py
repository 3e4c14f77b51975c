"""python -m scripts.bench_peer_serving: compares how our engine and llama.cpp serve requests.

    python -m scripts.bench_peers --setup peers --peers llama.cpp
    python -m scripts.bench_peer_serving peers --shape scripts.peers.shapes:quarter_billion

It measures both engines alternately, with random weights in the same shape and without HTTP: the tokens per second of
several clients together, an answer that copies from its prompt with drafts from n-grams, and the first token of an
agent's second turn. Answers are forced where drafts depend on their tokens.
"""

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from laneformer.commands.lab import bench_peers
from laneformer.commands.lab.peers.environments import OURS, PEERS, SERVING
from laneformer.commands.lab.peers.load import QUIET, beside, quiet
from laneformer.commands.lab.peers.process import ROOT, Process
from laneformer.errors import ConfigError, run_command
from laneformer.infer.bench.machine import hardware, software, utc_now

PEER = "llama.cpp"
QUESTIONS = {"clients": "several clients", "drafts": "drafts", "turn": "first token"}
"""Word in --questions -> name in the table."""
HEADS = (
    "question",
    "case",
    "rounds",
    "ours over llama.cpp, median (range)",
    "ours",
    "llama.cpp",
    "foreign cores, most",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure several clients, drafts and second turns, and the ratio of ours to llama.cpp."""

    folder: tyro.conf.Positional[Path]
    """Folder of scripts.bench_peers with llama.cpp's environment."""
    shape: str = "laneformer_350m"
    """Recipe, HF folder or training run with the sizes that both engines use."""
    weights: Literal["bfloat16", "bf12"] = "bfloat16"
    """Format of our engine's weights; llama.cpp has bfloat16."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of our engine's products and cache; llama.cpp rounds activations to bfloat16, its cache is float16."""
    clients: int = 4
    """Clients at once."""
    prompt: int = 16
    """Prompt tokens of each client."""
    tokens: int = 64
    """Tokens of each client."""
    most_slowdown: float = 1.5
    """The option of `infer serve`: a larger value lets requests share passes that take longer."""
    text: Path = ROOT / "scripts" / "peers" / "process.py"
    """File in the prompt, from which the answer copies."""
    edit: str = "process=engine"
    """OLD=NEW: the answer is the file with this word replaced."""
    other: Path = ROOT / "scripts" / "peers" / "load.py"
    """File that is the answer in the case with little to copy."""
    copied_tokens: int = 300
    """Tokens of these answers, at most."""
    drafts: str = "2,10"
    """Comma-separated numbers of tokens that llama.cpp drafts; the best one counts. llama-cpp-python advises 2 for
    CPUs, and its default is 10.
    """
    turn: str = "512,64,64"
    """Comma-separated numbers of tokens: an agent's prompt, its answer, and the new tokens of the second turn."""
    questions: str = ",".join(QUESTIONS)
    """Comma-separated questions to ask."""
    rounds: int = 6
    """Rounds of each case; a round measures both engines once."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Threads of both engines (default: one per available core)."""
    seconds: float = 900
    """Time limit in seconds for loading and for each sample."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write all samples and conditions to."""


@dataclass(frozen=True)
class Case:
    """A request that both engines answer."""

    question: str
    name: str
    ours: tuple
    """Verb and arguments of scripts/lab/peers/protocol.py."""
    peer: tuple[tuple, ...]
    """Verbs and arguments for llama.cpp; the request with the best median counts."""
    unit: str


def run(options: Options) -> str:
    """Measures and returns the table. Raises ConfigError for options that cannot be measured."""
    base = {name: getattr(options, name) for name in ("folder", "shape", "weights", "compute", "threads", "seconds")}
    python = PEERS[PEER].python(options.folder)
    if python is None:
        raise ConfigError(
            f"{PEER} is not installed; run python -m scripts.bench_peers --setup {options.folder} --peers {PEER}"
        )
    listed = cases(options)
    config, task = bench_peers.prepare(bench_peers.Options(**base, rounds=1, context=1, tokens=2, prompt_rounds=0))
    if config.delta_layers and any(case.question == QUESTIONS["drafts"] for case in listed):
        raise ConfigError(
            f"--shape {options.shape} has recurrent layers, in which llama.cpp cannot undo drafts; give --questions"
            " clients,turn"
        )
    longest = max(positions(case) for case in listed)
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"--prompt, --tokens, --turn and the texts need {longest} positions, but the context of {options.shape} is"
            f" {config.max_position_embeddings}; give smaller values"
        )
    task = replace(task, slots=options.clients, most_slowdown=options.most_slowdown, positions=longest)
    listed = [with_files(case, Path(task.folder), config.vocab_size) for case in listed]
    record = {
        "date_utc": utc_now(),
        "options": {name: str(value) for name, value in asdict(options).items()},
        "hardware": hardware(),
        "software": software(),
        "threads": task.threads,
        "load_before": os.getloadavg(),
        "cases": [],
    }
    engines = [replace(engine, module=SERVING[engine.name]) for engine in (OURS, PEERS[PEER])]
    with (
        bench_peers.start(engines[0], sys.executable, task, options) as ours,
        bench_peers.start(engines[1], python, task, options) as peer,
    ):
        record["conditions"] = {"ours": ours.conditions, "peer": peer.conditions}
        for case in listed:
            record["cases"].append(measure(case, ours, peer, options.rounds))
            record["load_after"] = os.getloadavg()
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return table(record)


def numbers(name: str, text: str, count: int | None = None) -> list[int]:
    """Parses the numbers of option --NAME. count: how many are required. Raises ConfigError for any other text."""
    found = [int(word) for word in text.split(",") if word.isdecimal()]
    if len(found) != len(text.split(",")) or not all(found) or (count or len(found)) != len(found):
        raise ConfigError(f"--{name} must be {count or 'some'} numbers above 0 with commas between them, got {text!r}")
    return found


def cases(options: Options) -> list[Case]:
    """The cases to measure. Raises ConfigError for an option outside its range."""
    for name, least in (("clients", 1), ("prompt", 1), ("tokens", 2), ("copied_tokens", 3), ("rounds", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    asked = options.questions.split(",")
    if unknown := [word for word in asked if word not in QUESTIONS]:
        raise ConfigError(f"--questions {','.join(unknown)}: choose among {', '.join(QUESTIONS)}")
    found = []
    for clients in dict.fromkeys((1, options.clients)):
        verb = ("together", options.prompt, options.tokens, clients)
        name = f"{clients} at once, prompts of {options.prompt}, {options.tokens} tokens each"
        found.append(Case(QUESTIONS["clients"], name, verb, (verb,), "tokens/s"))
    prompt, edited = texts(options)
    drafts = numbers("drafts", options.drafts)
    for name, answer in (("a file rewritten", edited), ("another file", pieces(options.other))):
        text = (prompt, answer[: options.copied_tokens])
        plain = ("copied", text, 0)
        tried = tuple(("copied", text, most) for most in drafts)
        size = f"{name}, prompt of {len(prompt)}, {len(text[1])} tokens"
        found.append(Case(QUESTIONS["drafts"], f"{size}, no drafts", plain, (plain,), "tokens/s"))
        found.append(
            Case(QUESTIONS["drafts"], f"{size}, with drafts", ("copied", text, -1), (plain, *tried), "tokens/s")
        )
    turn = ("turn", *numbers("turn", options.turn, 3))
    name = f"second turn of an agent: prompt {turn[1]}, answer {turn[2]}, {turn[3]} new"
    found.append(Case(QUESTIONS["turn"], name, turn, (turn,), "ms"))
    return [case for case in found if case.question in {QUESTIONS[word] for word in asked}]


def texts(options: Options) -> tuple[list[str], list[str]]:
    """A file and the file after the edit, as pieces. Raises ConfigError."""
    old, found, new = options.edit.partition("=")
    if not old or not found:
        raise ConfigError(f"--edit must be OLD=NEW, got {options.edit!r}")
    prompt = pieces(options.text)
    if old not in prompt:
        raise ConfigError(f"--edit {options.edit}: {options.text} has no word {old!r}; name one that it has")
    return prompt, [new if piece == old else piece for piece in prompt]


def pieces(path: Path) -> list[str]:
    """Words, spaces and other characters of a file, which are the tokens here."""
    return re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8"))


def positions(case: Case) -> int:
    """Cache positions that a case needs."""
    verb, *sizes = case.ours
    if verb == "copied":
        return len(sizes[0][0]) + len(sizes[0][1])
    return sizes[0] + sizes[1] if verb == "together" else sum(sizes)


def with_files(case: Case, folder: Path, vocabulary: int) -> Case:
    """The case with its texts as files of token ids."""
    if case.ours[0] != "copied":
        return case
    text = case.ours[1]
    number = {piece: n % vocabulary for n, piece in enumerate(dict.fromkeys([*text[0], *text[1]]))}
    path = folder / f"text-{len(text[0])}-{'-'.join(case.name.split(',')[0].split())}.json"
    ids = {name: [number[piece] for piece in part] for name, part in zip(("prompt", "answer"), text, strict=True)}
    path.write_text(json.dumps(ids), encoding="utf-8")
    verbs = [("copied", str(path), verb[2]) for verb in (case.ours, *case.peer)]
    return replace(case, ours=verbs[0], peer=tuple(verbs[1:]))


def measure(case: Case, ours: Process, peer: Process, rounds: int) -> dict:
    """Measures every request of the case in each round, after one that does not count; returns the case's record."""
    asked: list[tuple[Process, tuple]] = [(ours, case.ours), *((peer, verb) for verb in case.peer)]
    for process, verb in asked:
        process.serve(*verb)
    found: list[list[dict]] = []
    for number in range(rounds):
        found.append([sample(lambda p=process, v=verb: p.serve(*v), case.unit) for process, verb in asked])
        line = ", ".join(f"{each['figure']:.2f}" for each in found[-1])
        bench_peers.progress(f"{case.name}, round {number + 1} of {rounds}: {line} {case.unit}")
    better = min if case.unit == "ms" else max
    best = better(range(len(case.peer)), key=lambda n: statistics.median(one[1 + n]["figure"] for one in found))
    pairs = [{"ours": one[0], "peer": one[1 + best]} for one in found]
    for pair in pairs:
        over = pair["ours"]["figure"] / pair["peer"]["figure"]
        pair["ratio"] = 1 / over if case.unit == "ms" else over
    return {**asdict(case), "best": case.peer[best], "rounds": pairs, "all": found}


def sample(request: Callable[[], dict], unit: str) -> dict:
    """Result of a request, with its figure: tokens/s, or milliseconds to the first token."""
    answer, foreign = beside(request)
    figure = 1000 * answer["seconds"] if unit == "ms" else answer["tokens"] / answer["seconds"]
    return {"figure": figure, "foreign_cores": foreign, **answer}


def table(record: dict) -> str:
    """The record as a Markdown table, with the conditions below it."""
    rows = []
    for case in record["cases"]:
        rounds, ratios = case["rounds"], [one["ratio"] for one in case["rounds"]]
        figures = []
        for who in ("ours", "peer"):
            figure = statistics.median(one[who]["figure"] for one in rounds)
            passes = rounds[0][who]["passes"] if case["question"] == QUESTIONS["drafts"] else 0
            figures.append(
                f"{figure:.1f} {case['unit']}" + (f", {rounds[0][who]['tokens'] / passes:.2f} a pass" if passes else "")
            )
        if case["best"][0] == "copied" and len(case["peer"]) > 1:
            figures[1] += f" with {case['best'][2]} drafts"
        foreign = max(one[who]["foreign_cores"] for one in rounds for who in ("ours", "peer"))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((case["question"], case["name"], str(len(rounds)), spread, *figures, f"{foreign:.2f}"))
    lines = [f"| {' | '.join(row)} |" for row in (HEADS, ["---"] * len(HEADS), *rows)]
    noisy = sum(not quiet(one) for case in record["cases"] for one in case["rounds"])
    for who, c in record["conditions"].items():
        versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
        lines.append(
            f"- {who}: {versions}; weights {c['weights']}, products {c['compute']}, activations {c['activations']},"
            f" cache {c['kv']}; {c['threads']} threads; {c['load']}; {c['system']}"
        )
    lines.append(
        f"- {record['options']['shape']}, random weights, greedy, {record['hardware']['host_cpu']}; load"
        f" {record['load_before'][0]:.1f} before; {noisy} rounds with more than {QUIET} cores busy elsewhere"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.bench_peer_serving", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
