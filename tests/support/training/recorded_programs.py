"""Records the programs that tests/train/program/test_overlap.py reads: training steps of the first layers of
Laneformer 2B, compiled for eight H200.

To record them, pip install 'jax[cuda12]' and run: python -m tests.support.training.recorded_programs. No GPU is needed.
Of each program's text, only the parts that train/program/hlo.py reads are recorded.
"""

import dataclasses
import gzip
import re
import sys
from pathlib import Path

import laneformer as lf
from laneformer.config import ModelConfig
from laneformer.recipes.laneformer_2b import laneformer_2b
from laneformer.recipes.models import LANEFORMER_2B
from laneformer.train.planning.cluster import find_device
from laneformer.train.planning.compile_only import OPTIONS, compile_only_devices
from laneformer.train.step import Trainer
from tests.support.paths import ROOT

FOLDER = ROOT / "tests/train/program/recorded"
LAYERS, ROWS = 4, 8
CASES = [  # layout, remat, dtype of activations and exchanges
    *(("dtp(4)", remat, "float32") for remat in ("none", "dots", "block")),
    ("dtp(4)", "dots", "bfloat16"),
    ("ladder", "none", "float32"),
    ("tp", "none", "float32"),
]


def model_of(layout: str) -> ModelConfig:
    """The config of Laneformer 2B's first LAYERS layers with another layout."""
    return LANEFORMER_2B.replace(num_hidden_layers=LAYERS, sliding_window_n_layers=LAYERS // 2, layout=layout)


def compiled_text(layout: str, remat: str, dtype: str) -> str:
    """Text of the compiled step of the recipe laneformer_2b with LAYERS layers, for ROWS sequences on 1 x 8 H200."""
    devices, _ = compile_only_devices("h200", find_device("h200", 8), 1, "cuda")
    recipe = laneformer_2b()
    model = model_of(layout)
    config = dataclasses.replace(
        recipe,
        model=model,
        remat=remat,
        exchange_dtype=dtype,
        activation_dtype=dtype,
        accumulate=1,
        then={},
        compute_dtype="bfloat16",
        data=dataclasses.replace(recipe.data, batch_size=ROWS),
        mesh=dataclasses.replace(recipe.mesh, data=1),
    )
    trainer = Trainer(config, config.phases[0], lf.make_mesh(model.num_lanes, lane=8, devices=devices))
    return trainer.lower_step().compile(OPTIONS["cuda"]).as_text()


def reduced(text: str) -> str:
    """The text without layouts, shardings, source locations, and kernel settings that hlo.py does not read."""
    found = []
    for line in text.splitlines()[1:]:
        head, _, config = line.partition(", backend_config=")
        name = re.search(r'op_name="[^"]*"', head)
        head = re.sub(r", (?:metadata|sharding|operand_layout_constraints)=\{(?:[^{}]|\{[^{}]*\})*\}", "", head)
        head = re.sub(r"(\[[\d,]*\])\{[\d,]+(?::[^}]*)?\}", r"\1", head)
        if "_contracting_dimensions" in config or "known_trip_count" in config:
            head += f", backend_config={config}"
        found.append(
            f"{head}, metadata={{{name[0]}}}" if name and re.search("all-|reduce-scatter|collective", head) else head
        )
    return "\n".join(found) + "\n"


def read(layout: str, remat: str = "none", dtype: str = "float32") -> str:
    """The recorded text of a case."""
    return gzip.decompress(file_of(layout, remat, dtype).read_bytes()).decode()


def file_of(layout: str, remat: str, dtype: str) -> Path:
    return FOLDER / f"{re.sub(r'[^a-z0-9]', '', layout)}_{remat}_{dtype}.txt.gz"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        file_of(*case).write_bytes(gzip.compress(reduced(compiled_text(*case)).encode(), mtime=0))
        print(file_of(*case), file_of(*case).stat().st_size, file=sys.stderr)
