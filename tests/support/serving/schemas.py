"""Random JSON schemas that answers can satisfy."""

from hypothesis import strategies as st


def schemas() -> st.SearchStrategy:
    """Schemas of texts, integers, constants, enumerations, arrays, objects and unions of these."""
    numbers = st.tuples(st.integers(-30, 30), st.integers(0, 50)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )
    leaves = st.one_of(
        st.integers(0, 6).map(lambda n: {"type": "string", "maxLength": n}),
        numbers,
        st.sampled_from(
            [{"type": "boolean"}, {"type": "null"}, {"enum": ["a", 5, None, "é\n"]}, {"const": {"x": [1]}}]
        ),
    )

    def larger(inner):
        arrays = st.tuples(inner, st.integers(0, 2)).map(
            lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[1] + 1}
        )
        named = st.dictionaries(st.sampled_from(["a", "name", 'q"', "ü"]), inner, max_size=3)
        objects = st.tuples(named, st.integers(0, 3)).map(
            lambda made: {
                "type": "object",
                "properties": made[0],
                "required": [*made[0]][: made[1]],
                "additionalProperties": False,
            }
        )
        return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}))

    return st.recursive(leaves, larger, max_leaves=5)
