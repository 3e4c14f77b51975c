"""scripts.tokenize --chat: the loss mask, the template in the store, and errors."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from laneformer.infer.text.chat_template import CHATML, ChatTemplate
from laneformer.train.data.store import TokenStore
from laneformer.train.tokenizing import encoder
from tests.support.training.tokenizing import cache, content, documents, jsonl, run  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")
TALKS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"question {i} <|im_end|>"},
            {"role": "assistant", "content": f"answer {i}\n"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "" if i % 2 else "é"},
        ]
    }
    for i in range(30)
]
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""


@pytest.fixture
def tokenizer(tmp_path):
    """tokenizer.json of a folder with pretraining tokens."""
    folder = tmp_path / "web"
    folder.mkdir()
    encoder.train_bpe(["question answer more brief"], 300).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture
def args(tmp_path, tokenizer):
    jsonl(tmp_path / "talks.jsonl", TALKS)
    return (
        "--out",
        tmp_path / "out",
        "--dataset",
        "json",
        "--data-files",
        tmp_path / "talks.jsonl",
        "--streaming",
        "--chat",
        "--tokenizer",
        tokenizer,
        "--validation-fraction",
        0.2,
    )


def masks(path, split):
    store = TokenStore.open(path)
    return np.split(store.read_loss(split, 0, store.tokens(split)), store.document_ends(split)[:-1])


def test_conversations_become_documents_with_loss_masks(tmp_path, tokenizer, args, capsys):
    out = tmp_path / "out"
    code, line, err = run(capsys, *args)
    assert code == 0 and "30 documents" in line, err
    bpe = Tokenizer.from_file(str(tokenizer))
    found = []
    for split in ("train", "validation"):
        assert TokenStore.open(out).has_loss_mask(split)
        for ids, loss in zip(documents(out, split), masks(out, split), strict=True):
            text = bpe.decode(ids.tolist(), skip_special_tokens=False)
            [number] = [i for i in range(30) if f"question {i} " in text]
            found.append(number)
            last = "" if number % 2 else "é"
            assert text == (
                f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nquestion {number} <|im_end|><|im_end|>\n"
                f"<|im_start|>assistant\nanswer {number}\n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
                f"<|im_start|>assistant\n{last}<|im_end|>\n<|endoftext|>"
            )
            assert (
                bpe.decode(ids[loss].tolist(), skip_special_tokens=False)
                == f"answer {number}\n<|im_end|>{last}<|im_end|>"
            )
            assert (ids == bpe.token_to_id("<|im_end|>")).sum() == 5, "<|im_end|> in a message of the user is text"
    assert sorted(found) == list(range(30))
    source = TokenStore.open(out).manifest.source["settings"]["chat"]
    assert source == {
        "template": ChatTemplate.load(tokenizer.parent).sha256,
        "answers": "prefixes",
        "tokens": {},
        "date": "",
    }
    assert ChatTemplate.load(out).source == CHATML  # a server reads it from there
    assert "nothing to do" in run(capsys, *args)[1]
    code, line, err = run(capsys, *args, "--chat-template", tokenizer)
    assert code == 2 and "chat (was {'template':" in err


def test_marks_written_by_the_template_are_not_doubled(tmp_path, tokenizer, args, capsys):
    bpe = Tokenizer.from_file(str(tokenizer))
    bpe.add_special_tokens(["<s>", "</s>"])
    bpe.save(str(tokenizer))
    (tokenizer.parent / "chat_template.jinja").write_text(MISTRAL)
    (tokenizer.parent / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "other": 1})
    )
    jsonl(tmp_path / "talks.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": ""}])
    assert run(capsys, *args, "--begin-token", "<s>", "--end-token", "</s>", "--validation-fraction", 0)[0] == 0
    texts = [bpe.decode(ids.tolist(), skip_special_tokens=False) for ids in documents(tmp_path / "out", "train")]
    counted = [
        bpe.decode(ids[loss].tolist(), skip_special_tokens=False)
        for ids, loss in zip(documents(tmp_path / "out", "train"), masks(tmp_path / "out", "train"), strict=True)
    ]
    assert texts[0] == "<s>[INST]a[/INST]b</s>" and counted[0] == "b</s>"
    assert texts[1] == "<s>[INST]c[/INST]</s></s>" and counted[1] == "</s></s>", "the end after an empty answer counts"
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["other"] == 1
    # --overwrite also removes the chat template of the earlier tokenizer.
    (tmp_path / "a.txt").write_text("a")
    assert (
        run(
            capsys,
            "--out",
            tmp_path / "out",
            tmp_path / "a.txt",
            "--validation-fraction",
            0,
            "--train-bpe",
            262,
            "--overwrite",
        )[0]
        == 0
    )
    assert not {"chat_template.jinja", "tokenizer_config.json"} & content(tmp_path / "out").keys()


def test_store_uses_the_marks_of_the_template(tmp_path, tokenizer, args, capsys):
    source = "<|im_start|>{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (tokenizer.parent / "chat_template.jinja").write_text(source)
    jsonl(tmp_path / "talks.jsonl", [{"prompt": "a", "response": "b"}])
    assert run(capsys, *args, "--validation-fraction", 0)[0] == 0
    [ids], [loss] = documents(tmp_path / "out", "train"), masks(tmp_path / "out", "train")
    assert (
        Tokenizer.from_file(str(tokenizer)).decode(ids.tolist(), skip_special_tokens=False)
        == "<|im_start|>ab<|endoftext|>"
    )
    assert loss.tolist() == [False, True, True, True]
    assert TokenStore.open(tmp_path / "out").manifest.source["settings"]["chat"]["answers"] == "generation blocks"


def test_unusable_rows_are_skipped(tmp_path, args, capsys):
    jsonl(
        tmp_path / "talks.jsonl",
        [*TALKS[:20], {"messages": None}, {"messages": [{"role": "user", "content": "no answer"}]}],
    )
    code, line, err = run(capsys, *args)
    assert code == 0 and "20 documents" in line and "2 skipped (rows without text, or without an answer)" in line, err
    jsonl(tmp_path / "talks.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 3)
    code, _, err = run(capsys, *args, "--overwrite")
    assert (
        code == 2
        and f"no text in json files {tmp_path / 'talks.jsonl'}, 3 skipped (rows without text, or without an answer)"
        in err
    )


@pytest.mark.parametrize(
    ("template", "more", "message"),
    [
        (
            "{{ raise_exception('no system prompts') }}",
            ("--max-bad-rows", 3),
            "4 rows cannot be read, more than --max-bad-rows 3; the last one is {d}, line 4: {t}, line 1: no system",
        ),
        ("{% for m in messages %}\n{{ m", (), "{t}, line 2 is not a chat template"),
        ("{{ strftime_now('%d') }}", (), "{t} writes the date; give --chat-date"),
        (CHATML, ("--chat-date", "2025-01-31"), "{t} does not write the date; leave out --chat-date"),
        (CHATML, ("--column", "talk"), "dataset json has no column 'talk'"),
        (CHATML, ("--prompt-column", "a", "--answer-column", "b"), "dataset json has no column 'a' and 'b'"),
        ("{{ eos_token }}", (), "{t} uses eos_token, which needs a tokenizer_config.json"),
    ],
)
def test_bad_options_are_named(tmp_path, args, capsys, template, more, message):
    file = tmp_path / "given.jinja"
    file.write_text(template)
    code, _, err = run(capsys, *args, "--chat-template", file, *more)
    assert (
        code == 2
        and message.replace("{t}", str(file)).replace("{d}", str(tmp_path / "talks.jsonl")) in err
        and "Traceback" not in err
    )


def test_template_writes_the_given_date(tmp_path, args, capsys):
    (tmp_path / "given.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert run(capsys, *args, "--chat-template", tmp_path / "given.jinja", "--chat-date", "2025-01-31")[0] == 0
    bpe = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert bpe.decode(documents(tmp_path / "out", "train")[0].tolist()).startswith("31 Jan 2025")


def test_missing_template_is_one_line(tmp_path, tokenizer, args, capsys):
    bpe = json.loads(tokenizer.read_text())
    bpe["added_tokens"] = [token for token in bpe["added_tokens"] if "im_" not in token["content"]]
    tokenizer.write_text(json.dumps(bpe))
    code, _, err = run(capsys, *args)
    assert code == 2 and f"{tokenizer.parent} has no chat template: put a chat_template.jinja there" in err
