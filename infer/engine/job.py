"""Steps that all commands with an engine share: show its log, join a job, split devices, open the model."""

import logging
import os
import sys
from typing import Any

import jax

from laneformer.errors import ConfigError, LogFormat
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.options import EngineOptions, JobEngineOptions
from laneformer.infer.engine.sources import RandomSource, is_recipe, recipe_model
from laneformer.mesh import make_mesh, use_host_devices
from laneformer.precision import Precision
from laneformer.processes import join_job


def show_log() -> None:
    """Sends the engine's log messages, such as the backend that auto chose, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormat())
    logging.getLogger("laneformer").handlers = [handler]
    logging.getLogger("laneformer").setLevel(logging.INFO)
    logging.getLogger().handlers = []  # an imported library may have installed a handler, which would repeat each line


def take_devices(options: JobEngineOptions) -> None:
    """Splits the CPU into `options.devices` devices, for machines without a GPU. With `distributed`, joins the other
    processes of the job instead.

    Call this before the first JAX operation. Raises ConfigError.
    """
    options.check()
    if options.distributed:
        jax.config.update("jax_enable_preemption_service", False)  # unused here, and it would catch SIGTERM
        join_job()
        if options.devices < jax.process_count():
            raise ConfigError(
                f"--devices must be at least {jax.process_count()}, one for each process of the job, got"
                f" {options.devices}"
            )
        if not is_first_process():
            logging.disable(logging.INFO)
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the process ends
    elif options.devices > 1:
        use_host_devices(options.devices)


def is_first_process() -> bool:
    """Whether this is the process of the job that takes the requests and prints the output."""
    return jax.process_index() == 0


def open_engine(options: EngineOptions, layout: str | None = None, **more: Any) -> Engine:
    """An engine for a checkpoint, or for the model of a recipe with random weights.

    layout: replaces the layout of a recipe. more: further options of the backend; a command that drafts by default
    passes `EngineOptions.drafts`. Raises ConfigError or CheckpointError.
    """
    precision = None if options.compute is None else Precision(compute=options.compute)
    chosen = {name: value for name in ("threads", "weights") if (value := getattr(options, name)) is not None}
    chosen |= {"speculation": options.draft_max or 0} | more
    if not is_recipe(options.checkpoint):
        return Engine.load(
            options.checkpoint,
            options.backend,
            dtype=options.dtype,
            devices=options.devices,
            num_lanes=options.lanes,
            precision=precision,
            **chosen,
        )
    packed = recipe_model(options.checkpoint, options.lanes)
    config = packed.config if layout is None else packed.config.replace(layout=layout)
    mesh = make_mesh(config.num_lanes, lane=options.devices) if options.devices != 1 else None
    dtype = options.dtype or "bfloat16"
    source = RandomSource(config, dtype, mesh=mesh, precision=precision, formats=packed.formats)
    return Engine(source, options.backend, name=options.checkpoint.rsplit(":", 1)[-1], **chosen)
