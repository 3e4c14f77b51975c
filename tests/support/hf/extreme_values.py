"""Folders whose config.json has extreme values, as a stranger could write them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.support.paths import DENSE, MOE, ORACLE

FOLDERS = [*sorted(path.parent for root in (MOE, DENSE) for path in root.glob("*/config.json")), ORACLE / "case_03"]
NUMBERS = (
    *(0, 1, 3, -1, -256, 0.5, 1e308, -1e308, 1e-308, math.nan, math.inf),
    *(2**power - less for power in (24, 31, 32) for less in (0, 1, 64, 256)),
    *(2**40, 2**62, 2**63, 10**30, 10**400),
)
VALUES = (*NUMBERS, None, True, "x", [], [0], [2**40], {}, {"x": 1})
# Fields that not every config.json has
FURTHER = (
    *(
        "max_position_embeddings",
        "sliding_window",
        "rope_theta",
        "rms_norm_eps",
        "head_dim",
        "num_lanes",
        "layer_types",
    ),
    *(
        "num_nextn_predict_layers",
        "broadcast_delay",
        "rotary_dim",
        "partial_rotary_factor",
        "rope_scaling",
        "layer_types",
    ),
)


def fields_of(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field, without the schemes of quantized weights."""
    for name, value in values.items():
        if name != "quantization_config":
            yield (*before, name)
            if isinstance(value, dict):
                yield from fields_of(value, (*before, name))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@st.composite
def changes(draw, values=VALUES) -> tuple[Path, dict[tuple[str, ...], Any]]:
    """A folder, and one or two fields of its config.json with other values."""
    folder = draw(st.sampled_from(FOLDERS))
    fields = dict.fromkeys([*fields_of(config_of(folder)), *((name,) for name in FURTHER)])
    return folder, draw(st.dictionaries(st.sampled_from([*fields]), st.sampled_from(values), min_size=1, max_size=2))


def write_changed(folder: Path, changed: dict[tuple[str, ...], Any], target: Path) -> None:
    """Writes a folder with links to the files of `folder`, and its config.json with the changed values."""
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    values = config_of(folder)
    for path, value in sorted(changed.items(), key=lambda change: -len(change[0])):
        at = values
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(values))
