"""The longer plan: pretrain a model on Python code of this machine, score it, and measure its speed. Needs only Python.

Its stages may be spread over several commands: each command runs remaining stages while its time lasts, and a file
records which are done. The number of training steps is computed once, from a measured step and the time for training.
"""

import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from laneformer.commands.lab.gpu_check.stage import PYTHON, Outcome, Stage, run
from laneformer.errors import ConfigError, InputError

RESERVE = 15  # seconds of a command for the report
SHARE = 0.9  # share of the time for training that steps take; the rest is for compiling, validating and saving
LEAST = 10  # a stage that resumes is started if at least these seconds are left
RECORD = "plan.json"
NEEDED_BY_ALL = ("corpus", "pace", "pretrain")  # stages whose failure ends the plan


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """The model to train, and the time limits of the stages."""

    recipe: str
    batch: tuple[str, ...]
    """Options of the recipe for the batch, whose accumulated parts have the same size as in the recipe."""
    vocabulary: int
    """Tokens of the tokenizer that is trained on the corpus, at most the model's."""
    backend: str
    """Backend that generates text."""
    others: tuple[str, ...]
    """Backends that are measured for comparison."""
    seconds: dict[str, int]
    """Time limits of all stages except pretraining, which gets the rest of the budget."""
    answer: int
    """Tokens per solution of a problem, at most."""
    tokens: int
    """Tokens per measured answer."""
    limit: tuple[str, ...] = ()
    """Options that limit the number of problems."""

    @property
    def around(self) -> int:
        """Seconds of all stages except pretraining."""
        return sum(self.seconds.values())


GPU = Pretraining(
    recipe="laneformer_120m",
    batch=("--data.batch-size", "64", "--accumulate", "8"),
    vocabulary=32_000,
    backend="cuda",
    others=("xla",),
    seconds={"corpus": 300, "pace": 180, "humaneval": 240, "speed": 120, "sample": 60},
    answer=256,
    tokens=1023,
)
REHEARSAL = Pretraining(
    recipe="stdlib",
    batch=(
        *("--data.batch-size", "2", "--data.sequence-length", "64", "--data.validation-batches", "1"),
        *("--model.num-hidden-layers", "2", "--mesh.host-devices", "1", "--mesh.lane", "1"),
    ),
    vocabulary=512,
    backend="cpu",
    others=(),
    seconds=dict.fromkeys(("corpus", "pace", "humaneval", "speed", "sample"), 600),  # for a busy machine
    answer=8,
    tokens=16,
    limit=("--limit", "2"),
)


