"""`python -m scripts.convert_dense DENSE_DIR OUT_DIR --lanes L`: cuts a dense model into lanes of heads and neurons
that work together.

The cut is a permutation of heads and neurons: with the tp layout the lanes give the dense logits, which is checked.
With a delayed layout they do not, until the model is trained again: docs/conversion.md.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import tyro

import laneformer as lf
from laneformer.checkpoint import checkpoint_files, open_checkpoint
from laneformer.errors import CheckpointError, ConfigError, run_command
from laneformer.precision import Precision
from scripts.convert import TOKENIZER_FILES
from scripts.convert_dense_affinity import (
    Assignment,
    Lanes,
    Late,
    Units,
    assign,
    contiguous,
    late_pairs,
    measure,
    random,
)
from train.config import DataConfig
from train.data.batches import Batches
from train.data.store import TokenStore

REPORT = "lanes.json"
RANDOM = 5  # random assignments whose mean is reported
TOLERANCE = 1e-4  # of the logits, relative to their largest: rounding of sums in another order stays far below


@dataclass(frozen=True, kw_only=True)
class Options:
    """Cut a dense model into lanes, each with the heads and neurons that work together, as a Hugging Face folder."""

    source: tyro.conf.Positional[Path]
    """The dense model: a Llama, Qwen2.5 or Qwen3 folder, or a training run of a model with one lane."""
    target: tyro.conf.Positional[Path]
    """Folder to write: config.json, model.safetensors, the tokenizer, and lanes.json with what went where."""
    lanes: int
    """Lanes to cut it into (L), a divisor of its key/value heads and feed-forward columns."""
    layout: str = "dtp(1)"
    """The layout it will be trained with: decides which modules read each other late, and is written to config.json."""
    assignment: Literal["affinity", "contiguous", "random"] = "affinity"
    """affinity: see scripts/convert_dense_affinity.py; contiguous: as tensor parallelism cuts; random: to compare with.
    """
    calibration: Path | None = None
    """Folder of `python -m scripts.tokenize` whose training text shows what works together; without it random tokens
    do, and less well.
    """
    calibration_rows: int = 8
    """Sequences of it, of up to 256 tokens."""
    seed: int = 0
    """Decides the random assignments, those that affinity begins with, and the calibration's rows."""
    overwrite: bool = False
    """Replace a checkpoint that TARGET already holds."""


def convert_dense(options: Options) -> str:
    """Writes the folder and returns lines that say what it holds. Raises LaneformerError for anything that cannot be
    done.
    """
    if (options.target / "config.json").exists() and not options.overwrite:
        raise CheckpointError(
            f"{options.target} already holds a checkpoint: choose another folder, or give --overwrite"
        )
    if options.target.absolute() == options.source.absolute():
        raise CheckpointError("SOURCE and TARGET are the same folder: choose another TARGET")
    config = lane_config(open_checkpoint(options.source).config, options)
    ids = calibration_ids(config, options)
    dense = lf.load(options.source, precision=Precision(param=open_checkpoint(options.source).dtype))
    sizes = [config.num_key_value_heads, config.intermediate_size] * config.num_hidden_layers
    late = late_pairs(config.schedule)
    modules = measure(dense, ids) if late else []
    lanes = chosen_lanes(options, modules, late, sizes)
    model = cut(dense, config, lanes)
    difference, scale = largest_difference(dense, model, ids[:2])
    if not difference <= TOLERANCE * scale:
        raise CheckpointError(
            f"the lanes' logits are {difference:.3g} from the dense ones (of up to {scale:.3g}): nothing was written"
        )
    lf.save_hf(model, options.target)
    beside = checkpoint_files(options.source)
    for name in (name for name in TOKENIZER_FILES if (beside / name).exists()):
        shutil.copyfile(beside / name, options.target / name)
    scores = missed_by(modules, late, lanes, options)
    (options.target / REPORT).write_text(
        json.dumps(report(options, lanes, scores, difference), indent=1) + "\n", encoding="utf-8"
    )
    said = [
        (
            f"{options.target}: {lf.parameter_count(config):,} parameters, {config.num_lanes} lanes, layout"
            f" {config.layout}, {options.assignment} assignment"
        ),
        (
            f"with layout tp its logits are the dense ones to {difference:.2g} (largest {scale:.3g}) on {ids[:2].size}"
            " tokens"
        ),
    ]
    if scores:
        said.append(
            "read late, per unit of what is read: " + ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
        )
    return "\n".join(said)


def lane_config(dense: lf.ModelConfig, options: Options) -> lf.ModelConfig:
    """The dense model's config with lanes. Raises ConfigError unless it is dense, the lanes divide it and the layout is
    known.
    """
    if dense.num_lanes != 1 or any(own.at != m or own.scale != 1.0 for m, own in enumerate(dense.schedule.own)):
        raise ConfigError(
            f"{options.source} has {dense.num_lanes} lanes and layout {dense.layout}: give a dense model (one lane, tp)"
        )
    if options.lanes < 2:
        raise ConfigError(f"lanes = {options.lanes}: a dense model is cut into at least 2")
    return dense.replace(
        num_lanes=options.lanes,
        layout=options.layout,
        lm_head_type="replicate",
        pre_norm_lane_agg=False,
        replicated_rmsn_scale=True,
    )


