"""The engine process of `infer serve`: loads the model once, then checks prompts and generates answers, as many at a
time as the engine allows.

Messages on the pipe are tuples that begin with their kind. In: ("check", n, question), ("drop", n) to end a check,
("generate", n, order), ("cancel", n) to end it, ("ping", n). Out: ("ready", facts), ("failed", message), ("crashed",
message) for a bug; ("checked", n, Encoded) or ("refused", n, message, code); ("token", n, Token) for each token as it
is drawn, then ("end", n, End) or ("error", n, message); ("pong", n). Checks are answered in any order.

The types of the messages must not need JAX, because the web process imports them.
"""

import hashlib
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from laneformer.errors import ConfigError, InputError, LaneformerError, one_line, say_errors_once
from laneformer.infer.engine.options import JobEngineOptions
from laneformer.infer.serve.body import NESTED
from laneformer.infer.serve.processes.encoders import Encoder, EncoderError, Encoders, Encoding, Folder, Local, TooLong
from laneformer.infer.serve.processes.log import LOG
from laneformer.infer.serve.processes.pauses import shorten_pauses
from laneformer.infer.serve.processes.questions import Questions, size_of
from laneformer.infer.serve.processes.scarcity import is_scarcity, scarce
from laneformer.infer.serve.prompts import prompt_of
from laneformer.infer.text.channels import Part
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.tool_calls import Read, ToolCall, ToolRequest

if TYPE_CHECKING:
    from laneformer.infer.engine.engine import Engine
    from laneformer.infer.engine.generation import Generation, Result
    from laneformer.infer.text.chat_template import ChatTemplate

log = logging.getLogger("laneformer")

WARM_PROMPT, WARM_ANSWER = 16, 16
CHECKS = 3  # prompts that are checked at a time; one of them is short
FAILED = 70  # exit code of a process one of whose threads failed
END_SECONDS = 10.0  # time limit for the processes of a job to end together
LOWEST = -9999.0  # JSON has no minus infinity


class NoChat(InputError):
    """A chat without a chat template."""


class ServedModel(NamedTuple):
    """The model that the process loads."""

    engine: JobEngineOptions
    chat_template: Path | None
    """File of the template to use instead of the checkpoint's; None for the checkpoint's."""
    options: dict[str, Any]
    """Further options of the backend."""


class Question(NamedTuple):
    """A prompt to encode, and parts of the request that only the engine can check."""

    prompt: str | list[int] | list[dict]
    chat: bool
    tools: ToolRequest | None
    sampling: dict[str, Any]
    stop_token_ids: tuple[int, ...]
    stop_strings: bool
    """Whether the request has stop strings."""
    template_values: dict[str, Any]
    """Variables of the chat template besides the messages."""
    prediction: str = ""
    """A text to draft from."""
    grammar: Grammar | None = None
    """Grammar of the answer's content."""
    token_healing: bool = False
    client: str = ""
    """Who sent the request."""

    @property
    def size(self) -> int:
        """Characters and items of what must be read."""
        tools = None if self.tools is None else self.tools.tools
        return size_of([self.prompt, self.template_values, self.prediction, tools])


class Encoded(NamedTuple):
    """The token ids of a question, and the constraints on the answer."""

    prompt: Sequence[int]
    """An array of int32, which takes a tenth of a list's time on the pipe."""
    prediction: list[int]
    tools: ToolRequest | None = None
    grammar: Grammar | None = None
    notes: tuple[str, ...] = ()
    """Warnings for the client."""


class Order(NamedTuple):
    """A generation to run: the arguments of Engine.generate."""

    ids: Sequence[int]
    max_new_tokens: int | None
    sampling: dict[str, Any]
    stop_token_ids: tuple[int, ...]
    """Stop tokens besides the model's."""
    ignore_eos: bool
    stop_strings: tuple[str, ...]
    logprobs: int | None
    """Number of most likely tokens to report at each position; None for no log-probabilities."""
    tokens_per_dispatch: int | None
    chat: bool
    """Whether the answer may have channels."""
    tools: ToolRequest | None
    """Functions that the answer may call."""
    cache_prompt: bool
    cache_salt: str
    cache_key: str
    prediction: list[int]
    """Tokens to draft from besides the prompt."""
    draft_max: int | None
    grammar: Grammar | None = None
    """Grammar of the answer's content."""
    token_healing: bool = False


