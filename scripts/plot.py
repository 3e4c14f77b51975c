"""`python -m scripts.plot RUN...`: loss curves of one or several training runs as a PNG or SVG."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from laneformer.errors import InputError
from scripts.command import run_command
from scripts.picture import pyplot, save
from train.metrics import read_lines


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw the training loss (running mean) and the validation loss of each run against the tokens it has seen."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or metrics.jsonl files."""
    out: Path | None = None
    """Picture to write, .png or .svg; by default loss.png in the first run's folder."""
    window: int = 20
    """Steps in the running mean."""


def read_run(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and training loss of every step, tokens and loss of every validation. Raises InputError if there is nothing to draw."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    lines = read_lines(file)
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise InputError(f"{file} has no training steps: give the folder of a run that has started")
    tokens = {line["step"]: line["tokens"] for line in steps}
    checks = [line for line in lines if "validation_loss" in line]
    return (
        np.array([line["tokens"] for line in steps]),
        np.array([line["loss"] for line in steps]),
        np.array([tokens[line["step"]] for line in checks]),
        np.array([line["validation_loss"] for line in checks]),
    )


def draw(options: Options) -> Path:
    """Writes the picture and returns its path."""
    if not options.runs:
        raise InputError("give at least one run folder")
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, run in enumerate(options.runs):
        tokens, losses, check_tokens, check_losses = read_run(run)
        color, name = f"C{i}", run.name if run.is_dir() else run.parent.name
        window = min(options.window, len(losses))
        mean = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(tokens / 1e6, losses, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(tokens[window - 1 :] / 1e6, mean, color=color, linewidth=1.6, label=f"{name}: training, mean of {window} steps")
        if len(check_losses):
            label = f"{name}: validation, last {check_losses[-1]:.3f}"
            axes.plot(check_tokens / 1e6, check_losses, "o", color=color, markeredgecolor="black", markersize=5, label=label)
    axes.set(xlabel="million tokens", ylabel="cross-entropy, nats per token", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    out = options.out or (options.runs[0] if options.runs[0].is_dir() else options.runs[0].parent) / "loss.png"
    plt.close(figure)
    return save(figure, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a user's mistake."""
    return run_command(draw, Options, "python -m scripts.plot", arguments)


if __name__ == "__main__":
    sys.exit(main())
