"""Samples equal those of a new engine with the current weights, but their programs are compiled only once."""

import jax
import numpy as np
import pytest
import tokenizers

import laneformer
from laneformer.errors import InputError
from laneformer.infer.engine.engine import Engine
from laneformer.infer.sampling import Sampling
from laneformer.mesh import sharding
from laneformer.precision import Precision
from laneformer.train.samples import SAMPLING, LiveEngine, Samples, texts
from laneformer.weights import parameter_table
from tests.support.checkpoints import byte_tokenizer

CONFIG = laneformer.ModelConfig(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=48,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=1,
    bos_token_id=256,
    eos_token_id=(0,),
)
PROMPTS = ["", "one two", "a somewhat longer prompt"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """tokenizer.json with one token per byte."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer("<s>").save(str(file))
    return file


@pytest.fixture(scope="module")
def mesh():
    return laneformer.make_mesh(8, data=2, lane=4)


def weights(seed):
    """Random weights, large enough for different samples from different seeds."""
    random = np.random.default_rng(seed)
    table = parameter_table(CONFIG)
    return {
        path: np.float32(1 if p.initial == "ones" else random.normal(0, 0.2, p.shape)) + np.zeros(p.shape, np.float32)
        for path, p in table.items()
    }


def spread(weights, mesh):
    """The weights on the mesh, sharded as in a training state."""
    table = parameter_table(CONFIG)
    return {path: jax.device_put(w, sharding(table[path].spec, w.shape, mesh)) for path, w in weights.items()}


def by_argmax(weights, prompt, count=12):
    """The `count` most likely tokens after a prompt, by the model on one device without a cache."""
    model, ids = laneformer.Laneformer(CONFIG, jax.device_put(weights)), list(prompt)
    for _ in range(count):
        row = np.zeros((1, 16), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(model(row)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def by_fresh_engine(weights, prompts, sampling, precision=None):
    """Ids drawn for each prompt by a new engine with these weights, on one device."""
    engine = Engine(laneformer.Laneformer(CONFIG, jax.device_put(weights), precision), "xla")
    return [list(engine.generate(prompt, max_new_tokens=12, sampling=sampling)) for prompt in prompts]


@pytest.mark.slow
def test_samples_follow_the_weights_and_compile_once(mesh, tokenizer):
    """Records have the prompt, the ids and their text."""
    samples = Samples(LiveEngine(CONFIG, mesh, Precision(), tokenizer), PROMPTS, max_new_tokens=12)
    assert [ids.tolist()[0] for ids in samples.prompts.values()] == [256] * 3
    drawn, programs = [], set()
    for seed in (1, 2, 1):
        params = spread(weights(seed), mesh)
        records = samples.draw(params)
        drawn.append([record["tokens"] for record in records])
        for w in params.values():  # the next training step would donate them
            w.delete()
        backend = samples.live._engine._backend
        programs.add((backend, backend._begin._cache_size(), backend._decode._cache_size()))
    assert programs == {(backend, 2, 1)}, "programs for prompts of up to 16 and 32 tokens, and one decode loop"
    assert drawn[0] == drawn[2] != drawn[1]
    assert drawn[1] == by_fresh_engine(weights(2), samples.prompts.values(), SAMPLING)
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    for i, (record, prompt) in enumerate(zip(records, PROMPTS, strict=True)):
        assert (record["sample"], record["prompt"], record["finish_reason"]) == (i, prompt, "length")
        assert record["text"] == made.decode(record["tokens"]) and len(record["tokens"]) == 12
    assert texts(records) == {f"samples/{i}": prompt + records[i]["text"] for i, prompt in enumerate(PROMPTS)}


def test_prompts_without_tokenizer_are_ids(mesh, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b'{"any": "bytes"}')
    greedy = Sampling()
    samples = Samples(LiveEngine(CONFIG, mesh, Precision(), file), ["3,1,4", ""], max_new_tokens=12, sampling=greedy)
    records = samples.draw(spread(weights(1), mesh))
    assert [record["tokens"] for record in records] == [by_argmax(weights(1), ids) for ids in ([3, 1, 4], [256])]
    assert all("text" not in record for record in records)
    assert texts(records)["samples/0"] == "3,1,4 -> " + ",".join(map(str, records[0]["tokens"]))


@pytest.mark.slow
def test_samples_are_drawn_in_the_precision_of_training(mesh, tokenizer):
    precision = Precision(compute="bfloat16")
    live = LiveEngine(CONFIG, mesh, precision, tokenizer)
    samples = Samples(live, [""], max_new_tokens=12)
    records = samples.draw(spread(weights(1), mesh))
    assert [record["tokens"] for record in records] == by_fresh_engine(weights(1), [[256]], SAMPLING, precision)
    assert live._engine.precision == precision and live._engine.conditions["compute_dtype"] == "bfloat16"


@pytest.mark.parametrize("text", [True, False])
def test_empty_prompt_starts_a_document(mesh, tokenizer, tmp_path, text):
    def start(**changes):
        file = tokenizer if text else tmp_path / "none"
        return (
            Samples(LiveEngine(CONFIG.replace(**changes), mesh, Precision(), file), [""], max_new_tokens=1)
            .prompts[""]
            .tolist()
        )

    assert start() == [256]
    assert start(bos_token_id=None, eos_token_id=(7, 8)) == [7]
    with pytest.raises(InputError, match="the empty prompt needs"):
        start(bos_token_id=None, eos_token_id=())


@pytest.mark.parametrize(
    "prompt, text, message",
    [
        ("def f", False, "'def f' .*tokenizer.json"),
        ("1,257", False, "token id 257 is outside the vocabulary of 257"),
        ("x" * 47, True, "48 tokens, but the context is 48"),
    ],
)
def test_bad_prompts_raise_before_training(mesh, tokenizer, tmp_path, prompt, text, message):
    with pytest.raises(InputError, match=message):
        Samples(
            LiveEngine(CONFIG, mesh, Precision(), tokenizer if text else tmp_path / "none"), [prompt], max_new_tokens=4
        )