@dataclass
class Progress:
    """The record of a plan, in its folder."""

    asked: dict
    """Options of the first command; later commands must have the same."""
    outcomes: dict[str, dict] = field(default_factory=dict)
    """Outcome by stage, with the seconds of all commands."""
    words: dict[str, int] = field(default_factory=dict)
    """Measured values of the `{name}` in commands, by name."""

    @classmethod
    def open(cls, out: Path, asked: dict) -> "Progress":
        """The record in the folder, or a new one. Raises InputError if it is damaged, ConfigError for another plan."""
        path = out / RECORD
        if not path.exists():
            return cls(asked)
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise InputError(f"{path} is damaged; remove {out} to start again") from None
        for name, value in asked.items():
            if found.asked.get(name) != value:
                raise ConfigError(
                    f"{out} has a plan with --{name} {found.asked.get(name)}, not {value}; give the same, or another"
                    " folder"
                )
        return found

    def save(self, out: Path) -> None:
        part = out / (RECORD + ".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(out / RECORD)

    def add(self, outcome: Outcome) -> Outcome:
        """Records what a stage did in this command; returns it with the seconds of all commands."""
        total = outcome.seconds + self.spent(outcome.stage)
        self.outcomes[outcome.stage] = vars(outcome) | {"seconds": total}
        return Outcome(**self.outcomes[outcome.stage])

    def spent(self, stage: str) -> float:
        """Seconds that an unfinished stage has run; 0 for any other stage."""
        known = self.outcomes.get(stage, {})
        return known["seconds"] if known.get("status") == "unfinished" else 0.0

    def is_done(self, stage: Stage) -> bool:
        """Whether a stage need not run again; a stage that failed or ran out of time must."""
        status = self.outcomes.get(stage.name, {}).get("status", "failed")
        if status == "unfinished":
            return self.spent(stage.name) >= stage.seconds
        return status not in ("failed", "out of time")

    @property
    def all(self) -> list[Outcome]:
        return [Outcome(**outcome) for outcome in self.outcomes.values()]


def corpus_folders() -> list[str]:
    """Folders of Python code on this machine: the standard library and installed packages."""
    paths = sysconfig.get_paths()
    packages = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    return list(dict.fromkeys([paths["stdlib"], paths["purelib"], paths["platlib"], *packages]))


def plan(what: Pretraining, budget: int, corpus: list[str], humaneval: Path | None, sandbox: str) -> list[Stage]:
    """The stages in order. budget: seconds of all stages. Raises ConfigError if it leaves no time for training."""
    if budget <= what.around:
        raise ConfigError(
            f"--budget must be above {what.around} seconds, which the stages around pretraining may take, got {budget}"
        )
    run_folder, data = "{out}/run", ("--data.path", "{out}/corpus")
    # HumanEval's problems are not Python files, so the corpus does not contain their file.
    tokenize = (PYTHON, "-m", "scripts.tokenize", "--out", "{out}/corpus", *corpus, "--glob", "*.py")
    tokenize += ("--train-bpe", str(what.vocabulary))
    recipe = " ".join((what.recipe, *what.batch))
    pace = (PYTHON, "-m", "train.bench", recipe, "--no-dense", "--rounds", "1", "--steps", "5")
    train = (PYTHON, "-m", "train", what.recipe, *what.batch, *data, "--run", run_folder, "--steps", "{steps}")
    train += ("--optimizer.warmup-steps", "{warmup}", "--validate-every", "{every}", "--save-every", "{every}")
    trained = ("--checkpoint", run_folder)
    solve = (PYTHON, "-m", "infer", "humaneval", "--data", str(humaneval), *trained, *what.limit)
    solve += ("--backend", what.backend, "--max-new-tokens", str(what.answer), "--sandbox", sandbox)
    measure = (PYTHON, "-m", "infer", "bench", *trained, "--context", "65", "--output-tokens", str(what.tokens))
    measure += ("--compare", ",".join((what.backend, *what.others))) if what.others else ("--backend", what.backend)
    write = (PYTHON, "-m", "infer", "generate", *trained, "--prompt", "def fibonacci(n):", "--temperature", "0")
    write += ("--backend", what.backend, "--max-new-tokens", str(min(100, what.tokens)))
    absent = "" if humaneval else "no --humaneval FILE"
    return [
        Stage("corpus", what.seconds["corpus"], (tokenize,), resumes=True),
        Stage("pace", what.seconds["pace"], ((*pace, "--json", "{out}/pace.json"),)),
        Stage("pretrain", budget - what.around, (train,), resumes=True),
        Stage(
            "humaneval",
            what.seconds["humaneval"],
            ((*solve, "--json", "{out}/humaneval.json"),),
            resumes=True,
            lacks=absent,
        ),
        Stage(
            "speed",
            what.seconds["speed"],
            ((*measure, "--runs", "5", "--warmup-runs", "1", "--json", "{out}/speed.json"),),
        ),
        Stage("sample", what.seconds["sample"], (write,)),
    ]


def steps_of(pace: Path, seconds: int) -> dict[str, int]:
    """Values for the training command, from a measured step and the seconds for training: its steps, its warm-up steps,
    and the steps between two checkpoints. Raises InputError for a damaged file.
    """
    try:
        measured = json.loads(pace.read_text())["entries"][0]["step_seconds"]["all"]
        step = statistics.median(each for turn in measured for each in turn)
    except (OSError, ValueError, KeyError, IndexError):
        raise InputError(f"{pace} has no measured steps; remove {pace.parent} to start again") from None
    steps = max(10, int(SHARE * seconds / step))
    return {"steps": steps, "warmup": steps // 20, "every": max(1, min(steps // 10, int(120 / step)))}


def follow(
    stages: list[Stage],
    progress: Progress,
    words: dict[str, object],
    seconds: float,
    environment: dict[str, str],
    after: Callable[[Outcome], None],
) -> bool:
    """Runs stages that are not done while `seconds` last; returns whether no stage is left to run.

    A stage that cannot resume starts only if its whole limit is left, or if it is the first of this command. after:
    called with the outcome of a stage that has ended.
    """
    start, out, first = time.monotonic(), Path(str(words["out"])), True
    for stage in stages:
        if progress.is_done(stage):
            continue
        left = seconds - RESERVE - (time.monotonic() - start)
        limit = stage.seconds - progress.spent(stage.name)
        if left < min(limit, LEAST) or (not stage.resumes and left < limit and not first):
            return False
        if stage.name == "pretrain" and not progress.words:
            progress.words = steps_of(out / "pace.json", stage.seconds)
        first, began = False, time.monotonic()
        try:
            outcome = run(stage, words | progress.words, min(left, limit), environment)
        except BaseException:  # this process is stopped; the stage has saved if it can
            if stage.resumes:
                progress.add(Outcome(stage.name, "unfinished", time.monotonic() - began, "stopped"))
                progress.save(out)
            raise
        outcome = progress.add(outcome)
        progress.save(out)
        after(outcome)
        if outcome.bad and stage.name in NEEDED_BY_ALL:
            return True
        if not outcome.bad and not progress.is_done(stage):
            return False
    return True
