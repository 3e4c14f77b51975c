"""Rows of messy local files: what can be read is read, from any position; the rest is named with file and row."""

import bz2
import gzip
import json
import lzma
import os

import pytest

from laneformer.errors import InputError
from laneformer.train.tokenizing.conversations import Conversation
from laneformer.train.tokenizing.rows import BadRows
from laneformer.train.tokenizing.tables import Tables
from tests.support.training.tokenizing import parquet

pa = pytest.importorskip("pyarrow")


def _zstd(data):
    """Two frames, as some tools write them."""
    half = len(data) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


COMPRESSED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": _zstd}


def tables(kind, *files, columns=("text",), chat=False, limit=None):
    return Tables(kind, [str(file) for file in files], columns, chat=chat, bad=BadRows(limit))


def contents(source, start=0):
    return [document and document.content for document in source.documents(start)]


def check(source, expected, *bad):
    """The documents from every position, and the units that are reported as bad: (unit, part of the message)."""
    whole = contents(source)
    assert whole == expected
    for start in range(len(whole) + 2):
        assert contents(source, start) == whole[start:]
    assert sorted(source.bad.found) == [unit for unit, _ in bad]
    for unit, part in bad:
        assert part in source.bad.found[unit], source.bad.found[unit]


ROWS = [{"text": "a b", "n": 1}, {"text": "c\r\nd"}, {"text": None}, {"text": " \t"}, {"text": "e é 🐍"}]


@pytest.mark.parametrize("packed", [None, *COMPRESSED])
@pytest.mark.parametrize("marks", ["", "utf-8-sig", "utf-16"])
def test_json_lines_are_read_in_every_encoding(tmp_path, packed, marks):
    data = "\r\n".join([*(json.dumps(row, ensure_ascii=False) for row in ROWS), "", ""]).encode(marks or "utf-8")
    file = tmp_path / "rows.jsonl"
    file.write_bytes(COMPRESSED[packed](data) if packed else data)
    check(tables("json", file), ["a b", "c\r\nd", None, None, "e é 🐍"])


def test_bad_json_lines_are_named(tmp_path, capsys):
    lines = [
        b'{"text": "a"}',
        b'{"text": "\\ud83d"}',  # half of a character
        b'{"text": "\xff"}',
        b"",
        b'["b"]',
        b'{"text": 3}',
        b'{"other": "c"}',
        b"[" * 100_000,
        b'{"text": "d"}',
        b'{"text": "cut',
    ]
    file = tmp_path / "rows"
    file.write_bytes(b"\n".join(lines))
    check(
        tables("json", file),
        ["a", None, None, None, None, None, None, "d", None],
        (1, f"{file}, line 2: text is not Unicode"),
        (2, "line 3: not UTF-8"),
        (3, "line 5: a JSON list, not an object"),
        (4, "line 6: column 'text' holds int"),
        (6, "line 8: not JSON"),
        (8, "line 10: not JSON"),
    )
    named = capsys.readouterr().err.splitlines()
    assert len(named) == 6 and named[0].startswith(f"warning: skipped {file}, line 2: ") and "more" in named[5]
    with pytest.raises(
        InputError, match=r"^3 rows cannot be read, more than --max-bad-rows 2; .*, line 5: a JSON list"
    ):
        contents(tables("json", file, limit=2))


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text":\n "b"}]', '{\n"text": "a"\n}\n{\n"text": "b"}', "[\n[]CUT"])
def test_json_of_several_lines_is_read(tmp_path, text):
    file = tmp_path / "rows.json"
    cut = text.endswith("CUT")
    file.write_text('[{"text": "a"},\n{"text": "b"},\n{"te' if cut else text)
    check(tables("json", file), ["a", "b"] + [None] * cut, *([(2, "row 2: not JSON")] if cut else []))


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_csv_is_read(tmp_path, mark):
    rows = ["id;text;more", '1;"a ""b""\r\nc";x', "2;d", "3;;x", "", "4;e;x;y", f'5;"{"f" * 200_000}";x', "6;\xff;x"]
    file = tmp_path / "rows.csv"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(row.replace(";", mark) for row in rows).encode("latin-1"))
    check(
        tables("csv", file),
        ['a "b"\r\nc', "d", None, None, "f" * 200_000, None],
        (3, "line 7: 4 fields, but the header has 3"),
        (5, "line 9: text is not Unicode"),
    )


