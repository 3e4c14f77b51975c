"""The orders of ops that the GPU kernel runs."""

import itertools
from collections.abc import Iterator, Sequence

from laneformer.ops import Op, Value

# Values that the ops of attention, and of feed-forward, pass from one to the next
ATTENTION = (Value.STREAM, Value.PROJECTED, Value.ATTENDED, Value.OUTPUT)
FEED_FORWARD = (Value.STREAM, Value.HIDDEN, Value.OUTPUT)


def chain_problems(ops: Sequence[Op], chain: tuple[Value, ...]) -> Iterator[str]:
    """A complaint if the ops do not pass on exactly the values of `chain`."""
    steps = [(type(op), op.reads, op.writes) for op in ops]
    values = [ops[0].reads, *(op.writes for op in ops)]  # an op in place repeats a value
    passed = [(reads, writes) for _, reads, writes in steps]
    if passed != list(itertools.pairwise(values)) or tuple(value for value, _ in itertools.groupby(values)) != chain:
        yield in_words(steps)


def steps_of(ops: Sequence[Op]) -> list[tuple]:
    """The kind, input and output of each op, without a mixture of streams and the ops on the module's output."""
    beside = ((Value.STREAMS, Value.STREAM), (Value.OUTPUT, Value.OUTPUT))
    return [(type(op), op.reads, op.writes) for op in ops if (op.reads, op.writes) not in beside]


def in_words(steps: list[tuple]) -> str:
    return f"its ops are {' '.join(f'{reads.name} -> {writes.name}' for _, reads, writes in steps)}"
