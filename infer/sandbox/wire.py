"""Messages between the judge and a program: values as plain data, rebuilt from their types and never unpickled.

A message consists of two lengths, JSON text and bytes. In the text, numbers, strings, booleans, None and lists
represent themselves. Every other value is an object with one member, whose name is the type: {"tuple": [...]}, {"dict":
[keys, values]}, {"set": [...]}. Mutable containers are numbered in the order of their appearance, and {"ref": number}
refers to one that appeared before, so that shared and cyclic containers remain shared. {"bytes": [start, size]} refers
to the bytes after the text.

The sandbox passes the text of this file to interpreters without this package, so it may import the standard library
only.
"""

import builtins
import collections
import itertools
import json
import operator
import os
import re
import struct
import sys
import time

MOST_TEXT, MOST_BYTES = 256 << 20, 1 << 30  # bytes of a message's JSON, and of the data after it
MOST_DEPTH = 100  # levels of nested containers
# A list of at least this many tuples of equal length, with at most this many different values, is written as codes of
# one byte.
FEWEST_ROWS, MOST_CODES = 4096, 256
LONGEST_INT = 4096  # in bits; longer ones are written in base 16, which takes linear time
# Limit on work that grows with the square of a message. A step, which takes less than 1 us, is the comparison of two
# keys with equal hashes, or 2^STEP_BITS products of bits in a division.
MOST_STEPS, STEP_BITS = 1 << 20, 18
# Limit on the processor time to insert keys, because keys with different hashes may collide in a table, too: seconds,
# and more for each key, which is ten times of what the slowest usual keys take. It is checked after a slice of keys.
MOST_SECONDS, KEY_SECONDS, SLICE = 0.2, 5e-6, 64
HEAD = struct.Struct("<IQ")
SCALARS = frozenset({int, float, str, bool, type(None)})
MAPPINGS = frozenset({dict, collections.Counter, collections.OrderedDict, collections.defaultdict})
MUTABLE = MAPPINGS | {list, set, bytearray, collections.deque}
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
DTYPE = re.compile(r"[<>|=]?[biufcUSmM]\d+(\[\w+\])?", re.ASCII)
# Copies of functions that programs may replace.
_text_of, _value_of = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode, json.JSONDecoder().decode
_write, _read, _thread_time = os.write, os.read, time.thread_time


class WireError(Exception):
    """A message that is malformed, too long or too deep."""


def send(handle, message):
    """Writes a message, a list of byte strings, to a file descriptor."""
    for part in message:
        rest = memoryview(part)
        while rest:
            rest = rest[_write(handle, rest) :]


def receive(handle):
    """The next message from a file descriptor, as (value of the JSON text, bytes after the text); None at its end.
    Raises WireError.
    """
    head = _exactly(handle, HEAD.size)
    if head is None:
        return None
    size, more = HEAD.unpack(head)
    if size > MOST_TEXT or more > MOST_BYTES:
        raise WireError(f"a message of {size + more:,} bytes is too long")
    body, data = _exactly(handle, size), _exactly(handle, more)
    if body is None or data is None:
        return None
    try:
        return _value_of(body.decode()), data
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message is not JSON ({type(error).__name__})") from None


