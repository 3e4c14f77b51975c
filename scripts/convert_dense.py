"""`python -m scripts.convert_dense DENSE_DIR OUT_DIR --lanes L`: cuts a dense model into lanes.

Heads and neurons that work together share a lane. The cut is a permutation of heads and neurons: with the tp layout the
lanes compute the dense logits, which is checked. With a delayed layout the logits differ, and the model must be trained
again (docs/conversion.md).
"""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import tyro

import laneformer as lf
from laneformer.checkpoint import checkpoint_files, open_plain
from laneformer.commands.convert import TOKENIZER_FILES
from laneformer.commands.convert_dense_affinity import (
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
from laneformer.errors import CheckpointError, ConfigError, run_command, writing
from laneformer.files import files_inside
from laneformer.precision import Precision
from laneformer.train.config import DataConfig
from laneformer.train.data.batches import Batches
from laneformer.train.data.store import TokenStore
from laneformer.weights import parameter_table

REPORT = "lanes.json"
RANDOM = 5  # random assignments whose mean is reported
CUT = {  # fields of ModelConfig that a dense model may set; every other one must have its default
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "gated_mlp", "tie_word_embeddings"),
    *("num_lanes", "layout", "broadcast_delay", "use_early_comm", "early_lands_twice", "use_attention_comm"),
    *("use_mlp_comm", "lm_head_type", "pre_norm_lane_agg", "replicated_rmsn_scale"),
    *("sliding_window", "sliding_window_n_layers", "unclamped_layers", "swa_layers"),
    *("nope_layers", "rope_theta", "rope_scaling", "rotary_dim", "norm_eps", "norm_plus_one"),
    *("qkv_bias", "attention_gate", "qk_norm", "qk_norm_over", "bos_token_id", "eos_token_id"),
}
TOLERANCE = 1e-4  # of the logits, relative to the largest; sums in another order differ by far less


@dataclass(frozen=True, kw_only=True)
class Options:
    """Cut a dense model into lanes of heads and neurons that work together, and write it as a Hugging Face folder."""

    source: tyro.conf.Positional[Path]
    """Dense model: a Llama, Mistral, Qwen or SmolLM folder, or a training run of a model with one lane."""
    target: tyro.conf.Positional[Path]
    """Folder to write: config.json, model.safetensors, the tokenizer, and lanes.json with the assignment."""
    lanes: int
    """Number of lanes (L), a divisor of the key/value heads and feed-forward columns."""
    layout: str = "dtp(1)"
    """Layout to train the model with, written to config.json; it decides which modules read each other late."""
    assignment: Literal["affinity", "contiguous", "random"] = "affinity"
    """affinity: see scripts/convert_dense_affinity.py; contiguous: as in tensor parallelism; random: for comparison."""
    calibration: Path | None = None
    """Folder of `python -m scripts.tokenize` with text to measure affinity on (default: random tokens)."""
    calibration_rows: int = 8
    """Sequences of up to 256 tokens to measure on."""
    seed: int = 0
    """Seed of random assignments, of the initial ones of affinity, and of the choice of calibration rows."""
    overwrite: bool = False
    """Replace a checkpoint in TARGET."""


def convert_dense(options: Options) -> str:
    """Writes the folder and returns lines that sum it up. Raises LaneformerError."""
    if (options.target / "config.json").exists() and not options.overwrite:
        raise CheckpointError(
            f"{options.target} already holds a checkpoint; choose another folder, or give --overwrite"
        )
    if options.target.absolute() == options.source.absolute():
        raise CheckpointError("SOURCE and TARGET are the same folder; choose another TARGET")
    source = open_plain(options.source)
    config = lane_config(source.config, options)
    tokenizer_files = files_inside(checkpoint_files(options.source), TOKENIZER_FILES)
    ids = calibration_ids(config, options)
    dense = lf.load(options.source, precision=Precision(param=source.dtype))
    sizes = [config.num_key_value_heads, config.intermediate_size] * config.num_hidden_layers
    late = late_pairs(config.schedule)
    progress = Progress()
    modules = measure(dense, ids, progress) if late else []
    lanes = chosen_lanes(options, modules, late, sizes, progress)
    model = cut(dense, config, lanes)
    difference, scale = largest_difference(dense, model, ids[:2])
    if not difference <= TOLERANCE * scale:
        raise CheckpointError(
            f"the lanes' logits differ by {difference:.3g} from the dense ones (of up to {scale:.3g}); nothing was"
            " written, check the checkpoint in SOURCE"
        )
    scores = missed_by(modules, late, lanes, options)
    with writing(options.target, "choose another folder"):
        options.target.mkdir(parents=True, exist_ok=True)
        for file in tokenizer_files:
            shutil.copyfile(file, options.target / file.name)
        (options.target / REPORT).write_text(
            json.dumps(report(options, lanes, scores, difference), indent=1) + "\n", encoding="utf-8"
        )
    lf.save_hf(model, options.target)  # config.json last: a folder with it is complete
    lines = [
        (
            f"{options.target}: {lf.parameter_count(config):,} parameters, {config.num_lanes} lanes, layout"
            f" {config.layout}, {options.assignment} assignment"
        ),
        (
            f"with layout tp its logits differ from the dense ones by {difference:.2g} at most (largest {scale:.3g}) on"
            f" {ids[:2].size} tokens"
        ),
    ]
    if scores:
        lines.append("read late, per unit read: " + ", ".join(f"{name} {score:.4f}" for name, score in scores.items()))
    return "\n".join(lines)


