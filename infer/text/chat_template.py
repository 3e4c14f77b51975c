"""Chat templates of Hugging Face folders: turn conversations into text and token ids, and mark the parts that the
assistant wrote.

A template is a Jinja program over `messages`. It runs in a sandbox with the filters and functions of Hugging Face.
Messages are data: the name of a special token in a message is plain text. Only the template itself makes special
tokens.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers

from laneformer.errors import CheckpointError, InputError
from laneformer.files import read_file
from laneformer.infer.text.call_grammars import call_grammar
from laneformer.infer.text.channels import Channels, Harmony, Part, Parts
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.template_code import MARKS, Code, Marks, TemplateCode
from laneformer.infer.text.thinking import Thinking, ThinkMarks
from laneformer.infer.text.tokenizer_files import (
    CONFIG,
    TOKENIZER,
    find_vocabulary,
    read_settings,
    read_tokenizer,
    special_names,
    unread,
)
from laneformer.infer.text.tool_calls import (
    HARMONY,
    HERMES,
    HarmonyReader,
    Reader,
    TextReader,
    ToolRequest,
    find_format,
)

TEMPLATE = "chat_template.jinja"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
# The default for a tokenizer that has these two tokens but no template. It refuses parts of messages that it cannot
# write.
CHATML = """\
{%- if tools %}{{- raise_exception('the default template cannot write tool definitions: give a template that can') }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls or message.reasoning_content %}
        {{- raise_exception('the default template cannot write tool calls or reasoning_content: give a template that can') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Characters that Unicode reserves for internal use. While a conversation is rendered, three that it does not contain
# mark places in it.
NONCHARACTERS = [
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF)),
]
LONGEST_SPECIAL = 256  # characters of a special token's name, all of whose beginnings are kept


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...] = ()
    """Character spans [start, stop) that the assistant wrote, including the end-of-turn token."""
    cuts: tuple[int, ...] = ()
    """Positions inside names of special tokens in messages. The text is split there before it is encoded."""


