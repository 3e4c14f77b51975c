"""The sample of text with which a tokenizer is trained."""

import pytest

from laneformer.train.tokenizing.documents import Files, Survey, place
from laneformer.train.tokenizing.writer import sample


@pytest.mark.parametrize("known", [True, False], ids=["size known", "size unknown"])
def test_sample_has_no_held_out_document(tmp_path, known):
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"text of file {n}, long enough for a piece")
    source = Files([tmp_path])
    documents = [*source.documents()]
    held_out = {document.content for document in documents if place(document.key) < 0.5}
    assert 5 < len(held_out) < 35
    size = sum(len(document.content) for document in documents)
    survey = Survey.of(documents) if known else None
    assert {*sample(source, survey, 0.5, 2 * size)} == {document.content for document in documents} - held_out
