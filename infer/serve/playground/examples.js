// Example prompts: the start of a file for a completion, a question for a chat.

export const EXAMPLES = [
  {
    name: "Binary search",
    completion: 'def binary_search(items, target):\n    """Return the index of target in the sorted list items, or -1."""\n',
    chat: "Write a Python function binary_search(items, target) that returns the index of target in a sorted list, or -1.",
  },
  {
    name: "LRU cache",
    completion:
      'from collections import OrderedDict\n\n\nclass LRUCache:\n    """Keeps the `size` entries that were used last."""\n\n' +
      "    def __init__(self, size):\n",
    chat: "Write a Python class LRUCache(size) with get and put, both in constant time.",
  },
  {
    name: "Parse a log",
    completion:
      'import re\n\n\ndef parse_line(line):\n    """Return time, level and message of a line such as\n\n' +
      '    2026-01-31 12:00:00 ERROR disk full\n    """\n',
    chat: "Write a Python function that parses lines such as `2026-01-31 12:00:00 ERROR disk full` into time, level and message.",
  },
  {
    name: "Unit tests",
    completion:
      "import unittest\n\n\ndef slugify(title):\n    return '-'.join(title.lower().split())\n\n\n" +
      "class SlugifyTest(unittest.TestCase):\n    def test_spaces(self):\n",
    chat: "Write unit tests for this function:\n\n```python\ndef slugify(title):\n    return '-'.join(title.lower().split())\n```",
  },
];
