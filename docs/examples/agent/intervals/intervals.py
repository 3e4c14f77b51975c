"""Sets of numbers as lists of intervals."""


def merge(intervals):
    """The same numbers in as few intervals as possible, sorted."""
    raise NotImplementedError
