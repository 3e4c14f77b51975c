"""Metrics in TensorBoard and Weights & Biases, read back from the files that these libraries write."""

import json
import struct
import sys
import threading

import pytest

from laneformer.errors import InputError
from laneformer.train.metrics.records import MetricsLog, last_step
from laneformer.train.metrics.sinks import TensorBoard, WeightsAndBiases


def hide(monkeypatch, package):
    """Makes imports of the package fail, as if it were not installed."""
    for name in [package, *(name for name in sys.modules if name.startswith(package + "."))]:
        monkeypatch.setitem(sys.modules, name, None)


def session(run, sink, resumed_at, steps):
    """Records `steps` like a process that resumes at `resumed_at`, each with a loss, a validation and a sample."""
    with MetricsLog(run / "metrics.jsonl", resumed_at, [sink]) as log:
        for step in steps:
            log.write(step, phase="one", loss=step / 3, grad_norm=float("nan"))
            log.write(step, validation={"code": {"loss": step / 2}})
            sink.text(step, {"samples/0": f"def f():\n    return {step}"})
    sink.close()


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("tensorboard")

    @staticmethod
    def read(folder):
        """Returns {tag: [(step, value)]}, read with the reader of the TensorBoard server."""
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray

        events = EventAccumulator(str(folder), {"tensors": 0}).Reload()
        plugins = {"scalars": float, "text": lambda array: array.item().decode()}
        return {
            tag: [(event.step, read(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
            for plugin, read in plugins.items()
            for tag in events.PluginTagToContent(plugin)
        }

    def test_values_are_read_back(self, tmp_path):
        session(tmp_path, TensorBoard(tmp_path / "tensorboard", 0), 0, range(1, 6))
        events = self.read(tmp_path / "tensorboard")
        assert set(events) == {"train/loss", "train/grad_norm", "validation/code/loss", "samples/0"}
        assert events["train/loss"] == [(step, pytest.approx(step / 3)) for step in range(1, 6)]
        assert events["samples/0"][-1] == (5, "    def f():\n        return 5\n"), (
            "the text is a code block in Markdown"
        )

    def test_resumed_run_has_every_step_once(self, tmp_path):
        session(tmp_path, TensorBoard(tmp_path / "tensorboard", 0), 0, range(1, 8))
        session(tmp_path, TensorBoard(tmp_path / "tensorboard", 4), 4, range(5, 7))
        session(tmp_path, TensorBoard(tmp_path / "tensorboard", 6), 6, range(7, 10))
        for tag, values in self.read(tmp_path / "tensorboard").items():
            assert [step for step, _ in values] == list(range(1, 10)), tag

    def test_steps_after_the_resumed_one_are_hidden(self, tmp_path):
        session(tmp_path, TensorBoard(tmp_path / "tensorboard", 0), 0, range(1, 8))
        TensorBoard(tmp_path / "tensorboard", 4).close()
        assert [step for step, _ in self.read(tmp_path / "tensorboard")["train/loss"]] == [1, 2, 3, 4]

    def test_close_ends_the_thread(self, tmp_path):
        before = threading.active_count()
        sink = TensorBoard(tmp_path / "tensorboard", 0)
        sink.write(1, {"train/loss": 1.0})
        sink.close()
        assert threading.active_count() == before and sink.where == str(tmp_path / "tensorboard")

    def test_missing_package_error_has_the_install_command(self, tmp_path, monkeypatch):
        hide(monkeypatch, "tensorboard")
        with pytest.raises(InputError, match=r"pip install -e '\.\[tensorboard\]'"):
            TensorBoard(tmp_path / "tensorboard", 0)
        assert not (tmp_path / "tensorboard").exists()


class TestWeightsAndBiases:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")

    @staticmethod
    def open(run):
        return WeightsAndBiases(
            run, project="p", name="n", config={"steps": 9}, last_step=last_step(run / "metrics.jsonl")
        )

    @staticmethod
    def read(run):
        """Returns [(id, history rows)] of every part that `wandb sync` would upload, in order.

        A part is a LevelDB log: 7 bytes, then blocks of 32 KiB with chunks of crc32, length, type and data.
        """
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record

        wandb.teardown()  # ends wandb's process, which then writes the last records
        parts = []
        for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
            data, at, whole, rows, name = file.read_bytes(), 7, b"", [], None
            while at < len(data):
                left = 32768 - at % 32768
                if left < 7:
                    at += left
                    continue
                _, length, kind = struct.unpack_from("<IHB", data, at)
                whole += data[at + 7 : at + 7 + length]
                at += 7 + length
                if kind in (1, 4):  # a whole record, or the last of its chunks
                    record, whole = Record.FromString(whole), b""
                    name = record.run.run_id or name
                    if record.HasField("history"):
                        items = {
                            item.key or "/".join(item.nested_key): json.loads(item.value_json)
                            for item in record.history.item
                        }
                        rows.append(items)
            parts.append((name, rows))
        return parts

    def test_values_are_read_back(self, tmp_path):
        session(tmp_path, self.open(tmp_path), 0, range(1, 6))
        [(name, rows)] = self.read(tmp_path)
        assert name == json.loads((tmp_path / "wandb.json").read_text())["id"]
        assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5]
        assert [(row["train/loss"], row["validation/code/loss"]) for row in rows] == [
            (step / 3, step / 2) for step in range(1, 6)
        ]
        [table] = {
            file.read_text() for file in tmp_path.glob("wandb/offline-run-*/files/media/table/samples*_5_*.json")
        }
        assert json.loads(table) == {"columns": ["name", "text"], "data": [["samples/0", "def f():\n    return 5"]]}

    def test_resumed_run_has_every_step_once(self, tmp_path):
        session(tmp_path, self.open(tmp_path), 0, range(1, 8))
        session(tmp_path, self.open(tmp_path), 4, range(5, 7))  # repeats steps 5 and 6, and ends before step 7
        session(tmp_path, self.open(tmp_path), 6, range(7, 10))
        parts = self.read(tmp_path)
        assert len(parts) == 3 and len({name for name, _ in parts}) == 1
        assert [row["_step"] for _, rows in parts for row in rows if "train/loss" in row] == list(range(1, 10))

    def test_missing_package_error_has_the_install_command(self, tmp_path, monkeypatch):
        hide(monkeypatch, "wandb")
        with pytest.raises(InputError, match=r"pip install -e '\.\[wandb\]'"):
            self.open(tmp_path)

    def test_missing_login_error_has_the_remedy(self, tmp_path, monkeypatch):
        import wandb

        wandb.teardown()  # a new wandb process reads the environment again
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        with pytest.raises(InputError, match=r"cannot start \(.*\); .*`wandb login`.*WANDB_MODE=offline"):
            self.open(tmp_path)
