"""scripts.gpu_decode on an emulated GPU: formats and variants are measured, and compiled as backends compile them."""

import os

import pytest

from laneformer import ConfigError
from laneformer.commands.lab import gpu_decode, gpu_rank
from laneformer.commands.lab.gpu_decode import Options, main, measure, table, variants
from laneformer.custom_calls.gpu.tiling import Machine
from laneformer.custom_calls.gpu.variants import VARIABLE
from laneformer.infer.engine.gpu import CudaBackend, CudaGraphBackend
from laneformer.infer.engine.sources import RandomSource, recipe_config
from laneformer.precision import Precision
from tests.support import emulated, small

RECIPE = """
from laneformer import ModelConfig
small = lambda: ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, num_lanes=2, layout="tp", max_position_embeddings=128)
"""
MACHINE = Machine(warp_size=32, ctas=4, warps=2, shared_bytes=232_448, bulk_copies=True)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    return f"{tmp_path}/mine.py:small"


@small.needs_library
@emulated.needs_gpu
@pytest.mark.slow
def test_formats_and_variants_are_measured(recipe, monkeypatch):
    asked = []
    opened = gpu_decode.open_session
    monkeypatch.setattr(
        gpu_decode, "open_session", lambda *a, **o: asked.append(os.environ.get(VARIABLE)) or opened(*a, **o)
    )
    options = Options(recipe=recipe, variants=("none", "out-of-line,triples"), context=8, tokens=4, runs=1)
    devices = {"machine": MACHINE, "compile_with": emulated.compile_with(MACHINE), "driver": emulated.driver()}
    records = measure(options, None, **({} if emulated.REAL else devices))
    assert asked == [None, "out-of-line,triples"] and [record["variant"] for record in records] == [*options.variants]
    assert all(record["same_bits"] and record["us_per_token"]["median"] > 0 for record in records)
    assert records[0]["bytes_per_token"] > 2 * 64 * (4 + 3 * 128) and {"memory_bytes", "clocks"} < {*records[0]}
    text = table(records)
    assert text.count("| yes |") == 2 and "1.000" in text and "random bfloat16" in text


def test_variants_are_named_while_a_session_opens(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine")
    with variants("a,b"):
        assert os.environ[VARIABLE] == "a,b"
    with variants("none"):
        assert VARIABLE not in os.environ
    assert os.environ[VARIABLE] == "mine"


def test_compiled_kernels_are_those_of_the_backends(monkeypatch):
    """A kernel that is compiled ahead is found in the cache by its header, so the headers must be equal."""
    headers = []

    def image(header, architecture, compile_with=None, kernel="decode.cu"):
        headers.append((header, architecture, kernel))
        raise gpu_decode.custom_calls.NativeError("compiled")

    monkeypatch.setattr("laneformer.custom_calls.gpu.session.image", image)
    monkeypatch.setattr(gpu_decode, "image", image)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")  # which chooses the precision
    source = RandomSource(recipe_config("laneformer_2b"), "float16", precision=Precision.default("float16"))
    lane = gpu_rank.Options(layouts=("tp",), variants=("triples",))
    for make in (
        lambda: CudaBackend(source, absorb=False),
        lambda: gpu_decode.compile_kernel(gpu_decode.model_options(source.config, "float16", None)),
        lambda: CudaGraphBackend(source, absorb=False),
        lambda: gpu_decode.compile_kernel(gpu_decode.model_options(source.config, "float16", None), "graph"),
        lambda: list(gpu_rank.compiled(lane, "tp")),
        lambda: gpu_rank.measure(gpu_rank.Options(variants=lane.variants, delays=(5,)), "tp"),
    ):
        with pytest.raises(ConfigError, match="compiled"):
            make()
    assert headers[0] == headers[1] and headers[2] == headers[3] and headers[4] == headers[5]
    assert len({header for header, *_ in headers}) == 2 and len(set(headers)) == 3


def test_mistakes_are_one_line(recipe, capsys):
    assert main([recipe]) == 2 and "found no GPU" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--context 64 plus --tokens 100"):
        measure(Options(recipe=recipe, tokens=100), None)
