"""Variants that the grids compare."""

from laneformer.train.ablate.grid import Variant, variant

LAYOUTS = ("tp", "dtp(1)", "dtp(2)", "dtp(4)", "dtp(8)", "ladder", "parallel", "kraken", "desync(2)", "none")


def layouts(*more: str) -> tuple[Variant, ...]:
    """The published layouts; the Laneformer's (delay 2) with both ways to handle its first layers."""
    return (
        *map(variant, (*LAYOUTS, *more)),
        variant("laneformer", "laneformer(2), early", use_early_comm=True),
        variant("laneformer", "laneformer(2), own only", use_early_comm=False),
    )


def knobs(layout: str) -> tuple[Variant, ...]:
    """One layout with each other option about lanes, one at a time, and the Laneformer with corrected early layers."""
    return (
        variant("laneformer", "laneformer(2), early once", use_early_comm=True, early_lands_twice=False),
        variant(layout, f"{layout}, norm scales per lane", replicated_rmsn_scale=False),
        variant(layout, f"{layout}, lanes summed before the norm", pre_norm_lane_agg=True),
        variant(layout, f"{layout}, head over all lanes", lm_head_type="lane"),
        variant(layout, f"{layout}, head a share per lane", lm_head_type="vocab_parallel"),
    )


def hybrids(layers: int, periods: tuple[int, ...], layouts: tuple[str, ...]) -> tuple[Variant, ...]:
    """Each layout with DeltaNet in all layers but the last of every period; period 0: without DeltaNet."""
    found = []
    for period in periods:
        recurrent = tuple(n for n in range(layers) if period and n % period < period - 1)
        name = f", {len(recurrent)} of {layers} DeltaNet" if recurrent else ""
        found += [variant(layout, layout + name, delta_layers=recurrent) for layout in layouts]
    return tuple(found)
