"""A jax.profiler trace of a few steps in the middle of a run."""

from pathlib import Path
from typing import Any, Self

import jax


class Profile:
    """Traces steps `first` to `first + steps - 1` (counted from 1) into `folder`, for TensorBoard's profile plugin or
    Perfetto.

        with Profile(run / "profile", 100, 5) as profile:
            for step in ...:
                profile.on_step(step, state)
                state = train_step(state, batch)

    A run that starts inside the window traces the rest of it; a run that ends inside it keeps the steps traced so far.
    """

    def __init__(self, folder: Path, first: int, steps: int):
        self.folder, self.window = folder, range(first, first + steps)
        self._tracing = False

    def on_step(self, step: int, state: Any) -> None:
        """Call before each step. state: result of the previous steps. Both ends of the trace wait for it, so that the
        trace contains whole steps.
        """
        if (step in self.window) == self._tracing:
            return
        jax.block_until_ready(state)
        if self._tracing:
            self._stop()
        else:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # events of every Python call would hide the steps
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._tracing = True

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self._tracing:
            self._stop()
