"""Reads training runs in tests."""

from pathlib import Path

import numpy as np

import laneformer


def weights_of(run: Path) -> dict[str, np.ndarray]:
    return {path: np.asarray(weight) for path, weight in laneformer.load(run).weights().items()}
