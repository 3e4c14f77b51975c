"""Stop strings: the result does not depend on how a text is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from laneformer.infer.text.stop_strings import StopStrings

SMALL = st.text("ab", max_size=12)


def by_character(text, stops):
    """The text before the first stop string that becomes complete, and that string; (text, None) without one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(SMALL, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_result_does_not_depend_on_pieces(pieces, stops):
    expected, stop = by_character("".join(pieces), stops)
    stopper, text = StopStrings(stops), ""
    for piece in pieces:
        text += stopper.add(piece)
        assert expected.startswith(text)  # text that was passed on is never part of a stop string
    text += stopper.flush()
    assert (text, stopper.found) == (expected, stop)


def test_only_possible_stop_strings_are_held_back():
    stopper = StopStrings(["\ndef "])
    assert stopper.add("x = 1\n") == "x = 1"
    assert stopper.add("de") == ""
    assert stopper.add("l x\nd") == "\ndel x"
    assert stopper.add("ef f") == "" and stopper.found == "\ndef "
    assert stopper.add("more") == "" and stopper.flush() == ""