class Named(NamedTuple):
    """The text of a token in UTF-8, possibly only part of a character, and its log-probability."""

    text: bytes
    logprob: float


class Token(NamedTuple):
    """A generated token."""

    id: int
    text: str
    """Text that became printable with this token."""
    time: float
    """Seconds since the engine started the order."""
    named: Named | None
    top: tuple[tuple[bytes, float], ...]
    """The fields of `Named` for the most likely tokens: plain tuples, which garbage collection stops visiting. With
    20 instances for each of 6,000 tokens it stopped the web process for 0.1 s.
    """
    part: Part
    calls: tuple[ToolCall, ...] = ()
    """Function calls that this token completed."""
    drafted: bool = False
    """Whether the token was a correct draft."""
    others: int = 0
    """Number of other requests with rows in the pass that drew the token."""


class Drafting(NamedTuple):
    """Counts of passes and drafts of an answer; see custom_calls.Drafting, which this copies because it needs NumPy."""

    passes: int
    tokens_per_pass: float
    drafts: int
    drafted: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]
    predicted: int
    predicted_accepted: int


class End(NamedTuple):
    """The end of a generation; see infer.Result."""

    reason: str
    stop_reason: int | str | None
    tail: str
    """Content that was still held back after the last token."""
    calls: tuple[ToolCall, ...]
    """Calls that the end of the answer completed."""
    tokens: int
    """Number of tokens of the answer."""
    cached: int
    """Number of prompt tokens that were not computed."""
    shared_passes: int
    """Number of passes that also had rows of other requests."""
    time_to_first_token: float | None
    prefill_time: float | None
    time_per_token: float | None
    total_time: float
    drafting: Drafting | None
    """Counts of passes and drafts; None if the engine makes no drafts."""


def main(connection: Connection, model: ServedModel) -> None:
    """Runs the engine process until the other end of the pipe is closed."""
    began = time.perf_counter()
    try:
        engine = _open(model)
        with engine.leading():
            _serve(connection, engine, model, began)
    except (LaneformerError, OSError) as error:
        connection.send(("failed", str(error)))
    except BaseException as error:  # a bug, a panic of a library in Rust, or too little memory
        line = f"{type(error).__name__}: {one_line(error)}"
        if is_scarcity(error):
            connection.send(("failed", scarce(line)))
            return
        traceback.print_exc()  # which the server shows, unless libraries have printed that they lack memory
        connection.send(("crashed", f"the engine cannot be loaded ({line}): read its output above"))


def follow(model: ServedModel) -> None:
    """Runs another process of a job. Its engine runs the same generations as that of the first process. Raises
    GroupError if the first process is lost.
    """
    _open(model).follow()


def _open(model: ServedModel) -> "Engine":
    from laneformer.infer.engine.job import open_engine, show_log, take_devices

    show_log()
    logging.getLogger("laneformer").handlers = [LOG]
    say_errors_once()
    take_devices(model.engine)
    return open_engine(model.engine, **model.options)


def _report(what: str) -> None:
    """Writes the traceback of the current exception to the log, which may be on a full disk."""
    log.error("%s", what, exc_info=True)