def calibration_ids(config: lf.ModelConfig, options: Options) -> np.ndarray:
    """Token ids int32 [rows, length]. Raises InputError or ConfigError for a folder that does not fit the model."""
    length, rows = min(256, config.max_position_embeddings), options.calibration_rows
    if rows < 1:
        raise ConfigError(f"calibration_rows = {rows}: it must be at least 1")
    if options.calibration is None:
        return np.random.default_rng(options.seed).integers(0, config.vocab_size, (rows, length), np.int32)
    store = TokenStore.open(options.calibration)
    if store.manifest.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{options.calibration} has a vocabulary of {store.manifest.vocab_size}, the model one of"
            f" {config.vocab_size}: tokenize with the model's own tokenizer.json"
        )
    data = DataConfig(path=(options.calibration,), sequence_length=length, batch_size=rows)
    return Batches(data, [store], options.seed).batch_at(0)["ids"][:, :length]


def chosen_lanes(options: Options, modules: list[Units], late: Late, sizes: list[int]) -> Lanes:
    """Lane of every unit of every module, as the options ask for."""
    if options.assignment == "contiguous":
        return contiguous(sizes, options.lanes)
    if options.assignment == "random":
        return random(sizes, options.lanes, options.seed)
    if not late:
        raise ConfigError(
            f"layout {options.layout} delays nothing, so affinity has nothing to go by: give the layout that the model"
            " will be trained with (--layout 'dtp(1)'), or --assignment contiguous"
        )
    return assign(modules, late, options.lanes, options.seed)


def cut(dense: lf.Laneformer, config: lf.ModelConfig, lanes: Lanes) -> lf.Laneformer:
    """The dense model's weights with every unit in its lane; inside a lane units keep their order."""

    def lane_first(path: str, w: np.ndarray) -> np.ndarray:
        names = path.split(".")
        name = names[-1].removesuffix("_bias")
        if name not in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"):
            shared = w.ndim == (2 if name in ("lm_head", "tok_embeddings") else 1)
            return w if shared else w[0]  # a norm or head that the one lane had for itself
        order = np.argsort(lanes[2 * int(names[1]) + (names[2] == "feed_forward")], kind="stable")
        if name in ("wo", "w2"):
            columns = w[0].reshape(w.shape[1], len(order), -1)[:, order]
            return columns.reshape(w.shape[1], config.num_lanes, -1).swapaxes(0, 1)
        return w[0].reshape(len(order), -1, *w.shape[2:])[order].reshape(config.num_lanes, -1, *w.shape[2:])

    weights = {
        path: jnp.asarray(np.ascontiguousarray(lane_first(path, np.asarray(w)))) for path, w in dense.weights().items()
    }
    return lf.Laneformer(config, weights, dense.precision)


def largest_difference(dense: lf.Laneformer, model: lf.Laneformer, ids: np.ndarray) -> tuple[float, float]:
    """Between the dense logits and those of the lanes under tp, and the largest dense logit."""
    wanted = np.asarray(dense(ids), np.float64)
    found = np.asarray(
        lf.Laneformer(model.config.replace(layout="tp"), model.weights(), dense.precision)(ids), np.float64
    )
    return float(np.abs(found - wanted).max()), float(np.abs(wanted).max())


def missed_by(modules: list[Units], late: Late, lanes: Lanes, options: Options) -> dict[str, float]:
    """What lanes miss of each other: with this assignment, with a contiguous one, the mean of random ones. Nothing
    without delay.
    """
    if not late:
        return {}
    sizes = [len(module) for module in lanes]

    def missed(lanes: Lanes) -> float:
        return Assignment(modules, late, lanes, options.lanes).missed()

    others = [missed(random(sizes, options.lanes, options.seed + n)) for n in range(RANDOM)]
    scores = {
        "contiguous": missed(contiguous(sizes, options.lanes)),
        f"mean of {RANDOM} random": float(np.mean(others)),
    }
    return {f"this ({options.assignment})": missed(lanes)} | scores


def report(options: Options, lanes: Lanes, scores: dict[str, float], difference: float) -> dict:
    """What lanes.json says. Per layer and lane: numbers of the dense model's key/value heads and neurons, in their new
    order.
    """

    def members(module: np.ndarray) -> list[list[int]]:
        return [np.flatnonzero(module == lane).tolist() for lane in range(options.lanes)]

    layers = [{"kv_heads": members(a), "neurons": members(b)} for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    settings = {
        "source": str(options.source),
        "lanes": options.lanes,
        "layout": options.layout,
        "assignment": options.assignment,
        "calibration": str(options.calibration or "random tokens"),
        "calibration_rows": options.calibration_rows,
        "seed": options.seed,
    }
    return settings | {"read_late": scores, "largest_difference_of_tp_logits": difference, "layers": layers}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a user's mistake."""
    return run_command(convert_dense, Options, "python -m scripts.convert_dense", arguments)


if __name__ == "__main__":
    sys.exit(main())
