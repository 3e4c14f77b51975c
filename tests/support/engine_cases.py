"""A small model of eight lanes with random weights, and the samplings and clients of the engine's tests."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax

import laneformer
from laneformer.infer import Sampling
from laneformer.mesh import sharding
from laneformer.weights import parameter_table
from tests.support import small
from tests.support.paths import ORACLE

CASES = sorted(path.name for path in ORACLE.glob("case_*"))
CONFIG = laneformer.ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_lanes=8,
    max_position_embeddings=1100,
    sliding_window=40,
    sliding_window_n_layers=1,
    eos_token_id=(),
)
RANDOM = Sampling(temperature=1.0, top_k=60, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=1234567890123)
ADJUSTED = Sampling(temperature=1.0, seed=7, presence_penalty=0.6, frequency_penalty=-0.4, logit_bias={5: 2.0, 8: -9.0})
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@functools.cache
def model(mesh=None, precision=None, dtype="float32", **changes):
    """A model with random weights, large enough for logits that differ. changes: fields of its config."""
    config = CONFIG.replace(**changes)
    weights = {path: jax.device_put(w) for path, w in small.make_weights(config, dtype, seed=5).items()}
    if mesh is not None:
        table = parameter_table(config)
        weights = {path: jax.device_put(w, sharding(table[path].spec, w.shape, mesh)) for path, w in weights.items()}
    return laneformer.Laneformer(config, weights, precision, mesh)


@contextlib.contextmanager
def large_arrays() -> Iterator[None]:
    """Prompts and results of native backends have arrays of at least 512 tokens, so that one program serves prompts and
    answers of many lengths.
    """
    with mock.patch("laneformer.infer.engine.native.SMALLEST_ROOM", 512):
        yield


def run_clients(run: Callable[..., None], clients: Sequence[tuple]) -> None:
    """Calls run(*client) for all clients at the same time, each in its own thread. Asserts that none raises."""
    errors = []

    def run_one(client):
        try:
            run(*client)
        except BaseException as error:  # the main thread reports it
            errors.append(error)

    threads = [threading.Thread(target=run_one, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
