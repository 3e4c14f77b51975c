"""scripts.plot: pictures of real metrics files, and clear errors without them."""

import json

import numpy as np
import pytest

from laneformer.errors import InputError
from scripts.plot import main, read_run


@pytest.fixture
def run(tmp_path):
    lines = [{"step": n, "loss": 8.0 - n / 10, "tokens": 100 * n} for n in range(1, 31)]
    lines.insert(10, {"step": 10, "validation_loss": 7.5, "validation_bits_per_byte": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_reads_steps_and_validations(run):
    tokens, losses, check_tokens, check_losses = read_run(run)
    np.testing.assert_allclose(losses, 8.0 - np.arange(1, 31) / 10)
    assert tokens[-1] == 3000 and check_tokens.tolist() == [1000] and check_losses.tolist() == [7.5]


def test_draws_png_and_svg(run, tmp_path, capsys):
    assert main([str(run)]) == 0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(run), str(run / "metrics.jsonl"), "--out", str(tmp_path / "two.svg")]) == 0
    assert "<svg" in (tmp_path / "two.svg").read_text()


def test_nothing_to_draw(tmp_path, capsys):
    with pytest.raises(InputError, match="has no training steps"):
        read_run(tmp_path)
    assert main([str(tmp_path)]) == 2 and main([]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())
