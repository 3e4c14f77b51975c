"""Objects of a config.json with some of their fields left out or null."""

from hypothesis import strategies as st

DROPPED = "dropped"


def with_missing(draw, fields: dict) -> dict:
    """Some of the fields left out, some null, the others as they are."""
    chosen = {name: draw(st.sampled_from([value, None, DROPPED])) for name, value in fields.items()}
    return {name: value for name, value in chosen.items() if value is not DROPPED}
