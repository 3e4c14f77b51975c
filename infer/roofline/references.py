"""Public figures of other projects, and the results of the same arithmetic here."""

from laneformer.infer.roofline.agent import AgentTask
from laneformer.infer.roofline.devices import make_node
from laneformer.infer.roofline.model import token_of_bytes
from laneformer.infer.roofline.table import MEASURED, PROJECTED, Column, Table

# Bytes per token in the public figures: 2 B weights of 16 bits. By its dimensions, the 2B reads 4.44 GB.
NOMINAL = 4e9
MI300X_READ = 4.2e12  # bytes/s of one MI300X that the public ceiling assumes, 79.2 % of 5.3 TB/s


def references() -> Table:
    """A table of the public figures, with the figures computed here."""
    h200, mi300x = (
        token_of_bytes(NOMINAL, make_node("h200", 8), None),
        token_of_bytes(NOMINAL, make_node("mi300x", 8), None),
    )
    mi300x_public = token_of_bytes(NOMINAL, make_node("mi300x", 8, bandwidth=MI300X_READ), None)
    launches = next(
        t
        for t in token_of_bytes(NOMINAL, make_node("mi300x", 8, launches=250), None).terms
        if t.name == "kernel launches"
    )
    half_byte = token_of_bytes(32e9 / 2, make_node("h200", 8), None)
    of_h200, of_mi300x = share_of_spec(2100, h200) or 0.0, share_of_spec(3000, mi300x) or 0.0
    task = AgentTask()
    found = [
        ("ceiling of 4 GB on 8 H200, tok/s", 7700, h200.ceiling, "80% of 4.8 TB/s"),
        ("ceiling of 4 GB on 8 MI300X, tok/s", 8400, mi300x.ceiling, "80% of 5.3 TB/s; the public figure is of 79.2%"),
        ("the same", 8400, mi300x_public.ceiling, "4.2 TB/s"),
        ("250 launches of 4.5 us alone, tok/s", 890, 1 / launches.seconds, "no reading counted"),
        ("2,100 tok/s on 8 H200, % of effective bandwidth", 27.3, 100 * share(2100, h200), "of 80%"),
        ("the same, % of specified bandwidth", 21.9, 100 * of_h200, "of 4.8 TB/s"),
        ("3,000 tok/s on 8 MI300X, % of effective bandwidth", 36, 100 * share(3000, mi300x_public), "of 4.2 TB/s"),
        ("the same, % of specified bandwidth", 28.3, 100 * of_mi300x, "of 5.3 TB/s"),
        ("ceiling of 32 B FP4 weights on 8 H200, tok/s", 2000, half_byte.ceiling, "16 GB, 'near 2,000'"),
        ("50,000 tokens at 100 tok/s, s", 480, task.split(100)[0], "'8 minutes'"),
        ("50,000 tokens at 3,000 tok/s, s", 20, task.split(3000)[0], "'under 20 s'"),
    ]
    rows = [
        (
            what,
            public,
            MEASURED if what.startswith(("2,100", "3,000", "the same, %")) else PROJECTED,
            ours,
            100 * (ours / public - 1),
            how,
        )
        for what, public, ours, how in found
    ]
    return Table(
        "references",
        "Public figures, and the same arithmetic here",
        (
            Column("figure"),
            Column("public", ",.6g"),
            Column("its status"),
            Column("here", ",.1f", PROJECTED),
            Column("difference %", "+.1f", PROJECTED),
            Column("how"),
        ),
        rows,
        "4 GB per token as the public figures do, weights alone; the public figures are Kog's, who measured 2,100 and"
        " 3,000 tok/s",
    )


def share(rate: float, token) -> float:
    """Bytes per token x tokens per second, as a share of the bandwidth that reads reach (MBU)."""
    return rate / token.ceiling


def share_of_spec(rate: float, token) -> float | None:
    """Bytes per token x tokens per second, as a share of the specified bandwidth; None if that is unknown."""
    return rate * token.bytes / (token.node.devices * token.node.spec) if token.node.spec else None
