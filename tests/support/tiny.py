"""Tiny models for tests: a config.json as a dict, the reference's random weights, and models made of both."""

import json
from functools import cache

import jax
import numpy as np

from laneformer import Laneformer, make_mesh
from laneformer.hf import config_from_hf
from laneformer.mesh import sharding
from laneformer.weights import parameter_table
from tests.support import reference
from tests.support.paths import TESTS

ORACLE = sorted((TESTS / "oracle").glob("case_*"))

BASE = {
    "model_type": "laneformer_tp",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_lanes": 4,
    "max_position_embeddings": 32,
    "broadcast_delay": 1,
}


def values(**changes) -> dict:
    """A config.json: BASE with some fields changed."""
    return BASE | changes


def config(**changes):
    """A checked ModelConfig: BASE with some fields changed."""
    return config_from_hf(values(**changes))


def token_ids(vocab: int, shape=(2, 12), seed: int = 0) -> np.ndarray:
    """Random token ids, int32, which include the last id of the vocabulary."""
    ids = np.random.default_rng(seed).integers(0, vocab, shape)
    ids.flat[1] = vocab - 1
    return ids.astype(np.int32)


@cache
def weights_of(text: str, seed: int) -> dict[str, np.ndarray]:
    """The reference's random weights for a config.json. The config is a text so that it can be a key of the cache."""
    return reference.random_weights(json.loads(text), seed)


def random_weights(values: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """The reference's random weights by their names in files. Do not change them in place, since calls share them."""
    return weights_of(json.dumps(values, sort_keys=True), seed)


def model_of(values: dict, arrays: dict[str, np.ndarray], mesh=None, precision=None) -> Laneformer:
    """The model of a config.json and of weights by their names in files. Reads no file."""
    config = config_from_hf(values)
    weights = {}
    for path, parameter in parameter_table(config).items():
        w = arrays[parameter.file_name]
        if config.lm_head_type == "lane" and path == "lm_head":  # files concatenate the lanes' columns
            w = np.stack(np.split(w, config.num_lanes, axis=1))
        assert w.shape == parameter.shape, path
        device = None if mesh is None else sharding(parameter.spec, parameter.shape, mesh)
        weights[path] = jax.device_put(w, device)
    return Laneformer(config, weights, precision, mesh)


def random_model(values: dict, *, lane_devices: int | None = None, seed: int = 0, precision=None) -> Laneformer:
    """A model with the reference's random weights, on one device without a mesh or on a mesh of `lane_devices`."""
    mesh = None if lane_devices is None else make_mesh(values["num_lanes"], lane=lane_devices)
    return model_of(values, random_weights(values, seed), mesh, precision)


def lowered(model: Laneformer, ids: np.ndarray | None = None) -> str:
    """StableHLO of an uncached forward pass, before XLA merges anything. ids: by default 8 tokens; if the model has
    already run with these ids, JAX does not trace it again.
    """
    ids = np.ones((1, 8), np.int32) if ids is None else ids
    return Laneformer._forward.lower(model, ids, None, None, last_only=False, remat="none").as_text()


def all_reduces(text: str) -> int:
    """Number of all-reduces in a StableHLO text."""
    return text.count("stablehlo.all_reduce")


def difference(a, b) -> float:
    """The largest absolute difference of two equally shaped arrays."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max())


def in_pieces(model: Laneformer, ids: np.ndarray, lengths, capacity: int | None = None) -> np.ndarray:
    """Logits of ids [b, s], computed with a cache in pieces of these lengths. capacity: by default s."""
    cache, pieces, start = model.make_cache(len(ids), capacity or ids.shape[1]), [], 0
    for length in lengths:
        logits, cache = model.extend(ids[:, start : start + length], cache)
        start += length
        assert int(cache.length) == start
        pieces.append(np.asarray(logits))
    assert start == ids.shape[1]
    return np.concatenate(pieces, axis=1)


def continue_greedily(model: Laneformer, prompt, count: int) -> list[int]:
    """The `count` tokens of a greedy continuation, computed by a prefill and single steps with a cache."""
    cache = model.make_cache(1, len(prompt) + count)
    logits, cache = model.extend(np.asarray(prompt, np.int32)[None], cache, last_only=True)
    tokens = []
    while True:
        assert logits.shape == (1, 1, model.config.vocab_size)
        tokens.append(int(np.argmax(logits[0, -1])))
        if len(tokens) == count:
            return tokens
        logits, cache = model.extend(np.array([[tokens[-1]]], np.int32), cache, last_only=True)
