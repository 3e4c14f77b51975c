"""Filling in the middle: rearranged documents can be restored, and shares are as requested."""

from hypothesis import given
from hypothesis import strategies as st

from laneformer.train.tokenizing.documents import digest
from laneformer.train.tokenizing.fim import FillInTheMiddle

PREFIX, MIDDLE, SUFFIX = 1, 2, 3


def undo(parts):
    """The document, restored from the order of its parts in the paper, for both modes."""
    if len(parts) == 1:
        return parts[0].text
    match parts:
        case [1, (str(prefix), True), 3, (str(suffix), False), 2, (str(middle), False)]:
            return prefix + middle + suffix
        case [1, 3, (str(suffix), False), 2, (str(prefix), True), (str(middle), False)]:
            return prefix + middle + suffix
    raise AssertionError(parts)


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_rearranged_documents_are_invertible(text, rate, spm_rate):
    made = FillInTheMiddle(rate, spm_rate, PREFIX, MIDDLE, SUFFIX)
    parts = made.parts(text, digest(text.encode()))
    assert undo(parts) == text
    assert parts == made.parts(text, digest(text.encode())), "parts depend only on the document"


def test_shares_and_cuts_are_as_requested():
    text, made = "x" * 999, FillInTheMiddle(0.7, 0.25, PREFIX, MIDDLE, SUFFIX)
    found = [made.parts(text, digest(str(i).encode())) for i in range(4000)]
    changed = [parts for parts in found if len(parts) > 1]
    spm = [parts for parts in changed if parts[1] == SUFFIX]
    assert abs(len(changed) / 4000 - 0.7) < 0.03 and abs(len(spm) / len(changed) - 0.25) < 0.03
    # Two uniform cuts leave three parts of a third each on average, and reach both ends.
    psm = [parts for parts in changed if parts[1] != SUFFIX]
    lengths = [[len(parts[i].text) for parts in psm] for i in (1, 5, 3)]
    assert all(abs(sum(each) / len(each) - 333) < 20 for each in lengths)
    assert all(min(each) <= 3 for each in lengths) and all(max(each) > 950 for each in lengths)


def test_rates_zero_and_one_are_exact():
    keys = [digest(str(i).encode()) for i in range(200)]
    assert all(len(FillInTheMiddle(0, 0.5, PREFIX, MIDDLE, SUFFIX).parts("ab", key)) == 1 for key in keys)
    assert all(FillInTheMiddle(1, 1, PREFIX, MIDDLE, SUFFIX).parts("ab", key)[:2] == [PREFIX, SUFFIX] for key in keys)


def test_cuts_can_be_anywhere():
    made = FillInTheMiddle(1, 0, PREFIX, MIDDLE, SUFFIX)
    found = {tuple(made.parts("ab", digest(str(i).encode()))[j].text for j in (1, 5, 3)) for i in range(300)}
    assert found == {("", "", "ab"), ("", "a", "b"), ("", "ab", ""), ("a", "", "b"), ("a", "b", ""), ("ab", "", "")}