class ChatTemplate:
    """A chat template with the tokenizer that it belongs to. Any thread may use it."""

    def __init__(
        self,
        source: str,
        tokenizer: tokenizers.Tokenizer,
        tokens: Mapping[str, str],
        *,
        name: str = "the chat template",
        config: bytes | None = None,
        now: Callable[[], datetime] = datetime.now,
        code: Code | None = None,
        check: Callable[[str], None] | None = None,
    ):
        """source: text of the template. tokens: variables of the template for special tokens, as in {"bos_token":
        "<s>"}. name: name of the template in error messages. config: the tokenizer_config.json that `files` returns.
        now: clock for `strftime_now`. code: the template's program, if it is read elsewhere. check: called with the
        text of each conversation before it is encoded; may raise InputError. Raises InputError for a template that is not Jinja, and without the jinja2
        package.
        """
        self.source, self.tokens, self.name, self._config, self._now = source, dict(tokens), name, config, now
        self._check = check
        # The post-processor is removed: it would trim spaces from the offsets and add tokens that a template must not
        # have.
        self._tokenizer = tokenizers.Tokenizer.from_str(
            json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None})
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = False  # for the template's text; cuts protect the text of messages
        special = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and len(token.content) > 1
        }
        if (longest := max(map(len, special), default=0)) > LONGEST_SPECIAL:
            raise InputError(
                f"the tokenizer has a special token of {longest} characters, more than {LONGEST_SPECIAL}: shorten it"
            )
        self._special, self._lengths = special, {len(token) for token in special}
        self._first = re.compile(
            f"[{re.escape(''.join(sorted({token[0] for token in special})))}]" if special else "(?!)"
        )
        self._beginnings = {token[:n] for token in special for n in range(1, len(token))}
        self._ends = {token[n:] for token in special for n in range(1, len(token))}
        self._code = TemplateCode(source, name) if code is None else code
        names = self._code.names
        if "eos_token" in names and "eos_token" not in tokens:
            raise InputError(f"{name} uses eos_token, which needs a {CONFIG}: put that file beside the {TOKENIZER}")
        self.variables = names
        """Names that the template reads."""
        self.says_answers = MARKS in names
        """Whether {% generation %} blocks mark what the assistant wrote."""
        self.says_date = "strftime_now" in names
        """Whether the text contains the date, and so differs from day to day."""
        self._harmony = Harmony.find(tokenizer) if "<|channel|>" in source else None
        self._think = None if self._harmony is not None else ThinkMarks.find(source, tokenizer)
        self._thinking = "thinking" in source and "reasoning_content" not in source  # gpt-oss's name of the field
        found = find_format(source, names)
        self.tool_format = None if found is HARMONY and self._harmony is None else found
        """The format in which the template writes tool calls; None if no known format fits."""
        self.has_developer = "developer" in source
        """Whether the template supports messages of the role "developer"."""

    @classmethod
    def load(
        cls,
        folder: str | Path,
        file: str | Path | None = None,
        *,
        tokenizer: tokenizers.Tokenizer | None = None,
        now: Callable[[], datetime] = datetime.now,
        code: Code | None = None,
        check: Callable[[str], None] | None = None,
    ) -> Self:
        """The template in `file`. By default the template of a tokenizer folder: its chat_template.jinja, else the one
        in its tokenizer_config.json, else CHATML if the tokenizer has the tokens of CHATML.

        tokenizer: by default the folder's tokenizer.json. now, code, check: see the constructor. Raises CheckpointError for a folder
        without tokenizer or template, InputError for an invalid template.
        """
        folder = Path(folder)
        if tokenizer is None:
            vocabulary = find_vocabulary(folder)
            if vocabulary is None:
                raise CheckpointError(unread(folder) or f"{folder} has no {TOKENIZER}: add the file")
            tokenizer = read_tokenizer(vocabulary)
        settings = read_settings(folder)
        try:
            config = read_file(folder / CONFIG) if (folder / CONFIG).exists() else None
            own = settings.get("chat_template")
            if isinstance(own, list):
                own = {each["name"]: each["template"] for each in own}["default"]
        except (OSError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"cannot read {folder / CONFIG} ({type(error).__name__}: {error}): copy it again"
            ) from None
        if file is None and (folder / TEMPLATE).exists():
            file = folder / TEMPLATE
        if file is not None:
            try:
                source, name = read_file(Path(file)).decode(), str(file)
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"cannot read the chat template {file}: {error}") from None
        elif own is not None:
            source, name = own, f"the chat_template in {folder / CONFIG}"
        elif {TURN_START, TURN_END} <= {
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        }:
            source, name = CHATML, "the default chat template"
        else:
            raise CheckpointError(f"{folder} has no chat template: put a {TEMPLATE} there, or name a template file")
        return cls(
            source, tokenizer, special_names(settings), name=name, config=config, now=now, code=code, check=check
        )

    @functools.cached_property
    def _written_end(self) -> tuple[int, ...]:
        """The special token that the template writes after an answer, or ()."""
        answer = "<the answer>"
        try:
            text = self.render([{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}])
        except InputError:  # the template refuses this conversation
            return ()
        behind = text[text.rindex(answer) + len(answer) :] if answer in text else ""
        first = self._tokenizer.encode(behind.lstrip(), add_special_tokens=False)
        return tuple(first.ids[:1]) if first.tokens and first.tokens[0] in self._special else ()

    def ends(self, eos: Sequence[int]) -> tuple[int, ...]:
        """Ids that end an answer: the model's ends of text `eos`, and the special token that the template writes after
        an answer. For a harmony template (infer/text/channels.py), also the ends of a turn, but never the end of a
        message.
        """
        found = (*eos, *self._written_end)
        return found if self._harmony is None else self._harmony.turn_stops(found)

    def channels(self, prompt: Sequence[int], calls: bool = False) -> Parts | None:
        """The `Parts` that separate reasoning from content in the answer to a prompt; None if the template has no
        reasoning.

        prompt: token ids. calls: whether function calls in harmony are Part.CALL; otherwise they are reasoning.
        """
        if self._harmony is not None:
            return Channels(self._harmony, self._tokenizer, prompt, calls)
        return None if self._think is None else Thinking(self._think, self._tokenizer, prompt)

    def call_grammar(self, prompt: Sequence[int], request: ToolRequest, **options: Any) -> Grammar:
        """The grammar of the answer to a prompt of token ids. options, errors: see `call_grammar` in
        infer/text/call_grammars.py.
        """
        made = self.tool_format or HERMES
        channels = None if self._harmony is None else Channels(self._harmony, self._tokenizer, prompt)
        reasoning = channels is not None and channels.part is Part.REASONING
        return call_grammar(made, request, self._special_id, reasoning=reasoning, **options)

    def _special_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text) if text in self._special else None

    @property
    def reader_tokens(self) -> tuple[str, ...]:
        """Special tokens that must appear by name in the text that the reader receives."""
        return (self.tool_format or HERMES).spelled

    def reader(self, prompt: Sequence[int], request: ToolRequest) -> Reader:
        """A reader that finds tool calls in the answer to a prompt of token ids. It expects the template's format. If
        the template has none, it expects that of Hermes, which infer/text/conversation.py describes to the model.
        """
        if self.tool_format is HARMONY and self._harmony is not None:
            return HarmonyReader(Channels(self._harmony, self._tokenizer, prompt, calls=True), request)
        return TextReader(self.tool_format or HERMES, request)

    @property
    def sha256(self) -> str:
        """SHA-256 of the template's text, hexadecimal."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def files(self) -> dict[str, bytes]:
        """The files that `load` needs beside the tokenizer.json to load this template again: name -> content."""
        config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **self.tokens}, indent=1).encode()
        return {TEMPLATE: self.source.encode(), CONFIG: self._config or config}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of a conversation. With add_generation_prompt, it ends where the assistant continues.

        messages: {"role": ..., "content": ...} and other fields that the template reads. Raises InputError for messages
        of another shape, and for messages that the template refuses, with the line of the template. For token ids use
        `encode`, because in the text the messages cannot be distinguished from the template.
        """
        return self._rendered(messages, tools, add_generation_prompt).text

    def render_with_answers(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> Rendered:
        """The text of a whole conversation, with the spans that the assistant wrote.

        These are the contents of {% generation %} blocks. In a template without such blocks, an answer is the text that
        its message adds to the previous conversation with add_generation_prompt, including the end-of-turn token.
        Raises InputError if the template writes an answer differently when another message follows.
        """
        return self._rendered(messages, tools, False, find_answers=not self.says_answers)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        values: Mapping[str, Any] | None = None,
        opening: str = "",
    ) -> list[int]:
        """Token ids of a conversation. Raises InputError as `render` does.

        values: further variables of the template, as in {"enable_thinking": False}; like messages they are data.
        opening: text to append, for example the beginning of the answer; it may contain special tokens.
        """
        rendered = self._rendered(messages, tools, add_generation_prompt, values=values)
        if opening:
            cuts = (*rendered.cuts, len(rendered.text))
            rendered = Rendered(rendered.text + opening, rendered.answers, cuts)
        [(ids, _)] = self.encode_rendered([rendered])
        return ids.tolist()

    def encode_rendered(self, conversations: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids of each conversation, uint32 [n], and a mask of the tokens that belong to answers, bool [n].

        No token crosses the border of an answer. This matches inference, where the prompt is encoded without the
        answer.
        """
        encodings = self._tokenizer.encode_batch(
            [conversation.text for conversation in conversations], add_special_tokens=False
        )
        found = []
        for conversation, encoding in zip(conversations, encodings, strict=True):
            ids, offsets = np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
            borders = {border for answer in conversation.answers for border in answer}
            if conversation.cuts or any(
                np.any((offsets[:, 0] < border) & (border < offsets[:, 1])) for border in borders
            ):
                ids, offsets = self._encode_apart(conversation.text, sorted(borders.union(conversation.cuts)))
            mask = np.zeros(len(ids), bool)
            for start, stop in conversation.answers:
                mask |= (start <= offsets[:, 0]) & (offsets[:, 0] < stop)
            found.append((ids, mask))
        return found

    def _encode_apart(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a text, uint32 [n], and the span of each in the text, int64 [n, 2]. No token crosses one of the
        `cuts`, which are positions in the text.
        """
        ids, offsets = [], []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            part, lead = self._spans(text[start:stop]), 0
            # Later parts are encoded after a line end, which is removed again, because sentencepiece-style tokenizers
            # put a space before a text.
            if start:
                follows = [(token, span) for token, span in self._spans("\n" + text[start:stop]) if span[1] > 1]
                if all(span[0] >= 1 for _, span in follows):  # otherwise a token includes the line end
                    part, lead = follows, 1
            ids += [token for token, _ in part]
            offsets += [(start + a - lead, start + b - lead) for _, (a, b) in part]
        return np.array(ids, np.uint32), np.array(offsets, np.int64).reshape(-1, 2)

    def _spans(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        find_answers: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> Rendered:
        check_messages(messages)
        if self._thinking:
            messages = [_with_thinking(message) for message in messages]
        everything = json.dumps([messages, tools, values, self.source], ensure_ascii=False, default=str)
        try:
            everything.encode()
        except UnicodeEncodeError:  # JSON can contain lone surrogates
            raise InputError("a message is not valid Unicode: remove the lone surrogate from it") from None
        free = [character for character in NONCHARACTERS if character not in everything][: len(Marks._fields)]
        if len(free) < len(Marks._fields):
            raise InputError(
                "the conversation contains all characters that Unicode reserves for internal use: remove them"
            )
        marks = Marks(*free)
        marked = self._marked(messages, marks.cut), self._marked(tools, marks.cut)
        text = self._run(*marked, add_generation_prompt, marks, self._marked(values or {}, marks.cut))
        if self._check is not None:
            self._check(text)
        if find_answers:
            text = self._mark_answers(text, *marked, marks)
        return self._read_marks(text, marks)

    def _marked(self, value: Any, cut: str) -> Any:
        """`value` with a cut inside the name of each special token, and at each end that could form such a name with
        the text next to it.
        """
        if isinstance(value, str):
            parts = range(1, max(self._lengths, default=1))
            before, after = (
                any(value[:n] in self._ends for n in parts),
                any(value[-n:] in self._beginnings for n in parts),
            )
            return cut * before + self._cut_inside(value, cut) + cut * after
        if isinstance(value, Mapping):
            return {self._cut_inside(key, cut): self._marked(each, cut) for key, each in value.items()}
        return [self._marked(each, cut) for each in value] if isinstance(value, list | tuple) else value

    def _cut_inside(self, text: str, cut: str) -> str:
        def at(found: re.Match) -> str:
            start = found.start()
            return found[0] + cut * any(text[start : start + n] in self._special for n in self._lengths)

        return self._first.sub(at, text)

    def _run(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        marks: Marks,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        return self._code.run(
            {
                **(values or {}),
                **self.tokens,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                "strftime_now": lambda form: self._now().strftime(form),
                MARKS: marks,
            }
        )

    def _mark_answers(self, whole: str, messages: list[Any], tools: list[Any] | None, marks: Marks) -> str:
        """`whole`, the text of all messages, with marks around the text that each answer adds."""
        pieces, done = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._run(messages[:i], tools, True, marks)
            after = self._run(messages[: i + 1], tools, False, marks) if i + 1 < len(messages) else whole
            if not (after.startswith(before) and whole.startswith(after)):
                raise InputError(
                    f"{self.name} does not show what the assistant wrote in messages[{i}], because it writes the"
                    " message differently after its generation prompt, or when others follow: put {% generation %} and"
                    " {% endgeneration %} around answers in the template"
                )
            answer = after[len(before) :].rstrip()
            ended = any(
                answer[-n:] in self._special for n in self._lengths
            )  # then text after the end of turn does not belong to the answer
            stop = len(before) + len(answer) if ended else len(after)
            pieces += [whole[done : len(before)], marks.start, whole[len(before) : stop], marks.stop]
            done = stop
        return "".join([*pieces, whole[done:]])

    def _read_marks(self, text: str, marks: Marks) -> Rendered:
        """A text without its marks, and the places that they marked."""
        clean, position, cuts, answers, open_at = [], 0, set(), [], []
        for piece in re.split(f"([{''.join(marks)}])", text):
            if piece == marks.cut:
                cuts.add(position)
            elif piece == marks.start:
                open_at.append(position)
            elif piece == marks.stop and open_at:
                start = open_at.pop()
                answers += [(start, position)] if not open_at and start < position else []
            else:
                clean.append(piece)
                position += len(piece)
        return Rendered("".join(clean), tuple(answers), tuple(sorted(cuts - {0, position})))


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"thinking" if key == "reasoning_content" else key: value for key, value in message.items()}


def check_messages(messages: Any) -> None:
    """Raises InputError unless `messages` is a list of objects with a role, and with text, a list of parts or None as
    content.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(f"messages must be a list of at least one message, got {_shown(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}] must be an object with a role and content, got {_shown(message)}")
        if not isinstance(message.get("content"), str | list | None):
            raise InputError(f"messages[{i}].content must be text, got {_shown(message['content'])}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:80] + "..."