def _serve(connection: Connection, engine: "Engine", model: ServedModel, began: float) -> None:
    """Warms the engine up and answers messages. Raises LaneformerError if the tokenizer or the chat template of the
    options cannot be used.
    """
    from laneformer.checkpoint import checkpoint_files
    from laneformer.infer.engine.backend import on_host
    from laneformer.infer.engine.defaults import GENERATION, named, recommended
    from laneformer.infer.engine.sources import is_recipe
    from laneformer.infer.text.chat_template import ChatTemplate
    from laneformer.infer.text.template_code import Elsewhere

    checkpoint = model.engine.checkpoint
    folder = None if is_recipe(checkpoint) else checkpoint_files(checkpoint)
    no_chat: str | None = f"model {engine.name} has no tokenizer"
    chat = encode = encoders = None
    tokenizer, context = engine.tokenizer, engine.config.max_position_embeddings
    eos = tuple(engine.config.eos_token_id)
    if tokenizer is not None and folder is not None:
        begin = tokenizer.before[0] if tokenizer.before else None
        encoders = Encoders()
        encoders.read(Folder(folder, begin, model.chat_template, eos, context))
    elif model.chat_template is not None:
        raise InputError(no_chat)
    sampling = recommended(checkpoint)
    if sampling:
        log.info("sampling by default: %s (%s)", named(sampling), GENERATION)
    engine.warmup(min(WARM_PROMPT, context - 1), WARM_ANSWER)
    if encoders is not None and folder is not None:
        read = encoders.facts()
        no_chat, eos = read.no_chat, read.ends or eos
        if no_chat is None:  # completions work without a template
            chat = ChatTemplate.load(folder, model.chat_template, code=Elsewhere(read.names))
        encode = partial(Encoder, encoders)
    conditions = {**engine.conditions, "random_weights": folder is None, "on_cpu": engine.backend == "cpu" or on_host()}
    alone, drafts = not model.engine.distributed, bool(conditions.get("speculation"))
    worker = _Worker(connection, engine, chat, no_chat, alone, drafts, ends=eos, encode=encode)
    worker.start()
    facts = {
        "name": engine.name,
        "conditions": conditions,
        "parallel": engine.parallel,
        "recommended_sampling": sampling,
        "chat": chat is not None,
        "tool_format": None if chat is None or chat.tool_format is None else chat.tool_format.name,
        "template_variables": [] if chat is None else sorted(chat.variables - chat.tokens.keys()),
        "fingerprint": (
            "fp_" + hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()[:10]
        ),
        "seconds": time.perf_counter() - began,
    }
    shorten_pauses()
    connection.send(("ready", facts))
    worker.run()


