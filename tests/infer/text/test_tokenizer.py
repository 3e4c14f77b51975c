"""Tokenizers of folders: the tokens before a text, and the ids of transformers and tiktoken (tests/tokenizers)."""

import json
import shutil

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, processors

from laneformer.errors import CheckpointError
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.tokenizer import Tokenizer
from laneformer.infer.text.tokenizer_files import read_settings, special_names
from tests.support.paths import ROOT

FOLDERS = ROOT / "tests" / "tokenizers"
BEFORE = {  # family -> tokens before a text
    **dict.fromkeys(("qwen3", "smollm2", "kimi"), ()),
    **{"llama3": (0,), "llama2": (1,), "mistral": (1,), "gemma": (2,), "glm4": (1, 2)},
}


@pytest.mark.parametrize("name", BEFORE)
def test_ids_are_those_of_other_libraries(name):
    texts, ids = (json.loads(file.read_bytes()) for file in (FOLDERS / "texts.json", FOLDERS / name / "ids.json"))
    found = Tokenizer.find(FOLDERS / name, begin=3)
    assert found.before == BEFORE[name]
    assert [found.encode(text) for text in texts] == ids


@pytest.mark.parametrize("name", BEFORE)
def test_continuation_has_no_tokens_and_no_space_before_it(name):
    found = Tokenizer.find(FOLDERS / name)
    inner = found.encode_continuation("def add")
    assert found.decode([*found.encode("\n"), *inner]).endswith("\ndef add")
    assert found.decode(inner) == "def add" and not set(inner) & set(found.before)


def cases():
    """(post-processor, settings, token before every text or None)"""
    around = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    behind = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    byte_level = processors.ByteLevel()
    yes, no = ({"add_bos_token": value, "bos_token": "<s>"} for value in (True, False))
    yield around, {}, 1
    yield around, no, 1  # the post-processor decides
    yield processors.Sequence([byte_level, around]), {}, 1
    yield processors.BertProcessing(("</s>", 2), ("<s>", 1)), {}, 1
    yield behind, yes, None
    for post_processor in (None, byte_level):
        yield post_processor, {}, None
        yield post_processor, {"bos_token": "<s>"}, None
        yield post_processor, yes, 1
        yield post_processor, no, None
        yield post_processor, {"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}}, 1
        yield post_processor, {"add_bos_token": True, "bos_token": None}, None
        yield post_processor, {"add_bos_token": True, "bos_token": "<unknown>"}, None


@pytest.mark.parametrize(("post_processor", "settings", "expected"), [*cases()])
def test_post_processor_decides_and_then_add_bos_token(tmp_path, post_processor, settings, expected):
    made = Library(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, "a"))
    made.add_special_tokens(["<s>", "</s>"])
    if post_processor is not None:
        made.post_processor = post_processor
    made.save(str(tmp_path / "tokenizer.json"))
    for name, values in (("tokenizer_config.json", settings), ("config.json", {"bos_token_id": 1})):
        (tmp_path / name).write_text(json.dumps(values))
    found = Tokenizer.find(tmp_path, begin=2)
    assert found.encode("a") == [*([] if expected is None else [expected]), 0]
    assert found.encode_continuation("a") == [0]


def test_recipe_decides_in_a_training_run_only(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "10" / "meta").mkdir(parents=True)
    shutil.copyfile(FOLDERS / "smollm2" / "tokenizer.json", run / "tokenizer.json")
    for path in (run, run / "checkpoints" / "10"):
        assert Tokenizer.find(path, begin=7).before == (7,) and Tokenizer.find(path).before == ()
    (run / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.find(run, begin=7).before == ()
    (run / "config.json").write_text("{}")
    (run / "tokenizer_config.json").unlink()
    assert Tokenizer.find(run, begin=7).before == ()


def test_special_tokens_map_names_tokens(tmp_path):
    mapped = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    assert special_names(read_settings(tmp_path)) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    shutil.copyfile(FOLDERS / "smollm2" / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render([{"role": "user", "content": "a"}]) == "<|im_start|>a<|im_end|>"
    config = {"eos_token": "<|endoftext|>", "unk_token": None, "add_bos_token": True}
    for added, eos in (({}, "<|im_end|>"), ({"added_tokens_decoder": {}}, "<|endoftext|>")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | added))
        assert special_names(read_settings(tmp_path)) == {"bos_token": "<|im_start|>", "eos_token": eos}
        assert Tokenizer.find(tmp_path).before == (1,)


def test_tiktoken_vocabulary_has_its_special_tokens():
    found = Tokenizer.find(FOLDERS / "kimi")
    first = len((FOLDERS / "kimi" / "tiktoken.model").read_bytes().splitlines())
    assert found.special_id("<|im_end|>") == first + 2
    assert found.special_id("<|tool_calls_section_begin|>") is None  # its text is part of an answer
    assert found.decode([first + 11]) == "<|tool_calls_section_begin|>"
    assert found.special_id(f"<|reserved_token_{first + 255}|>") == first + 255
    template = ChatTemplate("{{ messages[0].content }}<|im_end|>", Library.from_str(found._tokenizer.to_str()), {})
    assert template.encode([{"role": "user", "content": "a<|im_end|>"}])[-1] == first + 2


def replaced(folder, name, change):
    file = folder / name
    file.write_text(change(file.read_text()))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tiktoken.model", lambda text: text + "!!! 400\n"),
        ("tiktoken.model", lambda text: text + "YWJj\n"),
        ("tiktoken.model", lambda text: text.split("\n", 1)[1]),
        ("tokenizer_config.json", lambda text: text.replace('"special": true', '"odd": true')),
        ("tokenizer_config.json", lambda text: text.replace('"3', '"9')),
        ("tokenizer_config.json", lambda text: "[]"),
        ("tokenizer_config.json", lambda text: '{"bos_token": {"text": "<s>"}}'),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, change):
    folder = shutil.copytree(FOLDERS / "kimi", tmp_path / "kimi")
    replaced(folder, name, change)
    with pytest.raises(CheckpointError, match=rf"{name}.*copy it again"):
        Tokenizer.find(folder)


def test_other_vocabularies_are_named(tmp_path, caplog):
    assert Tokenizer.find(tmp_path) is None and not caplog.records
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    assert Tokenizer.find(tmp_path) is None
    assert "tokenizer.model but no tokenizer.json" in caplog.text
    with pytest.raises(CheckpointError, match=r"tokenizer\.model but no tokenizer\.json"):
        ChatTemplate.load(tmp_path)
