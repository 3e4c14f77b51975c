"""The tables of one model on one node: bytes by part, time by summand, speeds."""

import math
from collections.abc import Sequence

from infer.roofline.devices import Node, make_node
from infer.roofline.model import PUBLIC_SHARES, Term, Token, Work
from infer.roofline.published import MODELS_READ, MoeModel
from infer.roofline.references import MI300X_READ, share, share_of_spec
from infer.roofline.table import PROJECTED, Column, Table

_SHARES = "shares of the ceiling that Kog measured on 8 H200 and 8 MI300X with another model"


def bytes_table(parts: dict[str, float | None], title: str, assumed: str) -> Table:
    """Part -> bytes; None for what is not known."""
    known = sum(size for size in parts.values() if size is not None)
    rows = [(name, size and size / 1e9, size and 100 * size / known) for name, size in parts.items()]
    columns = (Column("part"), Column("GB/token", ",.4f", PROJECTED), Column("%", ".1f", PROJECTED))
    return Table("bytes", title, columns, [*rows, ("together", known / 1e9, 100.0)], assumed)


def time_table(found: Token, assumed: Sequence[str]) -> Table:
    """Summands of a token's time; `alone`: the speed if nothing else took time."""
    rows = [
        (
            term.name,
            term.detail,
            1e6 * term.seconds,
            100 * term.seconds / found.seconds,
            1 / term.seconds if term.seconds else "-",
        )
        for term in (*found.terms, Term("together", "", found.seconds))
    ]
    columns = (
        Column("summand"),
        Column("how"),
        Column("us/token", ",.2f", PROJECTED),
        Column("%", ".1f", PROJECTED),
        Column("alone tok/s", ",.0f", PROJECTED),
    )
    return Table(
        "time", f"Time of one token on {found.node.name}", columns, rows, "; ".join((*assumed, *found.node.assumptions))
    )


def speed_table(found: Token, known: tuple[float, str] | None, in_memory: float | None) -> Table:
    """Ceiling, the sum of all terms, the public shares of the ceiling, and a known speed with its status, if there is
    one.
    """
    speeds = [
        ("ceiling: reading alone", found.ceiling, PROJECTED),
        ("sum of all summands", found.rate, PROJECTED),
        *((f"{100 * part:.1f}% of the ceiling", part * found.ceiling, PROJECTED) for part in PUBLIC_SHARES),
    ]
    if known is not None:
        rate, status = known
        sync = found.sync_for(rate)
        why = "" if sync is None else f", explained by --sync-us {1e6 * sync:.2f}"
        speeds.append((f"given as {status}{why}", rate, status))
    rows = []
    for name, rate, status in speeds:
        of_spec = share_of_spec(rate, found)
        rows.append((name, rate, 100 * share(rate, found), None if of_spec is None else 100 * of_spec, status))
    columns = (
        Column("speed"),
        Column("tok/s", ",.0f"),
        Column("% of effective", ".1f"),
        Column("% of specified", ".1f"),
        Column("status"),
    )
    return Table(
        "speed",
        f"Speed on {found.node.name}; {_memory(found.node, in_memory)}",
        columns,
        rows,
        f"batch 1; {_SHARES}; effective bandwidth {found.node.bandwidth / 1e12:,.3f} TB/s a device",
    )


def _memory(node: Node, size: float | None) -> str:
    if size is None or node.memory is None:
        return "whether the weights fit in memory is unknown"
    room = node.devices * node.memory
    return (
        f"weights of {size / 1e9:,.2f} GB {'fit in' if size <= room else 'DO NOT FIT in'} {room / 1e9:,.0f} GB of"
        " memory"
    )


def laneformer_assumptions(work: Work) -> tuple[str, ...]:
    """What `roofline.token` assumes besides the node."""
    return (
        f"weights {work.weights}, keys and values {work.kv}",
        "bytes spread evenly over the devices",
        "nothing is read during waits",
        "exchanges of float32, pushed to every other device",
    )


def moe_parts(model: MoeModel, work: Work) -> dict[str, float | None]:
    """Bytes by part, what a token reads of earlier positions among them."""
    parts = {f"{part.name} ({part.precision})": part.bytes for part in model.parts}
    return parts | {f"cache and state at context {work.context:,}": model.kv_bytes(work.context, work.kv)}


def moe_assumptions(model: MoeModel) -> str:
    """Sources of the bytes."""
    read = f"read {MODELS_READ}; " if model.nominal else ""  # else it was read just now
    return f"dimensions from {model.source}; {model.precision_source}; {read}experts cut evenly over the devices"


def public_nodes() -> dict[str, Node]:
    """Those of the public figures, with their bandwidths."""
    return {"h200": make_node("h200", 8), "mi300x": make_node("mi300x", 8, bandwidth=MI300X_READ)}


def nominal_table(models: Sequence[MoeModel], asked: Node) -> Table:
    """Public nominal figures beside bottom-up ones, weights alone, and those of the node that is asked for."""
    rows = []
    nodes = public_nodes()
    if not any(
        asked.name == node.name and math.isclose(asked.bandwidth, node.bandwidth, rel_tol=0.02)
        for node in nodes.values()
    ):
        nodes[""] = asked
    for model in models:
        for name, node in nodes.items():
            ceiling = node.total_bandwidth / model.weight_bytes
            nominal = model.nominal.get(name)
            implied = nominal and PUBLIC_SHARES[1] * node.total_bandwidth / nominal
            rows.append(
                (
                    model.name,
                    node.name if name else f"asked: {node.name}",
                    nominal,
                    implied and implied / 1e9,
                    model.weight_bytes / 1e9,
                    ceiling,
                    *(part * ceiling for part in PUBLIC_SHARES),
                    nominal and 100 * (PUBLIC_SHARES[1] * ceiling / nominal - 1),
                )
            )
    low, high = (f"{100 * part:.1f}% tok/s" for part in PUBLIC_SHARES)
    columns = (
        Column("model"),
        Column("node"),
        Column("nominal tok/s", ",.0f", PROJECTED),
        Column("its GB/token", ",.2f", PROJECTED),
        Column("bottom-up GB", ",.2f", PROJECTED),
        Column("ceiling tok/s", ",.0f", PROJECTED),
        Column(low, ",.0f", PROJECTED),
        Column(high, ",.0f", PROJECTED),
        Column("to nominal %", "+.1f", PROJECTED),
    )
    return Table(
        "nominal",
        "Public nominal figures beside weights counted part by part",
        columns,
        rows,
        f"{_SHARES}; 80% of 4.8 TB/s and 4.2 of 5.3 TB/s as in the public figures; nominal figures are"
        f" {100 * PUBLIC_SHARES[1]:.1f}% of a ceiling on both machines, though Kog's own share on H200 was lower; no"
        " cache, no uneven experts, no waits: more layers than that model's 15 give a lower share",
    )


def differences(models: Sequence[MoeModel]) -> list[str]:
    """Why nominal and bottom-up figures differ, a line each."""
    return [f"{model.name}: nominal from {model.nominal_rule}; {model.difference}." for model in models]
