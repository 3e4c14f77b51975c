"""Sensitivity to delays by layer: the loss of a trained model with the exchange of one layer moved to another time.

Every probed loss has the same weights, the same held-out tokens and, except for one layer, the same schedule, so that a
difference of 0.001 nats is meaningful. The difference measures how much the trained model depends on that exchange, not
what a model trained with the delay would reach.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass

import jax

import laneformer as lf
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.layout import Landing, Schedule
from laneformer.train.ablate.grid import Cell
from laneformer.train.config import Phase
from laneformer.train.data.batches import validation_sets
from laneformer.train.data.packing import Rows
from laneformer.train.run_folder import open_stores
from laneformer.train.step import Batch, Trainer

PROBE = "probe.json"  # file in a cell's folder
BATCHES = 16  # batches of held-out text, at most


@dataclass(frozen=True, kw_only=True)
class Rescheduled(ModelConfig):
    """A model that runs a given schedule instead of its layout's."""

    table: Schedule

    @property
    def schedule(self) -> Schedule:
        return self.table


def exchanged_late(schedule: Schedule, layer: int, delay: int) -> Schedule:
    """The schedule in which exchanges of `layer` land `delay` modules after they are issued, at the latest before the
    final norm.

    Raises ConfigError for a layout whose exchanges average the streams, because such a landing cannot move.
    """
    if any(payload.stream_mean_at is not None for payload in schedule.payloads):
        raise ConfigError(f"layout {schedule.name} averages its streams and cannot be probed; remove it from `probe`")

    def move(landing: Landing) -> Landing:
        issued = landing.payload.complete_at
        return landing if issued // 2 != layer else Landing(min(issued + delay, schedule.num_modules), landing.payload)

    return dataclasses.replace(schedule, landings=tuple(sorted({move(landing) for landing in schedule.landings})))


def probe(cell: Cell) -> None:
    """Writes probe.json of a trained cell: {"loss", "tokens", "by_layer": {delay: [loss with layer n delayed]}}."""
    file = cell.folder / PROBE
    if file.exists():
        return
    config, phase = cell.config, cell.config.phases[-1]
    stores = open_stores(config)
    sets = validation_sets(phase.data, [stores[path] for path in phase.data.path], [])
    if not sets:
        raise ConfigError(
            f"probing {cell.name} needs held-out text; set data.validation_batches, or remove the variant from `probe`"
        )
    held_out = next(iter(sets.values())).batches
    rows = held_out[:: math.ceil(len(held_out) / BATCHES)]  # spread over the text, which is in file order
    mesh = lf.make_mesh(config.model.num_lanes, data=config.mesh.data, lane=config.mesh.lane)
    params = lf.load(cell.folder, mesh=mesh).weights()

    def loss(schedule: Schedule) -> tuple[float, float]:
        fields = {f.name: getattr(phase.model, f.name) for f in dataclasses.fields(ModelConfig)}
        moved: Phase = dataclasses.replace(phase, model=Rescheduled(**fields, table=schedule))
        trainer = Trainer(config, moved, mesh, tuple(rows[0]))

        def put(batch: Rows) -> Batch:
            return trainer.put_batch(lambda span: {name: x[span] for name, x in batch.items()}, batch)

        sums = [jax.device_get(trainer.evaluate(params, put(batch))) for batch in rows]
        return float(sum(s["nll"] for s in sums)), float(sum(s["weight"] for s in sums))

    schedule = phase.model.schedule
    nll, tokens = loss(schedule)
    by_layer = {
        str(delay): [loss(exchanged_late(schedule, n, delay))[0] / tokens for n in range(phase.model.num_hidden_layers)]
        for delay in cell.probe
    }
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps({"loss": nll / tokens, "tokens": tokens, "by_layer": by_layer}) + "\n", encoding="utf-8")
    os.replace(part, file)
