"""The generated C++ structs of the ops: types and order of the fields; an installation can generate them."""

import subprocess
import sys

import pytest

from laneformer.custom_calls import build, ops_header

FILE = """
from dataclasses import dataclass, field
from enum import IntEnum

TILE_ROWS = 16

class size(property):
    pass

@dataclass(frozen=True)
class Weight:
    path: str

@dataclass(frozen=True)
class Heads:
    heads: int

    @size
    def rows(self) -> int:
        "Rows in whole tiles."
        return (self.heads + 15) // TILE_ROWS * TILE_ROWS

class Kind(IntEnum):
    ONE = 0
    OTHER = 1

@dataclass(frozen=True)
class Add:
    kind: Kind
    weight: Weight
    scale: float
    window: int | None
    weights: tuple[Weight, ...] = ()
    gated: bool = False

    @property
    def twice(self) -> float:
        return 2 * self.scale

@dataclass(frozen=True)
class Drop(Heads):
    channels: int
    gated: bool
    bias: Weight = field(metadata={"elements": "channels"})
    sinks: Weight | None = field(metadata={"elements": "width"})

    @size
    def width(self) -> int:
        return self.rows * self.channels - (self.heads if self.gated else 0)

Op = Add | Drop

@dataclass(frozen=True)
class Model:
    modules: tuple[tuple[Op, ...], ...]
    last: Op | None
"""


@pytest.fixture
def header_of(tmp_path):
    def made(text: str) -> str:
        (tmp_path / "ops.py").write_text(text)
        return ops_header.ops_header(tmp_path / "ops.py")

    return made


def test_structs_have_the_types_and_order_of_the_fields(header_of):
    lines = [line.strip() for line in header_of(FILE).splitlines()]
    declared = [line.removesuffix("{};") for line in lines if line.endswith("{};")]
    assert declared == [
        *("Kind kind", "Array weight", "float scale", "std::optional<int64_t> window"),
        *("std::vector<Array> weights", "bool gated", "int64_t heads", "int64_t channels", "bool gated"),
        *("Array bias", "std::optional<Array> sinks"),
        "std::vector<std::vector<std::variant<Add, Drop>>> modules",
        "std::optional<std::variant<Add, Drop>> last",
    ]
    visited = [line for line in lines if line.startswith('visitor("Add.')]
    names = ("kind", "weight", "scale", "window", "weights", "gated")
    assert visited == [f'visitor("Add.{name}", {name});' for name in names]
    assert "enum class Kind : int32_t { one = 0, other = 1 };" in lines
    assert "constexpr int count_of(Kind) { return 2; }" in lines
    assert "using Op = std::variant<Add, Drop>;" in lines and "#define EACH_OP(F) F(Add) F(Drop)" in lines
    assert "struct Weight {" not in lines
    assert "struct Heads {" not in lines, "no field contains one"


def test_sizes_are_member_functions(header_of):
    """A `size` is translated with its fields, other sizes and constants."""
    lines = [line.strip() for line in header_of(FILE).splitlines()]
    assert "constexpr int kTileRows = 16;" in lines
    assert [line for line in lines if line.startswith("int64_t") and "()" in line] == [
        "int64_t rows() const { return (((heads + 15) / kTileRows) * kTileRows); }",
        "int64_t width() const { return ((rows() * channels) - (gated ? heads : 0)); }",
    ]


def test_vectors_are_visited_with_their_sizes(header_of):
    lines = [line.strip() for line in header_of(FILE).splitlines()]
    assert 'visitor("Drop.bias", bias, channels);' in lines
    assert 'visitor("Drop.sinks", sinks, width());' in lines
    assert not any(line.startswith('visitor("Add.') and line.count(",") > 1 for line in lines)


@pytest.mark.parametrize(
    "result", ["self.channels / 2", "abs(self.channels)", "self.heads if self.channels else 0", "self.other", "2.5"]
)
def test_sizes_that_cpp_does_not_have_are_refused(header_of, result):
    text = FILE.replace("self.rows * self.channels - (self.heads if self.gated else 0)", result)
    with pytest.raises(TypeError, match=r"Drop\.width"):
        header_of(text)


@pytest.mark.parametrize("kind", ["str", "tuple[int, float]", "complex"])
def test_types_without_a_cpp_type_are_refused(header_of, kind):
    with pytest.raises(TypeError, match="has no C\\+\\+ type"):
        header_of(FILE.replace("channels: int", f"channels: {kind}"))


def test_header_is_generated_without_packages():
    """As in an installation with only setuptools."""
    command = [sys.executable, "-I", "-S", str(build.HERE / "ops_header.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == build.ops_header() + "\n"
    for name in ("Product", "Attend", "OutputNorm", "Head", "DecoderOps"):
        assert f"struct {name} {{" in printed
