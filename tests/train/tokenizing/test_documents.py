"""Sources of documents: the same order from any start position, schemas of published data sets, and errors."""

import os

import pytest

from laneformer.errors import InputError
from laneformer.train.tokenizing.conversations import Conversation
from laneformer.train.tokenizing.documents import Dataset, Document, Files, Survey, digest, place
from laneformer.train.tokenizing.rows import BadRows
from tests.support.training.tokenizing import cache, jsonl, parquet  # noqa: F401

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cache")


def contents(source, start=0):
    return [document and document.content for document in source.documents(start)]


def dataset(kind, *files, columns=("text",), streaming=True, chat=False, bad=None):
    """Local files through the datasets library, which reads those of the hub so."""
    bad = BadRows() if bad is None else bad
    return Dataset(kind, "", "train", [str(file) for file in files], columns, streaming=streaming, chat=chat, bad=bad)


@pytest.mark.parametrize("separator", ["", "--"])
def test_files_are_read_from_any_position(tmp_path, separator):
    for name, data in {"a": b"one--two", "b": b"", "c": b"\xff", "d": b"--three----", "e": b"\0"}.items():
        (tmp_path / name).write_bytes(data)
    source = Files([tmp_path], separator=separator)
    whole = contents(source)
    assert whole == (
        ["one", "two", None, "three", None] if separator else ["one--two", None, None, "--three----", None]
    )
    assert [contents(source, start) for start in range(7)] == [whole[start:] for start in range(7)]
    assert [document.unit for document in source.documents(1) if document] == ([1, 3] if separator else [3])


def test_marks_of_byte_order_are_no_text(tmp_path, capsys):
    for name, data in {
        "a": "﻿one\r\ntwo".encode(),
        "b": "drei".encode("utf-16"),
        "c": b" \r\n\t ",
        "d.parquet": b"PAR1\xff",
        "e": b"\xef\xbb\xbf",
    }.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "f").symlink_to("a")
    (tmp_path / "g").hardlink_to(tmp_path / "b")
    source = Files([tmp_path, tmp_path / "a"])
    assert contents(source) == ["one\r\ntwo", "drei", None, None, None]
    assert capsys.readouterr().err == f"warning: skipped {tmp_path / 'd.parquet'}: not text, see --dataset files\n"


