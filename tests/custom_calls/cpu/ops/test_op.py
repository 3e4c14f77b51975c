"""The slices of the CPU kernel: a kind of op is named in the file of its slice alone."""

import re
from pathlib import Path
from typing import get_args

from laneformer.custom_calls import build
from laneformer.ops import Op, Product

KINDS = [kind.__name__ for kind in get_args(Op) if kind is not Product]


def code_of(path: Path) -> str:
    """The text of a C++ file without its comments."""
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


def test_kinds_are_named_in_their_slices_alone():
    """A list of kinds elsewhere would have to be extended for each new op; EACH_OP is generated. kernels/ has structs
    of such names for the kernels' arguments.
    """
    shared = [build.HERE / "common", *(folder for folder in build.CPU if "kernels" not in folder.parts)]
    files = [path for folder in shared for path in folder.glob("*.[ch]*") if path.suffix in (".h", ".cc")]
    outside = [path for path in files if not (path.parent.name == "ops" and path.suffix == ".cc")]
    named = re.compile(rf"\b({'|'.join(KINDS)})\b")
    assert len(outside) > 20
    assert {path.name: named.findall(code_of(path)) for path in outside if named.search(code_of(path))} == {}


def test_each_kind_has_one_slice():
    slices = {path.name: code_of(path) for path in (build.HERE / "cpu" / "ops").glob("*.cc")}
    for kind in KINDS:
        made = [name for name, text in slices.items() if f"make_op(const plan::{kind}&" in text]
        checked = [name for name, text in slices.items() if f"void check(const {kind}&" in text]
        assert made == checked and len(made) == 1, kind