def _exactly(handle, size):
    """Reads `size` bytes; None if the descriptor ends earlier."""
    parts = []
    while size:
        part = _read(handle, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def dump(make, known, unusual):
    """The message with the value `make(writer)`. known, unusual: arguments of the Writer. Raises WireError."""
    for exact in (False, True):
        writer = Writer(known, unusual, exact)
        try:
            text = _text_of(make(writer)).encode()
            break
        except ValueError:  # lone surrogates, and integers too long for decimal text
            if exact:
                raise
    if len(text) > MOST_TEXT or writer.size > MOST_BYTES:
        raise WireError(f"{len(text) + writer.size:,} bytes of data are too many")
    return [HEAD.pack(len(text), writer.size), text, *writer.parts]


class Writer:
    """Converts Python values to JSON values.

    known: containers that already have the numbers from 0. unusual: function that converts values of all other types;
    its arguments are the writer, the value and its depth. exact: whether to write long integers in base 16 and
    non-ASCII strings as bytes, which works for every integer and string.
    """

    def __init__(self, known, unusual, exact=False):
        self.known, self.unusual, self.exact = [*known], unusual, exact
        self.parts, self.size = [], 0
        self.numbers = {id(value): number for number, value in enumerate(known)}

    def __call__(self, value, depth=0):
        kind = type(value)
        if kind in SCALARS:
            return self.scalar(value, kind) if self.exact else value
        if depth > MOST_DEPTH:
            raise WireError(f"data is nested more than {MOST_DEPTH} levels deep")
        if kind in MUTABLE:
            number = self.numbers.get(id(value))
            if number is not None:
                return {"ref": number}
            self.number(value)
        write = WRITERS.get(kind)
        return self.unusual(self, value, depth) if write is None else write(self, value, depth + 1)

    def number(self, value):
        """Gives a container the next number."""
        self.numbers[id(value)] = len(self.known)
        self.known.append(value)

    def items(self, values, depth):
        if not self.exact and SCALARS.issuperset(map(type, values)):
            return [*values]
        return [self(value, depth) for value in values]

    def scalar(self, value, kind):
        if kind is int and value.bit_length() > LONGEST_INT:
            return {"int": hex(value)}
        if kind is str and not value.isascii():
            return {"str": self.data(value.encode("utf-8", "surrogatepass"))}
        return value

    def data(self, part):
        """Appends bytes after the text, and returns their start and size."""
        start, self.size = self.size, self.size + len(part)
        self.parts.append(part)
        return [start, len(part)]

    def list(self, values, depth):
        if len(values) >= FEWEST_ROWS and {*map(type, values)} == {tuple} and len({*map(len, values)}) == 1:
            first, flat = values[: FEWEST_ROWS // 4], itertools.chain.from_iterable
            if 0 < len({*flat(first)} if simple(flat(first)) else ()) <= MOST_CODES and simple(flat(values)):
                found = [*{*flat(values)}]
                # 0.0 and -0.0 compare equal but are different, so floats with a zero are not written as codes.
                if len(found) <= MOST_CODES and (0.0 not in found or type(found[0]) is not float):
                    codes = {value: code for code, value in enumerate(found)}
                    data = self.data(bytes(map(codes.__getitem__, flat(values))))
                    return {"rows": [len(values[0]), self.items(found, depth), data]}
        return self.items(values, depth)

    def mapping(self, value, depth):
        return [self.items(dict.keys(value), depth), self.items(dict.values(value), depth)]


def simple(values):
    """Whether all values are strings, all are integers, or all are floats."""
    kinds = {*map(type, values)}
    return len(kinds) == 1 and kinds <= {str, int, float}


def _default(factory):
    return factory.__name__ if isinstance(factory, type) and TYPES.get(factory.__name__) is factory else None


WRITERS = {
    list: lambda w, value, depth: w.list(value, depth),
    tuple: lambda w, value, depth: {"tuple": w.items(value, depth)},
    set: lambda w, value, depth: {"set": w.items(value, depth)},
    frozenset: lambda w, value, depth: {"frozenset": w.items(value, depth)},
    dict: lambda w, value, depth: {"dict": w.mapping(value, depth)},
    collections.Counter: lambda w, value, depth: {"Counter": w.mapping(value, depth)},
    collections.OrderedDict: lambda w, value, depth: {"OrderedDict": w.mapping(value, depth)},
    collections.defaultdict: lambda w, value, depth: {
        "defaultdict": [_default(value.default_factory), *w.mapping(value, depth)]
    },
    collections.deque: lambda w, value, depth: {"deque": [value.maxlen, w.items(value, depth)]},
    type({}.keys()): lambda w, value, depth: {"keys": w.items(value, depth)},
    type({}.values()): lambda w, value, depth: {"values": w.items(value, depth)},
    type({}.items()): lambda w, value, depth: {"items": w.items(value, depth)},
    bytes: lambda w, value, depth: {"bytes": w.data(value)},
    bytearray: lambda w, value, depth: {"bytearray": w.data(bytes(value))},
    complex: lambda w, value, depth: {"complex": [value.real, value.imag]},
    range: lambda w, value, depth: {"range": [w(value.start), w(value.stop), w(value.step)]},
    type(...): lambda w, value, depth: {"ellipsis": 0},
    type(NotImplemented): lambda w, value, depth: {"notimplemented": 0},
}


def write_library(writer, value):
    """JSON of decimals, fractions, NumPy arrays and numbers, and built-in types; None for any other value."""
    if isinstance(value, type):
        return {"builtin": value.__name__} if TYPES.get(value.__name__) is value else None
    numpy, decimal, fractions = map(sys.modules.get, ("numpy", "decimal", "fractions"))
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)) and DTYPE.fullmatch(value.dtype.str):
        return {
            "array": [value.dtype.str, isinstance(value, numpy.generic), [*value.shape], writer.data(value.tobytes())]
        }
    if decimal and isinstance(value, decimal.Decimal):
        return {"Decimal": str(value)}
    if fractions and isinstance(value, fractions.Fraction):
        return {"Fraction": [writer(value.numerator), writer(value.denominator)]}
    return None