def test_resuming_skips_earlier_files(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    source = Files([tmp_path])
    (tmp_path / "a").unlink()
    assert contents(source, 1) == ["b", "c"]
    with pytest.raises(InputError, match=r"cannot read .*/a: No such file"):
        contents(source)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_rows_are_read_from_any_position(tmp_path, kind, streaming):
    rows = [{"id": i, "text": f"row {i}" if i % 5 else [None, ""][i % 2]} for i in range(23)]
    write = parquet if kind == "parquet" else jsonl
    files = [write(tmp_path / "0", rows[:11]), write(tmp_path / "1", rows[11:])]
    source = dataset(kind, *files, streaming=streaming)
    whole = [row["text"] or None for row in rows]
    for start in (0, 1, 3, 10, 11, 12, 22, 23):
        assert contents(source, start) == whole[start:]
    assert [document.unit for document in source.documents(20) if document] == [21, 22]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        # Rows of Nemotron-CC-v2, Nemotron-CC-Math-v1 and Nemotron-Pretraining-SFT-v1 have metadata of strings, numbers
        # and structs.
        {
            "id": "a",
            "text": "t",
            "metadata": {"warc_filename": "w", "finemath_scores": 4.7, "models_used": "Phi-4", "nested": {"x": None}},
        },
        {"id": "a", "text": "t", "metadata": {"category": "Nemotron-SFT-Code", "models_used": None}, "license": None},
        {"text": "t", "language": "German"},
        {"uuid": "u", "text": "t", "metadata": None},
    ],
)
def test_text_of_pretraining_sets_is_read(tmp_path, row, streaming):
    rows = [row, {**row, "text": None}, {**row, "metadata": None, "text": "u"}]
    assert contents(dataset("parquet", parquet(tmp_path / "rows", rows), streaming=streaming)) == ["t", None, "u"]


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_of_metadata_raises(tmp_path, streaming):
    """The row is of Nemotron-Code-Metadata, a subset of Nemotron-Pretraining-Code-v1."""
    file = parquet(
        tmp_path / "rows", [{"repo": "a/b", "commit_id": "5d81d77", "rel_path": "app/x.java", "language": "Java"}]
    )
    with pytest.raises(
        InputError, match=r"no column 'text'; .*\(repo, commit_id\).*--column from repo, commit_id, rel_path, language"
    ):
        dataset("parquet", file, streaming=streaming)
    with pytest.raises(InputError, match=r"has no column 'text'; .*--column .*repo_name, content"):
        dataset("parquet", parquet(tmp_path / "code", [{"repo_name": "a", "content": "b"}]), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_conversations_are_read(tmp_path, kind, streaming):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks, calls = (
        {"role": "user", "content": "a", "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    more = [{"role": "user", "content": "b", "tool_calls": None}, {"role": "assistant", "content": "c"}]
    rows = [
        {"uuid": "u", "messages": [asks, calls], "metadata": {"x": [1]}},
        {"uuid": "v", "messages": more, "metadata": None},
        {"uuid": "w", "messages": None, "metadata": None},
    ]
    source = dataset(
        kind,
        (parquet if kind == "parquet" else jsonl)(tmp_path / "rows", rows),
        columns=(),
        streaming=streaming,
        chat=True,
    )
    assert contents(source) == [
        Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]),
        Conversation([{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]),
        None,
    ]


def test_bad_rows_are_skipped_and_named(tmp_path, capsys):
    rows = [
        {"conversations": [{"from": "human", "value": "x"}, {"from": who, "value": "y"}]}
        for who in ("gpt", "gpt", "cat")
    ]
    bad = BadRows(1)
    source = dataset("json", jsonl(tmp_path / "rows", rows), columns=(), chat=True, bad=bad)
    assert contents(source, 1)[1] is None and contents(source)[2] is None
    line = "dataset json (split train), row 2: messages[1] is from 'cat'; expected one of "
    assert capsys.readouterr().err.startswith(f"warning: skipped {line}") and list(bad.found) == [2]
    with pytest.raises(InputError, match=r"1 rows .* --max-bad-rows 0; .*, row 2: messages\[1\] is from 'cat'"):
        contents(dataset("json", tmp_path / "rows", columns=(), chat=True, bad=BadRows(0)))
    with pytest.raises(InputError, match=r"dataset json has no conversations .*text"):
        dataset("json", jsonl(tmp_path / "text", [{"text": "a"}]), columns=(), chat=True)
    with pytest.raises(InputError, match=r"row 0: column 'id' holds int, not text; .*--column"):
        contents(dataset("json", jsonl(tmp_path / "ids", [{"id": 1}]), columns=("id",), bad=BadRows(0)))


@pytest.mark.parametrize("streaming", [False, True])
def test_unreadable_datasets_raise(tmp_path, streaming):
    with pytest.raises(InputError, match=r"cannot read dataset json \(split train\): Unable to find"):
        dataset("json", tmp_path / "nowhere", streaming=streaming)
    (tmp_path / "broken").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(InputError, match=r"cannot read dataset json \(split train\)"):
        contents(dataset("json", tmp_path / "broken", streaming=streaming))
    (tmp_path / "empty.jsonl").touch()
    parquet(tmp_path / "empty.parquet", [], schema=pa.schema({"text": pa.string()}))
    for kind in ("json", "parquet"):
        with pytest.raises(InputError, match=rf"cannot read dataset {kind} \(split train\): .*no rows"):
            contents(dataset(kind, tmp_path / f"empty.{kind}*", streaming=streaming))


def test_stream_identity_follows_its_files(tmp_path):
    file = jsonl(tmp_path / "rows", [{"text": "a", "more": "b"}])
    known = dataset("json", file).identity()
    assert known == dataset("json", file).identity() != dataset("json", file, columns=("more",)).identity()
    os.utime(file, ns=(0, 0))
    assert known != dataset("json", file).identity()


def test_survey_counts_documents():
    made = [Document.of(0, "a"), None, Document.of(2, "é"), Document.of(3, "a")]
    found = Survey.of(made)
    assert (found.documents, found.units, found.bytes) == (3, 4, 4)
    assert found.lowest == tuple(sorted(place(digest(text.encode())) for text in ("a", "é")))
    assert (
        found.fingerprint != Survey.of(made[2:]).fingerprint
        and found.fingerprint == Survey.of(filter(None, made)).fingerprint
    )
    assert found.held_out_share(0) == 0 and found.lowest[0] < found.held_out_share(1e-12) < found.lowest[1]
    assert Survey.of(made[:1] * 3).documents == 3
    with pytest.raises(InputError, match=r"3 equal documents; .*--validation-fraction 0"):
        Survey.of(made[:1] * 3).held_out_share(0.1)
    same = Document.of(0, Conversation([{"role": "user", "content": "a"}]))
    assert same.key == Document.of(5, Conversation([{"content": "a", "role": "user"}])).key
