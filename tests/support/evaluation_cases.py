"""Small programming problems in the formats of HumanEval and MBPP, with solutions."""

import json

ADD = {
    "task_id": "HumanEval/0",
    "prompt": (
        "import math\n\n\ndef half(x):\n    return x / 2\n\n\n"
        'def add(a: int, b: int) -> int:\n    """The sum.\n    >>> add(1, 2)\n    3\n    """\n'
    ),
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n    assert half(4)"
        " == 2\n"
    ),
}
TWICE = {
    "task_id": "HumanEval/1",
    "prompt": '\n\ndef twice(text: str) -> str:\n    """The text two times."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return text * 2\n",
    "test": "def check(candidate):\n    assert candidate('ab') == 'abab'\n",
}
LEAST = {
    "task_id": 7,
    "prompt": "Write a function to find the least of some numbers. https://example.org/least",
    "code": "def least(xs):\n    return min(xs)\n",
    "test_imports": [],
    "test_list": ["assert least([3, 1, 2]) == 1", "assert least([5]) == 5"],
}
FIRST_MBPP = {
    "task_id": 8,
    "text": "Write a function for the area of a circle.",
    "code": "import math\r\ndef area(r):\r\n    return math.pi * r * r",
    "test_setup_code": "",
    "test_list": ["assert round(area(1), 2) == 3.14"],
    "challenge_test_list": [],
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
