"""A small model that answers a user with calls of tools, and a tool's result with a text, and its chat template, which
is Hermes's by default.
"""

import re
from itertools import pairwise
from pathlib import Path

import tokenizers

from tests.support.checkpoints import follow, save_checkpoint
from tests.support.serving.tool_templates import TEMPLATES, function

TALK, DONE, ASKED, ANSWERED = "<|im_start|>", "<|im_end|>", "<|asked|>", "<|answered|>"
ADD = function("add", a={"type": "integer"}, b={"type": "integer"})
QUESTION = {"role": "user", "content": "What are 2 and 3?"}
CALLS = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWER = "It is 5."


def words(text: str, used: dict[str, None]) -> list[str]:
    """Splits a text into pieces that are not in `used`, and adds them to it. A repeated piece would need two
    successors.
    """
    made = []
    for found in re.findall(r"</?think>|\w+|\W", text):
        piece = found
        while made and piece in used:  # joined with the piece before it
            last = made.pop()
            del used[last]
            piece = last + piece
        used[piece] = None
        made.append(piece)
    return made


def tool_model(folder: Path, calls: str = CALLS, template: str | None = TEMPLATES["hermes"], **changes) -> Path:
    """Saves the model and returns its folder. Its prompts end with ANSWERED after the message of a tool, and with ASKED
    after any other message.

    template: a chat template, or None for one without tools. changes: fields of the model's config.
    """
    used: dict[str, None] = {}
    chains = [[ASKED, *words(calls, used), DONE], [ANSWERED, *words(ANSWER, used), DONE]]
    save_checkpoint(folder, TALK, DONE, ASKED, ANSWERED, words=list(used), layers=1, lanes=1, **changes)
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    follow(folder, {ids.token_to_id(a): ids.token_to_id(b) for chain in chains for a, b in pairwise(chain)})
    source = (
        template or "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    source = source.partition("{% if add_generation_prompt %}")[0]
    answered = "messages[-1].role == 'tool' or '<tool_response>' in messages[-1].content"
    source += f"{{% if {answered} %}}{ANSWERED}{{% else %}}{ASKED}{{% endif %}}"
    (folder / "chat_template.jinja").write_text(source)
    return folder
