"""Checkpoints of small random models whose tokens are single bytes."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import laneformer

CONTEXT = 20000  # tokens; an answer of that length takes seconds
CHATML = ("<|im_start|>", "<|im_end|>")  # what makes the default chat template work


def byte_tokenizer(*special_tokens: str) -> tokenizers.Tokenizer:
    """A token for every byte, 0 to 255 by the order of their characters; then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def save_checkpoint(folder: Path, *special_tokens: str, layers: int = 2, lanes: int = 8, **changes) -> Path:
    """Random weights and a tokenizer of single bytes. Returns the folder."""
    heads = {"num_attention_heads": lanes, "num_key_value_heads": lanes, "num_lanes": lanes}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, **heads}
    tokenizer = byte_tokenizer(*special_tokens)
    options = {"max_position_embeddings": CONTEXT, **changes}
    config = laneformer.ModelConfig(vocab_size=tokenizer.get_vocab_size(), **sizes, **options)
    laneformer.save_hf(laneformer.Laneformer.init(config, 1), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
