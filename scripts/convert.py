"""`python -m scripts.convert SOURCE TARGET`: writes any checkpoint as a Hugging Face folder."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from laneformer.checkpoint import checkpoint_files, is_run, load
from laneformer.errors import CheckpointError, run_command
from laneformer.files import files_inside
from laneformer.hf.folder import HfFolder, save_hf
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.tokenizer import Tokenizer, with_tokens_before
from laneformer.infer.text.tokenizer_files import TOKENIZER
from laneformer.weights import parameter_count

TOKENIZER_FILES = (
    TOKENIZER,
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a training run or a dense folder (docs/conversion.md) cut into lanes as a Hugging Face folder."""

    source: tyro.conf.Positional[Path]
    """Training run, one step of it (RUN/checkpoints/STEP), or Hugging Face folder."""
    target: tyro.conf.Positional[Path]
    """Folder to write."""
    lanes: int | None = None
    """Lanes to cut a dense model into; a Laneformer keeps its lanes."""
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """Dtype of the written weights."""
    weights: Literal["bfloat16", "bf12"] | None = None
    """Format of bfloat16 weights: bfloat16 (the default), or 12 bits without loss (docs/bf12.md). Quantized weights
    stay quantized (docs/quantized.md) unless this is bfloat16.
    """
    round_exceptions: bool = False
    """With --weights bf12: change the weights that a matrix's table does not hold, at most 1e-3 of them, to the nearest
    value that it holds. A matrix with more such weights stays bfloat16, unchanged.
    """
    spelling: Literal["laneformer_tp", "laneformer", "llama"] = "laneformer_tp"
    """model_type in config.json: the first two differ in the names of the exchange switches; llama, for transformers,
    vLLM and llama.cpp, is possible for layout tp or one lane without options that a Llama does not have.
    """
    overwrite: bool = False
    """Replace a checkpoint in TARGET."""


def convert(options: Options) -> str:
    """Writes the folder and returns a line that sums it up. Raises LaneformerError."""
    if (options.target / "config.json").exists() and not options.overwrite:
        raise CheckpointError(
            f"{options.target} already holds a checkpoint; choose another folder, or give --overwrite"
        )
    if options.target.absolute() == options.source.absolute():
        raise CheckpointError("SOURCE and TARGET are the same folder; choose another TARGET")
    beside = checkpoint_files(options.source)
    tokenizer_files = files_inside(beside, TOKENIZER_FILES)
    model = load(
        options.source,
        None if options.dtype == "stored" else options.dtype,
        num_lanes=options.lanes,
        weights="bfloat16" if options.weights == "bfloat16" else None,
    )
    save_hf(
        model,
        options.target,
        spelling=options.spelling,
        weights=options.weights,
        round_exceptions=options.round_exceptions,
    )
    for file in tokenizer_files:
        shutil.copyfile(file, options.target / file.name)
    copied = {file.name for file in tokenizer_files}
    config, dtype = model.config, model.tok_embeddings[...].dtype.name
    if is_run(options.source) and TOKENIZER in copied:  # of which the recipe may have chosen what precedes a text
        used, written = Tokenizer.find(options.source, config.bos_token_id), Tokenizer.find(options.target)
        if used is not None and written is not None and used.before != written.before:
            with_tokens_before(options.target / TOKENIZER, used.before)
    if "chat_template.jinja" in copied and "generation_config.json" not in copied:
        # Other programs read the tokens that end a turn from this file.
        ends = [*ChatTemplate.load(beside).ends(config.eos_token_id)]
        (options.target / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ends}) + "\n", encoding="utf-8"
        )
    tokenizer = "with its tokenizer" if {TOKENIZER, "tiktoken.model"} & {*copied} else "no tokenizer.json found"
    size = f"{parameter_count(config):,} parameters in {dtype}"
    if options.weights == "bf12":
        folder = HfFolder(options.target)
        size += f", {folder.packed_weights:,} of them in 12 bits each"
        if options.round_exceptions:
            size += f" ({folder.rounded_weights:,} changed to the nearest value that their table holds)"
    return f"{options.target}: {size}, {config.num_lanes} lanes, layout {config.layout}; {tokenizer}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake."""
    return run_command(convert, Options, "python -m scripts.convert", arguments)


if __name__ == "__main__":
    sys.exit(main())
