"""Copies of the metrics for TensorBoard and for Weights & Biases, which are optional dependencies."""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from laneformer.errors import InputError


class TensorBoard:
    """Event files in `folder`, for `tensorboard --logdir`. A resumed run hides events after the step it resumes at."""

    def __init__(self, folder: Path, resumed_at: int):
        """Raises InputError if tensorboard is not installed."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise InputError(
                "watch.tensorboard needs TensorBoard; install it with pip install -e '.[tensorboard]'"
            ) from None
        self.where = str(folder)
        self._event, self._summary, self._tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self._shape, self._string = tensor_shape_pb2.TensorShapeProto, types_pb2.DT_STRING
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        # TensorBoard drops events of this step and later ones.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=resumed_at + 1, session_log=start))

    def write(self, step: int, values: dict[str, float]) -> None:
        self._add(step, [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def text(self, step: int, texts: dict[str, str]) -> None:
        """Texts as code blocks, since TensorBoard renders texts as Markdown."""
        plugin = self._summary.SummaryMetadata(plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"))
        shape = self._shape(dim=[self._shape.Dim(size=1)])

        def value(name: str, text: str):
            block = "".join(f"    {line}\n" for line in text.splitlines())
            tensor = self._tensor(dtype=self._string, string_val=[block.encode(errors="replace")], tensor_shape=shape)
            return self._summary.Summary.Value(tag=name, metadata=plugin, tensor=tensor)

        self._add(step, [value(name, text) for name, text in texts.items()])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list) -> None:
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary.Summary(value=values))
        )


class WeightsAndBiases:
    """One Weights & Biases run for all processes of a training run, online or with WANDB_MODE=offline.

    W&B cannot drop steps. A resumed run computes the same values again, so values that W&B already has are not sent.
    Online, W&B reports its last step; offline, every process writes its own part in RUN/wandb for `wandb sync`, with
    steps that do not overlap. A killed process loses up to 15 s of rows in W&B; metrics.jsonl has them.
    """

    def __init__(self, run: Path, *, project: str, name: str, config: dict, last_step: int):
        """run: folder of the run, where wandb.json keeps the W&B id. last_step: last recorded step (records.last_step),
        even if the resumed run drops it. Raises InputError if wandb is not installed or cannot start.
        """
        try:
            import wandb
        except ImportError:
            raise InputError("watch.wandb needs Weights & Biases; install it with pip install -e '.[wandb]'") from None
        file = run / "wandb.json"
        known: dict[str, Any] = (
            json.loads(file.read_text(encoding="utf-8"))
            if file.exists()
            else {"id": secrets.token_hex(4), "last_step": 0}
        )
        known["last_step"] = max(known["last_step"], last_step)
        part = run / "wandb.json.part"
        part.write_text(json.dumps(known) + "\n", encoding="utf-8")
        os.replace(part, file)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=known["id"],
                resume="allow",
                dir=run,
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"Weights & Biases cannot start ({error}); log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None
        self._table = wandb.Table
        self._sent = known["last_step"] if self._run.offline else self._run.starting_step - 1
        self.where = (None if self._run.offline else self._run.url) or self._run.dir

    def write(self, step: int, values: dict[str, float]) -> None:
        if step > self._sent:
            self._run.log(values, step=step)

    def text(self, step: int, texts: dict[str, str]) -> None:
        if step > self._sent:
            self._run.log({"samples": self._table(["name", "text"], [list(item) for item in texts.items()])}, step=step)

    def close(self) -> None:
        self._run.finish()
