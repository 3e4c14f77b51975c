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

class kept(property):
    pass

class KeptDtype(IntEnum):
    CACHE = 0
    FLOAT32 = 1

@dataclass(frozen=True)
class Kept:
    shape: tuple[int, ...]
    dtype: KeptDtype = KeptDtype.CACHE
    fixed: bool = False
    every: int = 1

@dataclass(frozen=True)
class Weight:
    path: str

    @size
    def elements(self) -> int:
        return len(self.path)

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

    @kept
    def sums(self) -> Kept:
        return Kept((self.weight.elements, 2), KeptDtype.FLOAT32, fixed=True)

@dataclass(frozen=True)
class Drop(Heads):
    channels: int
    gated: bool
    bias: Weight = field(metadata={"elements": "channels"})
    sinks: Weight | None = field(metadata={"elements": "width"})
    inner: Heads | None

    @size
    def width(self) -> int:
        return self.rows * self.channels - (self.heads if self.gated else 0)

    @kept
    def keys(self) -> Kept:
        return Kept((self.width // 2,))

    @kept
    def sums(self) -> Kept | None:
        return Kept(shape=(self.inner.rows,), every=self.inner.heads) if self.inner else None

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
        *("int64_t heads", "Kind kind", "Array weight", "float scale", "std::optional<int64_t> window"),
        *("std::vector<Array> weights", "bool gated", "int64_t heads", "int64_t channels", "bool gated"),
        *("Array bias", "std::optional<Array> sinks", "std::optional<Heads> inner"),
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


def test_sizes_are_member_functions(header_of):
    """A `size` is translated with its fields, other sizes and constants."""
    lines = [line.strip() for line in header_of(FILE).splitlines()]
    assert "constexpr int kTileRows = 16;" in lines
    assert [line for line in lines if line.startswith("int64_t") and "()" in line] == [
        *("int64_t rows() const { return (((heads + 15) / kTileRows) * kTileRows); }",) * 2,
        "int64_t width() const { return ((rows() * channels) - (gated ? heads : 0)); }",
    ]


def test_vectors_are_visited_with_their_sizes(header_of):
    lines = [line.strip() for line in header_of(FILE).splitlines()]
    assert 'visitor("Drop.bias", bias, channels);' in lines
    assert 'visitor("Drop.sinks", sinks, width());' in lines
    assert not any(line.startswith('visitor("Add.') and line.count(",") > 1 for line in lines)


def test_kept_arrays_are_visited_with_their_kinds(header_of):
    lines = [line.strip() for line in header_of(FILE).splitlines()]
    assert (
        "enum class Kept : int32_t { sums, keys };" in lines and "constexpr int count_of(Kept) { return 2; }" in lines
    )
    assert 'constexpr const char* kKeptNames[] = {"sums", "keys"};' in lines
    assert [line for line in lines if "Kept::" in line] == [
        "visitor(Kept::sums, std::vector<int64_t>{weight.elements(), 2}, KeptDtype::float32, true, int64_t{1});",
        "visitor(Kept::keys, std::vector<int64_t>{(width() / 2)}, KeptDtype::cache, false, int64_t{1});",
        "if (inner) visitor(Kept::sums, std::vector<int64_t>{inner->rows()}, KeptDtype::cache, false,"
        " int64_t{inner->heads});",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" if self.inner else None", "", r"Drop\.sums: self\.inner\.rows"),
        ("if self.inner else", "if self.gated else", r"Drop\.sums: self\.inner\.rows"),
        ("self.weight.elements", "self.weight.path", r"Add\.sums: self\.weight\.path"),
        ("Kept((self.width // 2,))", "(self.width // 2,)", r"Drop\.keys: the getter must return Kept"),
    ],
)
def test_kept_arrays_that_cpp_does_not_have_are_refused(header_of, old, new, message):
    with pytest.raises(TypeError, match=message):
        header_of(FILE.replace(old, new))


@pytest.mark.parametrize(
    "result", ["self.channels / 2", "abs(self.channels)", "self.heads if self.channels else 0", "self.other", "2.5"]
)
def test_sizes_that_cpp_does_not_have_are_refused(header_of, result):
    text = FILE.replace("self.rows * self.channels - (self.heads if self.gated else 0)", result)
    with pytest.raises(TypeError, match=r"Drop\.width"):
        header_of(text)


@pytest.mark.parametrize("kind", ["str", "tuple[str, ...]", "complex"])
def test_types_without_a_cpp_type_are_refused(header_of, kind):
    with pytest.raises(TypeError, match="has no C\\+\\+ type"):
        header_of(FILE.replace("channels: int", f"channels: {kind}"))


def test_structs_of_requests_have_defaults_and_lists_of_tokens(header_of):
    """A call that C++ makes has the request's defaults; a list of integers has 32 bits each, as token ids do."""
    text = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    biases: tuple[tuple[int, float], ...] = ()
    share: float = 1.0
    limit: int = 3
    greedy: bool = True
    most: int | None = None
"""
    declared = [line.strip() for line in header_of(text).splitlines() if line.endswith("};") and "{" in line]
    assert declared == [
        "std::vector<int32_t> tokens{};",
        "std::vector<std::tuple<int64_t, float>> biases{};",
        "float share{1.0f};",
        "int64_t limit{3};",
        "bool greedy{true};",
        "std::optional<int64_t> most{};",
    ]


def test_header_is_generated_without_packages():
    """As in an installation with only setuptools."""
    command = [sys.executable, "-I", "-S", str(build.HERE / "ops_header.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == build.generated()["plan_ops.h"] + "\n"
    for name in ("Product", "Attend", "OutputNorm", "Head", "DecoderOps"):
        assert f"struct {name} {{" in printed