def lane_config(dense: lf.ModelConfig, options: Options) -> lf.ModelConfig:
    """The dense model's config with lanes.

    Raises ConfigError for a model with lanes or with an option that is not in CUT, for lanes that do not divide its
    key/value heads, and for an unknown layout.
    """
    if dense.num_lanes != 1 or any(own.at != m or own.scale != 1.0 for m, own in enumerate(dense.schedule.own)):
        raise ConfigError(
            f"{options.source} has {dense.num_lanes} lanes and layout {dense.layout}; give a dense model (one lane, tp)"
        )
    for field in dataclasses.fields(dense):
        if field.name not in CUT and (value := getattr(dense, field.name)) != field.default:
            raise ConfigError(
                f"{options.source} has {field.name} = {value!r}, but models with it are not cut into lanes here;"
                " load the model with lanes and layout tp instead"
            )
    if options.lanes < 2:
        raise ConfigError(f"--lanes must be at least 2, got {options.lanes}")
    if dense.num_key_value_heads % options.lanes:
        raise ConfigError(
            f"--lanes {options.lanes} does not divide num_key_value_heads = {dense.num_key_value_heads}, and no"
            " key/value head is split here; give fewer lanes"
        )
    return dense.replace(
        num_lanes=options.lanes,
        layout=options.layout,
        lm_head_type="replicate",
        pre_norm_lane_agg=False,
        replicated_rmsn_scale=True,
    )


def calibration_ids(config: lf.ModelConfig, options: Options) -> np.ndarray:
    """Calibration token ids, int32 [rows, length]. Raises InputError or ConfigError for a folder that does not fit."""
    length, rows = min(256, config.max_position_embeddings), options.calibration_rows
    if rows < 1:
        raise ConfigError(f"--calibration-rows must be at least 1, got {rows}")
    if options.calibration is None:
        return np.random.default_rng(options.seed).integers(0, config.vocab_size, (rows, length), np.int32)
    store = TokenStore.open(options.calibration)
    if store.manifest.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{options.calibration} has a vocabulary of {store.manifest.vocab_size}, but the model has"
            f" {config.vocab_size}; tokenize with the model's tokenizer.json"
        )
    data = DataConfig(path=(options.calibration,), sequence_length=length, batch_size=rows)
    return Batches(data, [store], options.seed).batch_at(0)["ids"][:, :length]


class Progress:
    """Prints what a long computation does to standard error, at most every few seconds."""

    SECONDS = 5.0

    def __init__(self):
        self.last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self.last >= self.SECONDS:
            print(text, file=sys.stderr, flush=True)
            self.last = time.monotonic()


def chosen_lanes(
    options: Options, modules: list[Units], late: Late, sizes: list[int], progress: Callable[[str], None]
) -> Lanes:
    """Lane of every unit of every module, by the chosen assignment. Raises ConfigError for affinity without delay."""
    if options.assignment == "contiguous":
        return contiguous(sizes, options.lanes)
    if options.assignment == "random":
        return random(sizes, options.lanes, options.seed)
    if not late:
        raise ConfigError(
            f"layout {options.layout} delays nothing, so affinity is undefined; give the layout to train the model with"
            " (--layout 'dtp(1)'), or --assignment contiguous"
        )
    return assign(modules, late, options.lanes, options.seed, progress)


def cut(dense: lf.Laneformer, config: lf.ModelConfig, lanes: Lanes) -> lf.Laneformer:
    """The dense model's weights with every unit in its lane; units keep their order inside a lane."""

    table = parameter_table(dense.config)

    def lane_first(path: str, w: np.ndarray) -> np.ndarray:
        names, weight = path.split("."), table[path]
        if len(names) < 4 or weight.spec[0] != "lane":
            shared = w.ndim == (2 if path in ("lm_head", "tok_embeddings") else 1)
            return w if shared else w[0]  # a norm or head of the only lane
        order = np.argsort(lanes[2 * int(names[1]) + (names[2] == "feed_forward")], kind="stable")
        if weight.initial == "output":
            columns = w[0].reshape(w.shape[1], len(order), -1)[:, order]
            return columns.reshape(w.shape[1], config.num_lanes, -1).swapaxes(0, 1)
        return w[0].reshape(len(order), -1, *w.shape[2:])[order].reshape(config.num_lanes, -1, *w.shape[2:])

    weights = {
        path: jnp.asarray(np.ascontiguousarray(lane_first(path, np.asarray(w)))) for path, w in dense.weights().items()
    }
    return lf.Laneformer(config, weights, dense.precision)


def largest_difference(dense: lf.Laneformer, model: lf.Laneformer, ids: np.ndarray) -> tuple[float, float]:
    """Largest difference between the lanes' logits under tp and the dense ones, and the largest dense logit."""
    together = lf.Laneformer(model.config.replace(layout="tp"), model.weights(), dense.precision)
    wanted, found = (np.asarray(some(jnp.asarray(ids)), np.float64) for some in (dense, together))
    return float(np.abs(found - wanted).max()), float(np.abs(wanted).max())


def missed_by(modules: list[Units], late: Late, lanes: Lanes, options: Options) -> dict[str, float]:
    """Share of their inputs that lanes read late, by assignment: the chosen one, a contiguous one, and the mean of
    random ones. Empty without delay.
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
    """Content of lanes.json. Per layer and lane: indices of the dense model's key/value heads and neurons, in their new
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
    """Returns the exit status: 0, or 2 for a user's mistake."""
    return run_command(convert_dense, Options, "python -m scripts.convert_dense", arguments)


if __name__ == "__main__":
    sys.exit(main())
