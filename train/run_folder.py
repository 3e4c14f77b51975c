"""The run folder: its lock, its record of settings, and the token folders it reads."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laneformer.checkpoint import STEPS
from laneformer.errors import CheckpointError, ConfigError, InputError, writing
from laneformer.files import files_inside
from laneformer.train.checkpoint import saved_steps, versions
from laneformer.train.config import TrainConfig, recorded
from laneformer.train.data.store import TokenStore
from laneformer.train.metrics.records import last_step
from laneformer.train.metrics.run_log import METRICS
from laneformer.train.same_run import check_same_run

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Stores = dict[Path, TokenStore]


def open_stores(config: TrainConfig) -> Stores:
    """Opens every token folder of the run.

    Raises InputError or ConfigError unless one tokenizer made all of them and its vocabulary fits into the model's.
    """
    paths = [path for phase in config.phases for path in (*phase.data.path, *phase.data.validation_path)]
    stores = {path: TokenStore.open(path) for path in dict.fromkeys(paths)}
    wanted, whose = any_of(stores).manifest.tokenizer_sha256, str(any_of(stores).path)
    if has_started(config.run_folder):
        wanted, whose = _read_record(config.run_folder)["tokenizer_sha256"], f"the run in {config.run_folder}"
    for store in stores.values():
        store.require_tokenizer(wanted, whose)
        if config.model.vocab_size < store.manifest.vocab_size:
            raise ConfigError(
                f"model.vocab_size = {config.model.vocab_size} is smaller than the vocabulary of {store.path}; set"
                f" --model.vocab-size {store.manifest.vocab_size}"
            )
    return stores


def any_of(stores: Stores) -> TokenStore:
    """One of the stores, to read the tokenizer that they share."""
    return next(iter(stores.values()))


@contextmanager
def only_one(run: Path) -> Iterator[None]:
    """Holds the run's lock, which the system releases even after a kill.

    Raises ConfigError if another process holds it or the folder cannot be made, LaneformerError if the lock cannot be
    written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if run.exists() else error.strerror
        raise ConfigError(f"cannot make folder {run} ({why}); choose another with --run") from None
    with writing(run / ".lock", "choose another folder with --run"):
        file = open(run / ".lock", "w")  # noqa: SIM115  closed below
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in {run}; wait for it, or choose another folder with --run"
            ) from None
        yield


def has_started(run: Path) -> bool:
    """Whether a step of the run is recorded. Until then the settings may still change."""
    metrics = run / METRICS
    return bool(saved_steps(run)) or (metrics.exists() and metrics.stat().st_size > 0)


def _read_record(run: Path) -> dict:
    """Content of run.json. Raises CheckpointError unless it has the settings that the run started with."""
    file = run / "run.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        wanted = {"config": dict, "tokenizer_sha256": str, "train_tokens_sha256": dict}
        if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in wanted.items()):
            raise ValueError(f"it must contain {', '.join(wanted)}")
        return record
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or missing ({error}); restore it, or choose another folder with --run"
        ) from None


def _check_checkpoints(config: TrainConfig, save_every: int) -> None:
    """Raises CheckpointError if saved steps are missing: the run would otherwise start over and drop its metrics.

    The run makes the checkpoint folder before its first step, and starts its second save after the first is complete.
    So a recorded step without the folder, or a step past the second save without a saved one, shows that checkpoints
    are missing. save_every: the value at the run's start.
    """
    run = config.run_folder
    folder, last = run / STEPS, last_step(run / METRICS)
    ends = [phase.last_step for phase in config.phases]
    second = sorted({save_every, 2 * save_every, *ends, ends[-1] + 1})[1]
    if last > (second if folder.exists() else 0) and not saved_steps(run):
        raise CheckpointError(
            f"{folder} holds no checkpoint, but {run / METRICS} has steps up to {last}; restore the checkpoints, or"
            " choose another folder with --run"
        )


def record_run(config: TrainConfig, stores: Stores) -> None:
    """Writes run.json and the tokenizer's files for a new run, or checks that `config` continues the folder's run."""
    run = config.run_folder
    saved = run / STEPS
    if saved.is_symlink() and not saved.exists():
        raise CheckpointError(
            f"{saved} links to {saved.readlink()}, which does not exist; restore it, or remove the link"
        )
    digests = {phase.name: [stores[path].digest("train") for path in phase.data.path] for phase in config.phases}
    if has_started(run):
        before = _read_record(run)
        done = max([1, *saved_steps(run)])
        changed = check_same_run(before["config"], config, run, done)
        for phase in config.phases:
            started = phase.first_step < done
            if started and before["train_tokens_sha256"].get(phase.name) != digests[phase.name]:
                raise InputError(
                    f"{', '.join(map(str, phase.data.path))} does not hold the tokens that {run} started with; restore"
                    " them, or choose another folder with --run"
                )
        _check_checkpoints(config, before["config"].get("save_every", config.save_every))
        if saved_steps(run):
            if changed:
                _record_changes(run, before, changed, digests, done)
                _copy_tokenizer(run, stores)
            return
    with writing(run, "choose another folder with --run"):
        _copy_tokenizer(run, stores)
        contents = {
            "config": recorded(config),
            "tokenizer_sha256": any_of(stores).manifest.tokenizer_sha256,
            "train_tokens_sha256": digests,
            "versions": versions(),
        }
        _write_record(run, contents)


def _record_changes(
    run: Path, before: dict, changed: dict[str, tuple[object, object]], digests: dict[str, list[str]], done: int
) -> None:
    """Updates run.json by settings that change no step that is done, and reports them."""
    known = {name: value for name, value in before["config"].items() if name not in changed}
    now = {name: new for name, (_, new) in changed.items() if new is not None}
    history = [*before.get("changes", []), {"after_step": done, "settings": changed}]
    with writing(run, "choose another folder with --run"):
        _write_record(run, before | {"config": known | now, "train_tokens_sha256": digests, "changes": history})
    listed = ", ".join(f"{name} (was {old!r}, now {new!r})" for name, (old, new) in list(changed.items())[:6])
    print(f"after step {done} with other settings: {listed}{', ...' if len(changed) > 6 else ''}")


def _copy_tokenizer(run: Path, stores: Stores) -> None:
    for store in stores.values():
        for file in files_inside(store.path, TOKENIZER_FILES):  # only instruction data has a chat template
            shutil.copyfile(file, run / file.name)


def _write_record(run: Path, contents: dict) -> None:
    part = run / "run.json.part"
    part.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    os.replace(part, run / "run.json")
