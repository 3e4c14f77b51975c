"""The encoding of values, checked with Python's own comparison, and malformed messages."""

import collections
import decimal
import fractions
import os
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from laneformer.infer.sandbox import wire
from laneformer.infer.sandbox.wire import HEAD, MOST_DEPTH, Reader, WireError, contents, dump, receive, send
from tests.support.hostile.mutations import mutants, slowest


def unusual(writer, value, depth):
    written = wire.write_library(writer, value)
    if written is None:
        raise TypeError(type(value).__name__)
    return written


def through(value, known=()):
    """Sends a value through a pipe. Returns the value that arrives, and the reader."""
    source, sink = os.pipe()
    message = dump(lambda w: [w(value)], known, unusual)
    thread = threading.Thread(target=send, args=(sink, message))
    thread.start()
    try:
        [node], beside = receive(source)
    finally:
        thread.join()
        os.close(source)
        os.close(sink)
    reader = Reader(known, None, beside)
    return reader(node), reader


def same(one, other):
    """Whether two values are equal, of the same types, and in the same order. nan equals nan, -0.0 does not equal
    0.0.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other if isinstance(one, (set, frozenset, int)) else repr(one) == repr(other)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=()), max_size=5),
    st.binary(max_size=5), st.complex_numbers(), st.just(...), st.just(int), st.fractions(),
    st.decimals(allow_nan=False),
)  # fmt: skip
KEYS = st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.booleans()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_survive(value):
    assert same(through(value)[0], value)


@pytest.mark.parametrize(
    "value",
    [
        10**20000,
        [-(10**20000), 1],
        "\ud800\udc00 and \U00010000",
        {"\udfff": ["\ud800"]},
        -0.0,
        [float("inf"), float("-inf"), float("nan")],
        range(10**30, 0, -3),
        bytearray(b"ab"),
        collections.Counter("abca"),
        collections.OrderedDict([(2, 1), (1, [2])]),
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(None, {}),
        collections.deque([1, [2]], maxlen=3),
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        np.float32(0.1),
        np.bool_(True),
        np.str_("ä"),
        np.datetime64("2020-01-01"),
        [("a", "b")] * 5000,
        [(0.0, -0.0), (1.0, 2.0)] * 5000,
        [(n, -n) for n in range(5000)],
        [(1, True)] * 5000,
        [(0.5, float("nan"))] * 5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_special_values_survive(value):
    assert same(through(value)[0], value)


def test_views_and_arrays_survive():
    table = {1: "a", 2: "b"}
    keys, values, items = through((table.keys(), table.values(), table.items()))[0]
    assert keys == table.keys() and [*values] == ["a", "b"] and items == table.items()
    for array in (np.arange(6.0).reshape(2, 3)[:, ::2], np.array("x"), np.zeros((0, 2), np.int8)):
        made = through(array)[0]
        assert made.dtype == array.dtype and made.shape == array.shape and (made == array).all()
        assert made.flags.writeable
    assert through(collections.defaultdict(list))[0]["new"] == []


def test_shared_containers_stay_shared():
    row = [0]
    made = through([row, row, (row,), {"row": row}])[0]
    assert made[0] is made[1] is made[2][0] is made[3]["row"]
    cycle = [1]
    cycle.append(cycle)
    made = through(cycle)[0]
    assert made[1] is made
    argument = [1, 2]
    assert through([argument], known=[argument])[0][0] is argument


@pytest.mark.parametrize(
    "container",
    [[1, [2]], {1: 2, 3: [4]}, {1, 2}, bytearray(b"ab"), collections.deque([1, 2], 3), collections.Counter("aab")],
    ids=lambda value: type(value).__name__,
)
def test_contents_are_restored(container):
    other = type(container)()
    Reader((), None).restore(other, contents(container))
    assert other == container
    Reader((), None).restore(container, contents(type(container)()))
    assert len(container) == 0


def test_too_deep_and_unknown_values_are_refused():
    deep = []
    for _ in range(MOST_DEPTH + 5):
        deep = [deep]
    with pytest.raises(WireError, match="deep"):
        dump(lambda w: [w(deep)], (), unusual)
    with pytest.raises(TypeError, match="object"):
        dump(lambda w: [w({1: object()})], (), unusual)


BAD = (
    b'{"a": 1, "b": 2}', b"{}", b'{"tuple": 1}', b'{"tuple": {"a": 1}}', b'{"dict": [[1], []]}',
    b'{"dict": [[[]], [1]]}',
    b'{"set": [[]]}', b'{"ref": 0}', b'{"ref": -1}', b'{"ref": "a"}', b'{"ref": 1e9}', b'{"bytes": [0, 9]}',
    b'{"bytes": [-1, 1]}', b'{"bytes": [1, -1]}', b'{"bytes": 3}', b'{"str": [0, 9]}', b'{"int": 5}', b'{"int": "x"}',
    b'{"array": ["O", false, [1], [0, 8]]}', b'{"array": ["<f8", false, [9], [0, 8]]}', b'{"rows": [2, [1], [0, 3]]}',
    b'{"array": ["<f8,<f8", false, [1], [0, 8]]}', b'{"rows": [0, [1], [0, 8]]}', b'{"rows": [1, [], [0, 8]]}',
    b'{"builtin": "exec"}', b'{"builtin": "eval"}', b'{"eval": "1"}', b'{"range": [1, 2, 0]}', b'{"deque": ["a", []]}',
    b'{"defaultdict": ["print", [], []]}', b'{"Fraction": [1, 0]}', b'{"Fraction": ["1e999999999"]}',
    b'{"rows": [711111111, [], [0, 0]]}', b'{"Decimal": [1]}', b'{"complex": ["a"]}',
    b'[{"bytes": [0, 7]}, {"bytes": [1, 7]}]', b'[{"array": ["<f8", false, [1], [0, 8]]}, {"bytearray": [0, 1]}]',
)  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_malformed_data_is_refused(text):
    def refuse(name, content):
        raise WireError(name)

    with pytest.raises((WireError, ValueError, TypeError, LookupError, ArithmeticError)):
        Reader((), refuse, b"\xff" * 8)(wire._value_of(text.decode()))


P = 2**61 - 1  # the modulus of hashes of numbers
SAME = [n * P for n in range(1, 3000)]  # integers with one hash
LONG = {"int": "0x" + "fd" * 100_000}
SLOW = (
    {"set": SAME}, {"frozenset": SAME}, {"keys": SAME}, {"dict": [SAME, SAME]}, {"Counter": [SAME, SAME]},
    {"OrderedDict": [SAME, SAME]}, {"defaultdict": [None, SAME, SAME]}, {"items": [{"tuple": [n, n]} for n in SAME]},
    {"set": [{"tuple": [n]} for n in SAME]}, {"set": [{"Fraction": [1, n]} for n in SAME]},
    {"set": [{"Decimal": str(n)} for n in SAME]}, [{"set": SAME[:1000]}, {"set": SAME[:1000]}, {"set": SAME[:1000]}],
    {"Fraction": [LONG, {"int": "0x" + "eb" * 100_000}]}, {"range": [0, LONG, {"int": "0x" + "eb" * 50_000}]},
)  # fmt: skip


@pytest.mark.parametrize("node", SLOW, ids=range(len(SLOW)))
def test_quadratic_work_is_refused(node):
    with pytest.raises(WireError, match="too long to read"):
        Reader((), None)(node)


@pytest.mark.parametrize("container", [set(), {}], ids=["set", "dict"])
def test_quadratic_work_is_refused_in_changes(container):
    with pytest.raises(WireError, match="too long to read"):
        Reader((), None).restore(container, (*SAME, *SAME))


SPREAD = [3 * n for n in range(3000)]


@pytest.mark.parametrize("kind", ["set", "frozenset", "keys", "dict", "Counter", "OrderedDict", "items", "restore"])
def test_slow_tables_are_refused(kind, monkeypatch):
    """Keys with different hashes that collide in a table take minutes to find, so the clock is slow here instead."""
    node = {
        "items": {"items": [{"tuple": [n, n]} for n in SPREAD]},
        **{name: {name: [SPREAD, SPREAD]} for name in ("dict", "Counter", "OrderedDict")},
    }.get(kind, {kind: SPREAD})

    def read():
        reader = Reader((), None)
        return reader.restore({}, (*SPREAD, *SPREAD)) if kind == "restore" else reader(node)

    read()
    clock = iter(range(10**9))
    monkeypatch.setattr(wire, "_thread_time", lambda: 0.03 * next(clock))
    with pytest.raises(WireError, match="too long to insert"):
        read()
    assert next(clock) < 20


def test_values_without_keys_are_refused():
    for keys, values in ([1, 2], [1]), ([1], [1, 2]), ([*range(64)], [*range(65)]), (["a"], [1, 2]):
        with pytest.raises(ValueError, match="zip"):
            Reader((), None)({"dict": [keys, values]})


def test_large_honest_numbers_survive():
    powers = {2**n for n in range(4000)}
    harmonic = sum(fractions.Fraction(1, n) for n in range(1, 2000))
    assert through([powers, harmonic, range(1 << 5000)])[0] == [powers, harmonic, range(1 << 5000)]


@pytest.mark.parametrize(
    "message",
    [
        HEAD.pack(1 << 31, 0), HEAD.pack(0, 1 << 60), HEAD.pack(0, 0), HEAD.pack(2, 0) + b"\xff\xff",
        HEAD.pack(10**5, 0) + b"[" * 10**5, HEAD.pack(5000, 0) + b"9" * 5000,
    ],
    ids=range(6),
)  # fmt: skip
def test_bad_messages_are_refused(tmp_path, message):
    (tmp_path / "m").write_bytes(message)
    handle = os.open(tmp_path / "m", os.O_RDONLY)
    try:
        with pytest.raises(WireError):
            receive(handle)
    finally:
        os.close(handle)


MUTATED = [
    *(1, -2.5, "é", b"ab", (1, (2,)), {3: "x"}, {4, 5}, frozenset({6}), collections.Counter("aab"), 1 << 5000),
    *(fractions.Fraction(1, 3), decimal.Decimal("1.5"), range(3), np.arange(3.0), collections.deque([1], 2), 1j, int),
    *(bytearray(b"c"), [("a", "b")] * 5000, {"k": [[]]}.items(), "\udfff"),
]
PIECES = (
    b"9" * 30,
    b'{"int":"0x' + b"f" * 3000 + b'"}',
    b"[0,1]",
    b'{"ref":0}',
    b"1e308",
    b'{"set":[',
    b"]}",
    b"-1",
    b"null",
)


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_changed_messages_are_read_or_refused_quickly(count):
    _, text, *parts = dump(lambda w: [w(value) for value in MUTATED], (), unusual)
    beside = b"".join(parts)

    def read(changed):
        Reader((), lambda name, content: content, beside)(wire._value_of(changed.decode()))

    # The judge reports any exception as a failure of the program.
    assert slowest(read, mutants(text, count, PIECES), Exception) < 1


def test_truncated_message_reads_as_none(tmp_path):
    whole = b"".join(dump(lambda w: [w(b"abc")], (), unusual))
    for size in range(len(whole)):
        (tmp_path / "m").write_bytes(whole[:size])
        handle = os.open(tmp_path / "m", os.O_RDONLY)
        assert receive(handle) is None
        os.close(handle)