def test_parquet_files_may_differ_in_their_columns(tmp_path, monkeypatch):
    """In any order. Only the column of the text is read."""
    files = [
        parquet(tmp_path / "0", [{"text": "a", "score": 1}, {"text": None, "score": 2}]),
        parquet(tmp_path / "1", [{"score": "high", "more": {"x": [1]}, "text": "b"}]),
        parquet(tmp_path / "2", [{"body": "c"}]),
        parquet(tmp_path / "3", [], schema=pa.schema({"text": pa.string()})),
        parquet(tmp_path / "4", [{"text": "d"}], schema=pa.schema({"text": pa.large_string()})),
        tmp_path / "5",
        tmp_path / "6",
    ]
    files[5].write_bytes(files[0].read_bytes()[:-9])
    invalid = pa.array([b"e", b"\xff", b"f"]).cast(pa.binary()).view(pa.string())
    pa.parquet.write_table(pa.table({"text": invalid}), files[6])
    lacks, damaged, wrong = (
        "no column 'text'; choose --column from body",
        str(files[5]),
        f"{files[6]}, row 1: not UTF-8",
    )
    check(
        tables("parquet", *files),
        ["a", None, "b", None, "d", None, "e", None, "f"],
        (3, f"{files[2]}: {lacks}"),
        (5, damaged),
        (7, wrong),
    )
    assert contents(tables("parquet", *reversed(files))) == ["e", None, "f", None, "d", None, "b", "a", None]
    read = pa.parquet.ParquetFile.iter_batches
    asked = []
    monkeypatch.setattr(
        pa.parquet.ParquetFile,
        "iter_batches",
        lambda *args, **named: asked.append(named["columns"]) or read(*args, **named),
    )
    contents(tables("parquet", files[1]))
    assert asked == [["text"]] * 2


def test_folder_of_mixed_files_is_read_once(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    parquet(folder / "a.parquet", [{"text": "a"}])
    (folder / "b.jsonl").write_text('{"text": "b"}\n')
    (folder / "c.csv").write_text("text,n\nc,1\n")
    (folder / "d.txt").write_bytes("﻿d\r\nd".encode())
    (folder / "deep" / "e.txt.gz").write_bytes(gzip.compress(b"e"))
    (folder / "deep" / "f.png").write_bytes(b"\x89PNG\xff")
    (folder / "deep" / "g.txt.gz").write_bytes(gzip.compress(b"g" * 1000)[:-9])
    (folder / "deep" / ".hidden").write_text("h")
    (folder / "z.jsonl").symlink_to("b.jsonl")
    monkeypatch.chdir(tmp_path)
    names = (folder, "mine/*.csv", folder / ".." / "mine" / "b.jsonl")
    check(tables("files", *names), ["a", "b", "c", "d\r\nd", "e", None, None], (5, "f.png: "), (6, "g.txt.gz: "))
    for other in tables("files", "mine/*.jsonl", folder).files[:1]:
        assert os.path.samefile(other, folder / "b.jsonl")


def test_lines_of_text_are_rows(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_bytes(b"a\r\n\n b\n\xff\nc")
    check(tables("text", file), ["a", None, " b", None, "c"], (3, f"{file}, line 4: not UTF-8"))


def test_conversations_of_any_shape_are_read(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    half = [messages[0], {"role": "assistant", "content": "\ud800"}]
    rows = [{"messages": messages}, {"prompt": "a", "response": "b"}, {"x": 1}, {"messages": "a"}, {"messages": half}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    check(
        tables("json", file, columns=(), chat=True),
        [Conversation(messages), Conversation(messages), None, None, None],
        (2, "line 3: no conversations in a known shape"),
        (3, "line 4: messages must be a list"),
        (4, "line 5: text is not Unicode"),
    )


def test_files_without_the_column_raise(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"body": "a"}\n')
    with pytest.raises(InputError, match=r"^dataset json has no column 'text'; choose --column from body$"):
        tables("json", file)
    with pytest.raises(InputError, match=r"no file is named .*nowhere; correct --data-files"):
        tables("json", tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"nothing to read in parquet files .*rows\.jsonl: .*; check --data-files"):
        tables("parquet", file)
    file.write_text("")
    with pytest.raises(InputError, match="no rows"):
        tables("json", file)


def test_identity_follows_the_files(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a", "more": "b"}')
    known = tables("json", file).identity()
    assert known == tables("json", file).identity() != tables("json", file, columns=("more",)).identity()
    os.utime(file, ns=(0, 0))
    assert known != tables("json", file).identity()
