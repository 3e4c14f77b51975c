"""The run folder: whose it is, what is recorded in it, and the data that belongs to it."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laneformer.errors import CheckpointError, ConfigError, InputError
from train.checkpoint import saved_steps, versions
from train.config import TrainConfig, check_same_run, recorded
from train.run_log import METRICS
from train.shards import TokenStore

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Stores = dict[Path, TokenStore]


def open_stores(config: TrainConfig) -> Stores:
    """Every token folder of the run. Raises InputError or ConfigError unless one tokenizer made them all and the model has room for it."""
    paths = [path for phase in config.phases for path in (*phase.data.path, *phase.data.validation_path)]
    stores = {path: TokenStore.open(path) for path in dict.fromkeys(paths)}
    for store in stores.values():
        store.require_tokenizer(any_of(stores).manifest.tokenizer_sha256)
        if config.model.vocab_size < store.manifest.vocab_size:
            raise ConfigError(
                f"model.vocab_size = {config.model.vocab_size} is smaller than the {store.manifest.vocab_size} tokens of {store.path}: "
                f"set --model.vocab-size {store.manifest.vocab_size}"
            )
    return stores


def any_of(stores: Stores) -> TokenStore:
    """A store to ask for the tokenizer, which they share."""
    return next(iter(stores.values()))


@contextmanager
def only_one(run: Path) -> Iterator[None]:
    """Holds the run's lock, which the system gives back even after a kill. Raises ConfigError if another process has it."""
    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in {run}: wait for it, or give another folder with --run") from None
        yield


def record_run(config: TrainConfig, stores: Stores) -> None:
    """Writes run.json and the tokenizer's files for a new run, or checks that this is the run that the folder holds.

    A run is new until its first step is recorded: what failed before that binds nobody to its settings.
    """
    run = config.run_folder
    record, metrics = run / "run.json", run / METRICS
    digests = {phase.name: [stores[path].digest("train") for path in phase.data.path] for phase in config.phases}
    if saved_steps(run) or (metrics.exists() and metrics.stat().st_size):
        try:
            before = json.loads(record.read_text(encoding="utf-8"))
            settings, tokenizer, tokens = before["config"].copy(), before["tokenizer_sha256"], before["train_tokens_sha256"].copy()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{record} is damaged or missing ({error!r}): put it back, or choose another folder with --run") from None
        check_same_run(settings, config, run)
        any_of(stores).require_tokenizer(tokenizer)
        for phase in config.phases:
            if tokens.get(phase.name) != digests[phase.name]:
                raise InputError(
                    f"{', '.join(map(str, phase.data.path))}: not the tokens that {run} began with; tokenize the same text, or choose "
                    "another folder with --run"
                )
        return
    for file in TOKENIZER_FILES:  # instruction data brings the chat template
        for store in stores.values():
            if (store.path / file).exists():
                shutil.copyfile(store.path / file, run / file)
    contents = {
        "config": recorded(config),
        "tokenizer_sha256": any_of(stores).manifest.tokenizer_sha256,
        "train_tokens_sha256": digests,
        "versions": versions(),
    }
    part = run / "run.json.part"
    part.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    os.replace(part, record)
