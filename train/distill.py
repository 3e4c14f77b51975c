"""Distillation: a model cut into lanes learns the distribution of the dense model it was cut from, while its delay
grows.

The teacher runs as a separate program before each step, and its logits are part of the batch, so that a step remains
one program of state and batch. All logits of a batch, of both models, are in memory at once: for long sequences and
large vocabularies use small batches.
"""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.checkpoint import fingerprint, open_plain
from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError, ConfigError
from laneformer.layout import parse_layout
from laneformer.mesh import DATA, LANE
from laneformer.model import Laneformer, Remat
from laneformer.precision import Precision
from laneformer.quantized.record import Quantized
from laneformer.train.config import Phase, TrainConfig

TEACHER = "teacher_logits"  # in a batch: float32 [b, s, v]
RECORD = "distill.json"  # file of a run folder with the fingerprint of its teacher


def distilled_sums(
    model: Laneformer, batch: dict[str, jax.Array], *, weight: float, temperature: float, z_loss: float, remat: Remat
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The objective and its parts, summed over tokens as in `Laneformer.loss`, with the teacher's part:

    sum of token weight * (nll + z_loss lse^2 + weight T^2 KL(teacher || student)), both softened by the temperature T
    (Hinton et al., arXiv 1503.02531). The part `kl` is the sum of token weight * KL in nats.
    """
    ids, segments, teacher = batch["ids"], batch.get("segments"), batch[TEACHER]
    logits = model(ids[:, :-1], segments_bs=None if segments is None else segments[:, :-1], remat=remat)
    weights = batch.get("weights", jnp.ones(logits.shape[:2], jnp.float32))
    lse = jax.nn.logsumexp(logits, -1)
    nll = lse - jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    wanted, found = (jax.nn.log_softmax(x / temperature) for x in (teacher, logits))
    kl = (jnp.exp(wanted) * (wanted - found)).sum(-1)
    parts = {"nll": nll, "lse_squared": jnp.square(lse), "weight": jnp.ones_like(nll), "kl": kl}
    sums = {name: (weights * x).sum() for name, x in parts.items()}
    return sums["nll"] + z_loss * sums["lse_squared"] + weight * temperature**2 * sums["kl"], sums


def annealed(config: TrainConfig, phase: Phase, step: int) -> Phase:
    """The phase with the layout that it has after `step` steps: dtp(0) at first, its own from distill.anneal_steps on.

    The delay grows in equal stages, each compiled separately. So every step runs one ordinary layout, the same one when
    the run is resumed. The alternative, mixing weights as inputs of one program, would keep the reductions of all
    delays in every step.
    """
    distill = config.distill
    if step >= distill.anneal_steps:
        return phase
    delay = final_delay(phase.model) * (step * distill.anneal_stages // distill.anneal_steps) / distill.anneal_stages
    return replace(phase, model=phase.model.replace(layout=f"dtp({delay:.6g})"))


def final_delay(model: ModelConfig) -> float:
    """The delay delta of a layout dtp(delta), in modules."""
    return float(parse_layout(model.layout)[1][0])


class Distillation:
    """The teacher of a run, if it has one.

    Raises CheckpointError or ConfigError if it does not fit the model.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, precision: Precision):
        self.config, self.mesh, self.teacher = config, mesh, None
        if config.distill.teacher is not None:
            opened = open_plain(config.distill.teacher)
            _check_teacher(config.distill.teacher, opened.config, config)
            everywhere = NamedSharding(mesh, P())
            weights = {path: put(weight, everywhere) for path, weight in opened.weights()}
            self.teacher = Laneformer(opened.config, weights, precision)

    def teach(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch with the teacher's logits, if there is a teacher."""
        if self.teacher is None:
            return batch
        segments = batch.get("segments")
        ids, segments = batch["ids"][:, :-1], None if segments is None else segments[:, :-1]
        return batch | {TEACHER: _logits(self.teacher, ids, segments, self.mesh)}

    def record(self, run: Path, new: bool) -> None:
        """Records the teacher of a new run. Raises CheckpointError if a resumed run has another teacher."""
        if self.teacher is None:
            return
        file, now = run / RECORD, {"teacher": fingerprint(self.teacher.weights())}
        if jax.process_index() > 0:
            return  # every process computes the fingerprint, process 0 records it
        if new:
            part = file.with_name(file.name + ".part")
            part.write_text(json.dumps(now) + "\n", encoding="utf-8")
            os.replace(part, file)
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} is damaged or missing ({error}); restore it, or choose another folder with --run"
            ) from None
        if before != now:
            raise CheckpointError(
                f"distill.teacher = {self.config.distill.teacher} does not have the weights that {run} started with;"
                " restore them (one step of a run is RUN/checkpoints/STEP), or choose another folder with --run"
            )


@partial(jax.jit, static_argnums=3)
def _logits(teacher: Laneformer, ids_bs: jax.Array, segments_bs: jax.Array | None, mesh: Mesh) -> jax.Array:
    """Logits of the teacher, which every device holds; the rows are split over all devices if the batch allows it."""
    rows = P((DATA, LANE)) if ids_bs.shape[0] % mesh.size == 0 else P(DATA)

    def local(teacher, ids_bs, segments_bs):
        return teacher(ids_bs, segments_bs=segments_bs)

    logits = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows), out_specs=rows, check_vma=False)(
        teacher, ids_bs, segments_bs
    )
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P(DATA)))


def put(weight: np.ndarray | Quantized, where: NamedSharding) -> jax.Array:
    """The weight on devices, copied, because the reader of a checkpoint reuses its memory. Raises TypeError for a
    quantized one, which `open_plain` excludes.
    """
    if isinstance(weight, Quantized):
        raise TypeError(f"cannot train weights in {weight.name}; open the checkpoint with open_plain")
    return jax.make_array_from_callback(weight.shape, where, lambda index: weight[index].copy())


def _check_teacher(path: Path, found: ModelConfig, config: TrainConfig) -> None:
    if found.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"distill.teacher = {path} has a vocabulary of {found.vocab_size}, but the model has"
            f" {config.model.vocab_size}; choose a teacher with the same tokens"
        )
    longest = max(phase.data.sequence_length for phase in config.phases)
    if longest > found.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length must be at most the context of distill.teacher = {path},"
            f" {found.max_position_embeddings}, got {longest}"
        )
