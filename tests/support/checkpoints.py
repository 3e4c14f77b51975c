"""Checkpoints of small random models whose tokens are single bytes."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

import laneformer
from laneformer.weights import parameter_table

CONTEXT = 20000  # tokens; an answer of this length takes seconds
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
HARMONY_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- elif loop.last and not add_generation_prompt %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- else %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""  # as gpt-oss's template writes conversations without tools: without the analysis of earlier turns
CHATML = ("<|im_start|>", "<|im_end|>")  # tokens that the default chat template needs


def byte_tokenizer(*special_tokens: str, words: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A tokenizer with a token for every byte, 0 to 255 in the order of the characters that represent them, then the
    special tokens, then the words.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.add_tokens([tokenizers.AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer


def fresh_weights(config: laneformer.ModelConfig) -> dict[str, jax.Array]:
    """Random weights with the deviations of `Laneformer.init`, drawn without a program for each shape."""
    random = np.random.default_rng(1)
    deviation = {"normal": 0.02, "embedding": 0.02, "output": 0.02 / math.sqrt(2 * config.num_hidden_layers)}

    def draw(parameter):
        if parameter.initial in ("ones", "zeros"):
            return np.full(parameter.shape, parameter.initial == "ones", np.float32)
        return (deviation[parameter.initial] * random.standard_normal(parameter.shape)).astype(np.float32)

    return {
        path: jax.device_put(draw(parameter), may_alias=False) for path, parameter in parameter_table(config).items()
    }


def save_checkpoint(
    folder: Path, *special_tokens: str, words: Sequence[str] = (), layers: int = 2, lanes: int = 8, **changes
) -> Path:
    """Saves a model with random weights and a tokenizer of single bytes in a folder, and returns the folder. changes:
    fields of the config.
    """
    heads = {"num_attention_heads": lanes, "num_key_value_heads": lanes, "num_lanes": lanes}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, **heads}
    tokenizer = byte_tokenizer(*special_tokens, words=words)
    options = {"max_position_embeddings": CONTEXT, **changes}
    config = laneformer.ModelConfig(vocab_size=tokenizer.get_vocab_size(), **{**sizes, **options})
    laneformer.save_hf(laneformer.Laneformer(config, fresh_weights(config)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def follow(folder: Path, successors: dict[int, int]) -> Path:
    """Changes the weights of a folder's model, which has one lane, so that the most likely token after each of these
    tokens is its successor. Returns the folder.
    """
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        weight[...] = "norm" in name
    random = np.random.default_rng(1)
    embedded, head = weights["model.tok_embeddings.weight"], weights["lm_head.weight"]
    embedded[...] = random.choice([-1, 1], embedded.shape)
    for token, successor in successors.items():
        head[successor] += embedded[token]
    save_file(weights, file, {"format": "pt"})
    return folder
