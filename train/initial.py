"""The state that a run with `initial` starts from: the weights of any checkpoint, and the moments of a training run."""

import hashlib
import sys
from dataclasses import fields

import jax
import orbax.checkpoint as ocp

from laneformer.checkpoint import SavedStep, checkpoint_files, fingerprint, open_plain, read_config, read_meta
from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError, ConfigError, one_line
from laneformer.files import check_folder
from laneformer.mesh import sharding
from laneformer.train.checkpoint import OPTIMIZER
from laneformer.train.config import FIRST, TrainConfig
from laneformer.train.distill import put
from laneformer.train.step import State, Trainer
from laneformer.weights import parameter_table

# Fields that may differ between the checkpoint and the run; all others determine weights or what weights compute.
_FREE = (
    "layout",
    "broadcast_delay",
    "use_early_comm",
    "early_lands_twice",
    "use_attention_comm",
    "use_mlp_comm",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def check_initial(config: TrainConfig, tokenizer_sha256: str) -> None:
    """Raises CheckpointError or ConfigError unless the weights of `config.initial` fit the model.

    Warns if the checkpoint has another tokenizer than the data. tokenizer_sha256: hash of the data's.
    """
    path, model = config.initial_path, config.model
    found = open_plain(path, num_lanes=lanes_to_cut(config)).config
    names = [field.name for field in fields(ModelConfig) if field.name not in _FREE] + ["head_size"]
    wrong = [
        f"{name} {getattr(found, name)!r} (model.{name} = {getattr(model, name)!r})"
        for name in names
        if getattr(found, name) != getattr(model, name)
    ]
    if wrong:
        raise ConfigError(f"initial = {path} differs from the run's model; set the model to its {', '.join(wrong)}")
    tokenizer = checkpoint_files(path) / "tokenizer.json"
    if tokenizer.exists() and hashlib.sha256(tokenizer.read_bytes()).hexdigest() != tokenizer_sha256:
        print(
            f"warning: the data was not tokenized with {tokenizer}; tokenize it again with --tokenizer unless both"
            " tokenizers give the same ids",
            file=sys.stderr,
        )


def lanes_to_cut(config: TrainConfig) -> int | None:
    """Number of lanes to cut the model of `config.initial` into, None if it has as many as the run."""
    lanes = config.model.num_lanes
    return None if read_config(config.initial_path).num_lanes == lanes else lanes


def read_state(config: TrainConfig, trainer: Trainer) -> State:
    """The state of `config.initial` before the first step, on the trainer's devices. Reports what it has.

    Raises CheckpointError for a damaged checkpoint.
    """
    table, path = parameter_table(config.model), config.initial_path
    opened = open_plain(path, "float32", lanes_to_cut(config))
    weights = {
        name: put(weight, sharding(table[name].spec, weight.shape, trainer.mesh)) for name, weight in opened.weights()
    }
    kind, step = config.optimizer.kind, opened.step if isinstance(opened, SavedStep) else None
    meta = {} if step is None else read_meta(step)
    phase = meta.get("phase", FIRST)
    before = meta.get("run", {}).get("optimizer.kind" if phase == FIRST else f"then.{phase}.optimizer.kind")
    if jax.process_index() == 0:
        moments = f"moments of {kind}" if before == kind else "no moments" + (f" (of {before})" if before else "")
        print(f"initial weights from {step or path}, {moments}")
    state = trainer.starting_at(weights)
    if step is None or before != kind:
        return state
    wanted = trainer.abstract_state()
    check_folder(step / OPTIMIZER)
    try:
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore((step / OPTIMIZER).absolute(), {"state": wanted.optimizer, "step": wanted.step})
    except Exception as error:  # Orbax raises the errors of its threads, even a plain Exception
        raise CheckpointError(f"{step / OPTIMIZER} is damaged ({one_line(error)}); restore a copy") from None
    if fingerprint(found) != meta["fingerprint"][OPTIMIZER]:
        raise CheckpointError(f"{step / OPTIMIZER} differs from what was saved; restore a copy")
    return State(state.params, found["state"], state.step)
