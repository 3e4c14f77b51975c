"""The memory of the GPU kernel's edges: boards between the CTAs of a lane, and memory that all lanes share."""

from collections.abc import Iterator

from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.library import ring_slots
from laneformer.ops import Product


def mail_slots(layout: Layout) -> int:
    """Slots in the ring of lane exchanges: a power of two, so that sequence numbers may wrap around."""
    return 1 << (ring_slots(layout.table.exchanges) - 1).bit_length()


def pass_tags(layout: Layout) -> int:
    """Number of tags that a pass uses: a power of two, so that tags may wrap around."""
    return 1 << (2 * layout.num_layers + 2).bit_length()


def boards(layout: Layout) -> Iterator[tuple[str, int]]:
    """Name and size of each board of a lane, in words, for one row of a pass."""
    for name in ("kStreamBoard", "kOtherStreamBoard"):
        yield name, _in_threes(layout.triples[name], layout.hidden) if name in layout.triples else layout.hidden
    yield from _between_ops(layout).items()
    yield "kScoresBoard", _of_ops(layout, "kScoresBoard")
    yield "kPartsBoard", _of_ops(layout, "kPartsBoard")
    yield "kHeadBoard", layout.head.columns
    # Each CTA's sum over its rows, for ops and for each event of the schedule.
    yield "kRowSumsBoard", layout.ctas * (1 + sum(map(len, layout.table.events)))
    yield "kRoutesBoard", _of_ops(layout, "kRoutesBoard")
    yield "kMixtureBoard", _of_ops(layout, "kMixtureBoard")


def _of_ops(layout: Layout, name: str) -> int:
    """Words of a board that ops share."""
    return max(each.boards(layout.lane, tiling).get(name, 0) for each, tiling in layout.kernels)


def shared(layout: Layout) -> Iterator[tuple[str, int]]:
    """Name and size of each part of the memory that all lanes share, in words. Each device has such memory. Its first
    word is the call's failure.
    """
    vocab, packets, turns = layout.plan.ops.vocab_size, layout.lanes * layout.ctas, 2 * layout.rows
    yield "kAbortAt", 16
    yield "kClaimsAt", layout.grid  # of each CTA: the last call in which one of its threads has reported a failure
    yield "kCheckInAt", packets + layout.spares
    yield "kPacketsAt", turns * packets * 6
    yield "kSpareAt", turns * layout.spares
    yield "kLargestZAt", turns * packets
    yield "kZAt", turns * vocab
    yield "kLogitsAt", turns * vocab
    yield "kMailAt", mail_slots(layout) * layout.lanes * layout.rows * layout.hidden


def places(parts: Iterator[tuple[str, int]]) -> tuple[dict[str, int], int]:
    """The first word of each part by name, aligned to 16 words, and the end of the last part."""
    at, found = 0, {}
    for name, words in parts:
        found[name] = at
        at += -(-words // 16) * 16
    return found, at


def lane_words(layout: Layout) -> int:
    """Size of a lane's boards for one row of a pass, in words."""
    return places(boards(layout))[1]


def shared_words(layout: Layout) -> int:
    """Size of the memory that all lanes share, in words."""
    return places(shared(layout))[1]


def _between_ops(layout: Layout) -> dict[str, int]:
    """Size of each board that stages write, in words, by name."""
    words: dict[str, int] = {}
    for kind in layout.kinds:
        for stage in kind.stages:
            if stage.writes:
                own = stage.first + stage.kernel.words(stage)
                if stage.writes in layout.triples and isinstance(stage.op, Product):
                    own = _in_threes(layout.triples[stage.writes], stage.op.channels)
                words[stage.writes] = max(words.get(stage.writes, 0), own)
    return words


def _in_threes(rows: int, channels: int) -> int:
    """Words of a board on which each CTA publishes `rows` channels, three in 16 bytes."""
    return -(-channels // rows) * -(-rows // 3) * 2