class Reader:
    """Converts JSON values to Python values.

    known: containers that already have the numbers from 0. unusual: function that makes values of all other types; its
    arguments are the name of the type and the content. beside: the bytes after the JSON text. Malformed data raises an
    exception of any kind.
    """

    def __init__(self, known, unusual, beside=b""):
        self.known, self.unusual, self.beside = [*known], unusual, beside
        self.left, self.steps, self.seconds = len(beside), MOST_STEPS, MOST_SECONDS

    def __call__(self, node):
        kind = type(node)
        if kind in SCALARS:
            return node
        if kind is list:
            made = self.fresh([])
            made += self.items(node)
            return made
        [(name, content)] = node.items()
        read = READERS.get(name)
        return self.unusual(name, content) if read is None else read(self, content)

    def fresh(self, made):
        """Gives a new container the next number."""
        self.known.append(made)
        return made

    def items(self, nodes):
        if type(nodes) is not list:
            raise WireError(f"a list is a {type(nodes).__name__}")
        return nodes if SCALARS.issuperset(map(type, nodes)) else [self(node) for node in nodes]

    def spend(self, steps):
        """Counts steps; see MOST_STEPS."""
        self.steps -= steps
        if self.steps < 0:
            raise WireError("numbers or keys take too long to read")

    def divide(self, one, other):
        """Counts the steps of a division, or of the greatest common divisor, of two integers."""
        self.spend(one.bit_length() * other.bit_length() >> STEP_BITS)

    def keys(self, values):
        """The keys of a set or mapping. Each is compared with those before it that have the same hash; hashes of
        numbers are no secret, so a message may have many of them.
        """
        if not {str} >= {*map(type, values)}:
            hashes = sorted(map(hash, values))  # a table of hashes would be as slow as that of the keys
            if any(map(operator.eq, hashes, itertools.islice(hashes, 1, None))):
                counts = (len([*same]) for _, same in itertools.groupby(hashes))
                self.spend(sum(count * (count - 1) // 2 for count in counts))
        return values

    def fill(self, made, add, keys, values=None):
        """Adds keys to a set, or keys and values to a mapping, with its function `add`; see MOST_SECONDS."""
        entries = self.keys(keys) if values is None else zip(self.keys(keys), values, strict=True)
        if {str} >= {*map(type, keys)}:
            add(made, entries)
            return made
        entries, self.seconds = iter(entries), self.seconds + KEY_SECONDS * len(keys)
        began, left = _thread_time(), len(keys)
        while left > 0:
            add(made, itertools.islice(entries, SLICE))
            left -= SLICE
            if _thread_time() - began > self.seconds:
                raise WireError("keys take too long to insert")
        if values is not None:
            add(made, entries)  # nothing, unless the lengths differ, which this raises
        self.seconds -= _thread_time() - began
        return made

    def update(self, made, content):
        keys, values = content
        return self.fill(made, _add_of(made), self.items(keys), self.items(values))

    def restore(self, value, content):
        """Replaces the content of a container by `content`, in the form of `contents`."""
        if type(value) in MAPPINGS:
            half = len(content) // 2
            value.clear()
            self.fill(value, _add_of(value), content[:half], content[half:])
        elif type(value) in (list, bytearray):
            value[:] = content
        else:
            value.clear()
            if type(value) is set:
                self.fill(value, set.update, content)
            else:
                value.extend(content)

    def data(self, content):
        start, size = content
        if type(start) is not int or type(size) is not int or not 0 <= start <= start + size <= len(self.beside):
            raise WireError(f"bytes {start!r} to {size!r} do not exist")
        self.left -= size
        if self.left < 0:  # a short message that repeats one range would take all memory
            raise WireError("bytes are used more than once")
        return self.beside[start : start + size]

    def rows(self, content):
        width, values, data = content
        made, codes, values = self.fresh([]), self.data(data), self.items(values)
        if type(width) is not int or not 1 <= width <= len(codes) or len(codes) % width:
            raise WireError(f"{len(codes)} codes are no rows of {width!r}")
        made += zip(*[map(values.__getitem__, codes)] * width, strict=True)
        return made

    def array(self, content):
        import numpy

        dtype, is_number, shape, data = content
        if not DTYPE.fullmatch(dtype):
            raise WireError(f"a type of numbers is {dtype[:20]!r}")
        made = numpy.frombuffer(bytearray(self.data(data)), dtype).reshape(shape)
        return made[()] if is_number else made


def _add_of(mapping):
    """The function that replaces values of a mapping; Counter.update adds to them."""
    return collections.OrderedDict.update if type(mapping) is collections.OrderedDict else dict.update


def _read_set(reader, nodes):
    return reader.fill(reader.fresh(set()), set.update, reader.items(nodes))


def _read_deque(reader, content):
    most, nodes = content
    made = reader.fresh(collections.deque(maxlen=most))
    made.extend(reader.items(nodes))
    return made


def _read_default(reader, content):
    factory, *mapping = content
    return reader.update(reader.fresh(collections.defaultdict(factory and TYPES[factory])), mapping)


def _read_decimal(reader, text):
    import decimal

    return decimal.Decimal(text)


def _read_fraction(reader, content):
    import fractions

    parts = [*map(reader, content)]
    if {*map(type, parts)} != {int}:  # text such as 1e999999999 would take all memory
        raise WireError("a fraction is not two integers")
    reader.divide(*parts)
    return fractions.Fraction(*parts)


def _read_range(reader, content):
    start, stop, step = map(reader, content)
    reader.divide(stop - start, step)  # for its length
    return range(start, stop, step)


def _read_items(reader, nodes):
    pairs = reader.items(nodes)
    return reader.fill({}, dict.update, [key for key, _ in pairs], [value for _, value in pairs]).items()


def _read_reference(reader, number):
    if type(number) is not int or number < 0:
        raise WireError(f"a reference is {number!r}")
    return reader.known[number]


READERS = {
    "ref": _read_reference,
    "int": lambda r, text: int(text, 16),
    "str": lambda r, content: r.data(content).decode("utf-8", "surrogatepass"),
    "rows": lambda r, content: r.rows(content),
    "tuple": lambda r, nodes: tuple(r.items(nodes)),
    "set": _read_set,
    "frozenset": lambda r, nodes: frozenset(r.fill(set(), set.update, r.items(nodes))),
    "dict": lambda r, content: r.update(r.fresh({}), content),
    "Counter": lambda r, content: r.update(r.fresh(collections.Counter()), content),
    "OrderedDict": lambda r, content: r.update(r.fresh(collections.OrderedDict()), content),
    "defaultdict": _read_default,
    "deque": _read_deque,
    "keys": lambda r, nodes: r.update({}, [nodes, [None] * len(nodes)]).keys(),
    "values": lambda r, nodes: dict(enumerate(r.items(nodes))).values(),
    "items": _read_items,
    "bytes": lambda r, content: r.data(content),
    "bytearray": lambda r, content: r.fresh(bytearray(r.data(content))),
    "complex": lambda r, parts: complex(*parts),
    "range": _read_range,
    "ellipsis": lambda r, _: ...,
    "notimplemented": lambda r, _: NotImplemented,
    "array": lambda r, content: r.array(content),
    "Decimal": _read_decimal,
    "Fraction": _read_fraction,
    "builtin": lambda r, name: TYPES[name],
}


def contents(value):
    """The content of a mutable container as a flat tuple; for a mapping the keys, then the values."""
    return (*value, *value.values()) if type(value) in MAPPINGS else (*value,)