class _Worker:
    """Receives messages on one thread, checks prompts on others, and generates on the main thread and on further ones.
    A cancellation therefore takes effect while the others are busy. A thread that fails ends the process, because the
    server would wait for it.
    """

    def __init__(
        self,
        connection: Connection,
        engine: "Engine",
        chat: "ChatTemplate | None",
        no_chat: str | None,
        alone: bool = True,
        drafts: bool = False,
        ends: tuple[int, ...] = (),
        encode: Callable[[], Encoding] | None = None,
    ):
        """no_chat: the reason why there is no chat template. alone: whether the job has no other processes. drafts:
        whether the engine makes drafts. ends: ids that end an answer. encode: makes an encoder for a thread; by default
        one without limits, in this process.
        """
        self._connection, self._engine = connection, engine
        self._chat, self._no_chat = chat, no_chat
        self._drafts = drafts
        self._alone, self._ends = alone, ends
        context = engine.config.max_position_embeddings
        self._encode = encode or (lambda: Local(engine.tokenizer, chat, context, None))
        self._sending, self._state = threading.Lock(), threading.Lock()
        self._orders: queue.SimpleQueue[tuple[int, Order] | None] = queue.SimpleQueue()
        self._questions: Questions[Question] = Questions()
        self._running: dict[int, Generation] = {}
        self._cancelled: set[int] = set()  # numbers of cancelled orders that are not running yet
        self._ending = False

    def start(self) -> None:
        """Starts all threads but the main one's work. Raises RuntimeError if the system allows no more threads."""
        encoders = [self._encode() for _ in range(CHECKS)]  # here, because a failure must end the process
        small, *others = [partial(self._check_all, encoder) for encoder in encoders]
        checks = [partial(small, small=True), *others]
        more = [self._generate_all] * (self._engine.parallel - 1)
        for work in (self._receive, *checks, *more):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def run(self) -> None:
        """Generates answers on this thread until the process ends."""
        self._generate_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            _report(f"the engine process ends: {type(error).__name__} on one of its threads")
            os._exit(FAILED)

    def _generate_all(self) -> None:
        from laneformer.processes import GroupError

        while (ordered := self._orders.get()) is not None:
            number, order = ordered
            try:
                self._generate(number, order)
            except GroupError as error:
                self._send("error", number, str(error))
                raise
            except LaneformerError as error:
                self._send("error", number, str(error))
            except MemoryError:
                self._send("error", number, "the engine ran out of memory")
            except BaseException as error:  # a bug or a panic of a library: only this answer fails, not the process
                _report(f"an answer failed: {type(error).__name__}")
                self._send("error", number, "the engine failed: read the server's log")
            finally:
                with self._state:
                    self._running.pop(number, None)
                    self._cancelled.discard(number)

    def _receive(self) -> None:
        try:
            while True:
                kind, number, *rest = self._connection.recv()
                if kind == "check":
                    [question] = rest
                    self._questions.put(number, question.client, question.size, question)
                elif kind == "drop":
                    self._questions.drop(number)
                elif kind == "generate":
                    self._orders.put((number, *rest))
                elif kind == "cancel":
                    self._cancel(number)
                else:
                    self._send("pong", number)
        except (EOFError, OSError):  # the server is gone
            sys.stderr.flush()
            if self._alone:
                os._exit(0)
            self._orders.put(None)  # ends `run`, after which the other processes are released if they still respond
            end = threading.Timer(END_SECONDS, os._exit, (1,))
            end.daemon = True
            end.start()
            with self._state:
                self._ending, running = True, list(self._running.values())
            for generation in running:
                generation.cancel()

    def _cancel(self, number: int) -> None:
        with self._state:
            running = self._running.get(number)
            if running is None:  # it is not running yet, or has ended
                self._cancelled.add(number)
        if running is not None:
            running.cancel()

    def _check_all(self, encoder: Encoding, small: bool = False) -> None:
        """Answers questions; only short ones if `small`, so that they never wait for long ones."""
        while True:
            number, question = self._questions.take(small, getattr(encoder, "stop", None))
            message: tuple[Any, ...]
            try:
                message = ("checked", number, self._checked(question, encoder))
            except (NoChat, TooLong) as error:
                code = "no_chat_template" if isinstance(error, NoChat) else "context_length_exceeded"
                message = ("refused", number, str(error), code)
            except LaneformerError as error:
                message = ("refused", number, str(error), None)
            except RecursionError:
                message = ("refused", number, NESTED, None)
            except EncoderError as error:
                log.error("a prompt cannot be encoded: %s", error)
                message = ("refused", number, f"the prompt cannot be encoded ({error})", "engine_error")
            except OSError:  # there are no more encoders
                raise
            except BaseException as error:
                _report(f"a prompt failed: {type(error).__name__}")
                message = ("refused", number, "the engine failed to read the prompt: read the server's log",
                           "engine_error")  # fmt: skip
            if self._questions.done(number):
                self._send(*message)
            elif isinstance(encoder, Encoder):
                encoder.renew()

    def _checked(self, question: Question, encoder: Encoding) -> Encoded:
        """Checks a question. Raises LaneformerError; a message that concerns another parameter than the prompt must
        begin with its name; see `EngineProcess.submit`.
        """
        from laneformer.infer.sampling import Sampling

        engine, tools, grammar = self._engine, None, question.grammar
        notes: tuple[str, ...] = ()
        prompt = cast("str | list[int]", question.prompt)  # in a chat, messages
        engine.check_sampling(Sampling(**question.sampling))
        if question.stop_strings and engine.tokenizer is None:
            raise InputError("stop has strings, which need a tokenizer, but the model has none: give stop_token_ids")
        vocabulary, context = engine.config.vocab_size, engine.config.max_position_embeddings
        for token in question.stop_token_ids:
            if not 0 <= token < vocabulary:
                raise ConfigError(f"stop_token_ids = {token}: give ids from 0 to {vocabulary - 1}")
        if question.chat:
            if self._chat is None:
                raise NoChat(f"this model cannot chat: {self._no_chat}")

            messages = cast("list[dict[str, Any]]", question.prompt)

            def encoded(tools: ToolRequest | None) -> list[int]:
                return encoder.chat(messages, tools, question.template_values)

            prompt, tools, grammar, notes = prompt_of(engine, self._chat, encoded, question.tools, grammar)
        else:
            if question.token_healing:
                engine.check_healing(grammar)
            if grammar is not None:
                engine.check_constraint(grammar)
            if isinstance(prompt, str) and engine.tokenizer is not None:
                prompt = encoder.text(prompt)
        if not isinstance(prompt, str) and len(prompt) >= context:
            raise TooLong.of(len(prompt), context)
        # Checked as Python integers, because they may not fit an array of int64.
        if prompt and not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise InputError(f"token ids must be from 0 to {vocabulary - 1}")
        predicts = question.prediction and self._drafts and engine.tokenizer is not None
        predicted = engine.encode_prediction(encoder.prediction(question.prediction)).tolist() if predicts else []
        return Encoded(array("i", engine.encode(prompt).astype("int32").tobytes()), predicted, tools, grammar, notes)

    def _generate(self, number: int, order: Order) -> None:
        from laneformer.infer.sampling import Sampling

        engine, chat = self._engine, self._chat if order.chat else None
        ids = order.ids if chat is None else [*order.ids]
        reader = None if chat is None or order.tools is None else chat.reader(ids, order.tools)
        generation = engine.generate(
            ids,
            max_new_tokens=order.max_new_tokens,
            sampling=Sampling(**order.sampling),
            stop_tokens=(*order.stop_token_ids, *(() if order.ignore_eos else self._ends)),
            stop_strings=order.stop_strings,
            tokens_per_dispatch=order.tokens_per_dispatch,
            top_logprobs=order.logprobs or 0,
            channels=None if chat is None else chat.channels(ids, calls=reader is not None),
            spelled=() if chat is None or reader is None else chat.reader_tokens,
            cache_prompt=order.cache_prompt,
            cache_salt=order.cache_salt,
            cache_key=order.cache_key,
            prediction=order.prediction,
            draft_max=order.draft_max,
            constraint=order.grammar,
            token_healing=order.token_healing,
        )
        with self._state:
            self._running[number] = generation
            cancelled = self._ending or number in self._cancelled
        if cancelled:
            generation.cancel()
        sent, called = 0, 0
        for token in generation:
            sent += len(token.text) if token.part is Part.CONTENT else 0
            read = (
                Read(token.text, (), token.part) if reader is None else reader.add(int(token), token.text, token.part)
            )
            called += len(read.calls)
            named = None if order.logprobs is None else self._named(token, token.logprob)
            origin = token.drafted, token.others
            made = Token(
                int(token), read.text, token.time, named, self._top(token.top_logprobs), read.part, read.calls, *origin
            )
            self._send("token", number, made)
            token.top_logprobs = ()  # released one by one: those of a long answer would take 0.1 s together
            if reader is not None and reader.finished:
                generation.cancel()
        r = generation.result
        last = Read(r.text[sent:]) if reader is None else reader.end(r.text[sent:])
        called += len(last.calls)
        whole = reader is not None and reader.finished  # cancelled above, because its only call was complete
        self._send(
            "end",
            number,
            End(
                "tool_calls" if called and (whole or r.finish_reason == "stop") else r.finish_reason,
                r.stop_reason,
                last.text,
                last.calls,
                len(r.tokens),
                r.cached_tokens,
                r.shared_passes,
                r.time_to_first_token,
                r.prefill_time,
                r.time_per_token,
                r.total_time,
                self._drafting(r),
            ),
        )

    def _drafting(self, result: "Result") -> Drafting | None:
        found = result.drafting if self._drafts else None
        return found and Drafting(*(getattr(found, name) for name in Drafting._fields))

    def _top(self, ranked: Sequence[tuple[int, float]]) -> tuple[tuple[bytes, float], ...]:
        return tuple((*self._named(*each),) for each in ranked)

    def _named(self, token: int, logprob: float) -> Named:
        tokenizer, unknown = self._engine.tokenizer, f"token_id:{int(token)}".encode()
        text = b"" if tokenizer is None else tokenizer.token_bytes(token) or tokenizer.special_names.get(int(token))
        return Named(text or unknown, max(logprob, LOWEST))

    def _send(self, *message: Any) -> None:
        with self._sending, suppress(OSError):  # if the pipe is closed, the receiving thread ends the process
            self._connection.send(message)
