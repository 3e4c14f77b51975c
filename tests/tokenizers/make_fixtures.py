"""Writes the folders next to this file: small tokenizers as published models have them, and the ids of `texts.json`.

Not part of the test run. It needs transformers and tiktoken (the versions used are in README.md):

    python tests/tokenizers/make_fixtures.py
"""

import base64
import json
import random
from pathlib import Path

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
CODE = Path(__file__).read_text(encoding="utf-8")
LETTERS = "naïve café 你好世界 日本語カタカナ 🙂 ½ ²٣ ʰǅ I'LL don't it’s"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenization_kimi.py of Kimi-K2-Instruct
KIMI = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


def template(*names, end=()):
    """A post-processor that puts special tokens around a text."""

    def made(tokenizer):
        ids = [(name, tokenizer.token_to_id(name)) for name in (*names, *end)]
        return processors.TemplateProcessing(single=" ".join([*names, "$A", *end]), special_tokens=ids)

    return made


def behind_byte_level(made):
    return lambda tokenizer: processors.Sequence([processors.ByteLevel(trim_offsets=False), made(tokenizer)])


def byte_level(special, pre_tokenizer, post_processor=lambda tokenizer: processors.ByteLevel(trim_offsets=False)):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CODE, LETTERS], trainer)
    tokenizer.post_processor = post_processor(tokenizer)
    return tokenizer


def sentencepiece(special, normalizer, pre_tokenizer, post_processor):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CODE.splitlines(), trainer)
    values = json.loads(tokenizer.to_str())
    vocabulary = values["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = post_processor(tokenizer)
    return tokenizer


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


END = "<|endoftext|>"
CHATML = [END, "<|im_start|>", "<|im_end|>"]
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
LLAMA3 = ["<|begin_of_text|>", "<|eot_id|>"]
FAMILIES = {  # name -> (tokenizer, tokenizer_config.json, bos_token_id in the model's config.json)
    "qwen3": (byte_level(CHATML, split(QWEN)), {"bos_token": None, "add_bos_token": False}, 0),
    "smollm2": (byte_level(CHATML, DIGITS), {"bos_token": "<|im_start|>"}, 1),
    "llama3": (
        byte_level(LLAMA3, split(QWEN), behind_byte_level(template("<|begin_of_text|>"))),
        {"bos_token": "<|begin_of_text|>"},
        None,
    ),
    "glm4": (
        byte_level([END, "[gMASK]", "<sop>"], split(QWEN), behind_byte_level(template("[gMASK]", "<sop>"))),
        {},
        None,
    ),
    "llama2": (
        sentencepiece(["<unk>", "<s>", "</s>"], PREPEND, None, template("<s>")),
        {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": False, "legacy": True},
        1,
    ),
    "mistral": (
        sentencepiece(["<unk>", "<s>", "</s>"], None, FIRST, template("<s>")),
        {"bos_token": "<s>", "add_bos_token": True},
        1,
    ),
    "gemma": (
        sentencepiece(
            ["<pad>", "<eos>", "<bos>", "<unk>"],
            normalizers.Replace(" ", "▁"),
            pre_tokenizers.Split(" ", "merged_with_previous"),
            template("<bos>"),
        ),
        {"bos_token": "<bos>", "add_bos_token": True},
        2,
    ),
}


def texts():
    drawn, found = (
        random.Random(0),
        ["", "def fibonacci(n):", " leading", "\n\n  x", "a\tb\r\n", LETTERS, "x" * 40, "  "],
    )
    while len(found) < 32:
        start = drawn.randrange(len(CODE))
        text = CODE[start : start + drawn.randrange(1, 80)]
        if "<" not in text and "[" not in text:  # a name of a special token, which is plain text only here
            found.append(text)
    return found


def kimi(folder, samples):
    """A folder with tiktoken.model, and the ids by tiktoken, as Moonshot's tokenization_kimi.py makes its encoding."""
    vocabulary = byte_level([], split(KIMI)).get_vocab()
    alphabet = {character: byte for byte, character in zip(*alphabet_of_bytes(), strict=True)}
    ranks = {bytes(alphabet[c] for c in piece): rank for piece, rank in vocabulary.items()}
    lines = (
        f"{base64.b64encode(token).decode()} {rank}\n"
        for token, rank in sorted(ranks.items(), key=lambda each: each[1])
    )
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_text("".join(lines), encoding="utf-8")
    first = len(ranks)
    added = {first: ("[BOS]", True), first + 1: ("[EOS]", True), first + 2: ("<|im_end|>", True)}
    added |= {first + 11: ("<|tool_calls_section_begin|>", False)}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {
            str(token): {"content": text, "special": special} for token, (text, special) in added.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    names = {n: added[n][0] if n in added else f"<|reserved_token_{n}|>" for n in range(first, first + 256)}
    special = {name: n for n, name in names.items()}
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    ids = [encoding.encode(text, disallowed_special=()) for text in samples]
    (folder / "ids.json").write_text(json.dumps(ids) + "\n", encoding="utf-8")


def alphabet_of_bytes():
    """All bytes, and the character that represents each in byte-level vocabularies (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return [*kept, *rest], [*map(chr, kept), *(chr(256 + n) for n in range(len(rest)))]


def main():
    samples = texts()
    (HERE / "texts.json").write_text(json.dumps(samples, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    for name, (tokenizer, config, begin) in FAMILIES.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        values = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        (folder / "config.json").write_text(json.dumps({"bos_token_id": begin}) + "\n", encoding="utf-8")
        ids = [PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids for text in samples]
        (folder / "ids.json").write_text(json.dumps(ids) + "\n", encoding="utf-8")
        print(name, ids[1])
    kimi(HERE / "kimi", samples)


if __name__ == "__main__":
    main()
