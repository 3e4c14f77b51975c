"""Processes that turn prompts into token ids. Chat templates and tokenizers come from strangers, prompts from clients:
a template may loop without end or make a text of any size, and a library may end its process. Here that costs one
request, within limits of time and memory, and neither the engine nor other requests wait.

The engine's process starts a process that imports the libraries and reads the folder once. It forks an encoder for each
thread that asks, in about 2 ms, also in place of one that was ended.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from laneformer.errors import CheckpointError, InputError, LaneformerError, one_line
from laneformer.infer.serve.body import NESTED
from laneformer.infer.text.tool_calls import ToolRequest

if TYPE_CHECKING:
    from laneformer.infer.text.chat_template import ChatTemplate
    from laneformer.infer.text.tokenizer import Tokenizer

CPU_SECONDS = 5.0  # processor time for one prompt
WALL_SECONDS = 30.0  # time for one prompt; longer, because other processes may need the processor
LOAD_SECONDS = 60.0  # processor time for reading a folder
MEMORY = 1 << 30  # bytes that an encoder may add to those of the process that forked it
MOST_TEXT = 1 << 24  # bytes of a prompt's text
LONGEST_ERROR = 2000  # characters
NICE = 5  # below the priority of the engine and the web process
LIMITS = f"within {CPU_SECONDS:g} s of processor time and {MEMORY >> 30} GiB of memory"
TRIAL = "Hello, world 123!\n\tdef f(x):  # 北京 😀"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
START = (
    "import sys; sys.path[:] = {path!r}; from laneformer.infer.serve.processes.encoders import main; main({descriptor})"
)


class TooLong(InputError):
    """A prompt that does not fit the context."""

    @classmethod
    def of(cls, tokens: int | str, context: int) -> Self:
        """tokens: number of tokens of the prompt."""
        return cls(
            f"the prompt has {tokens} tokens and the context {context}: shorten the prompt to leave room for an answer"
        )


class EncoderError(Exception):
    """A failure of the tokenizer's library, or of ours."""


class Encoding(Protocol):
    """Turns prompts into token ids. All methods raise LaneformerError, and EncoderError."""

    def text(self, text: str) -> list[int]:
        """The ids of a prompt."""

    def prediction(self, text: str) -> list[int]:
        """The ids of a text to draft from, without the begin-of-text token, cut to the length of the context."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: ToolRequest | None, values: Mapping[str, Any]
    ) -> list[int]:
        """The ids of a conversation. values: further variables of the template."""


class Local:
    """An `Encoding` in this process, without limits on time and memory."""

    def __init__(
        self, tokenizer: "Tokenizer | None", chat: "ChatTemplate | None", context: int, most_bytes: int | None
    ):
        """most_bytes: see infer/text/token_bounds.py."""
        self._given, self._chat, self._context, self._most = tokenizer, chat, context, most_bytes

    @property
    def _tokenizer(self) -> "Tokenizer":
        if self._given is None:
            raise InputError("this model has no tokenizer: give token ids")
        return self._given

    def check(self, text: str) -> None:
        """Raises InputError for a text that is too long to be encoded."""
        size = len(text.encode(errors="surrogatepass"))
        if self._most is not None and size >= self._context * self._most:
            raise TooLong.of(f"at least {size // self._most}", self._context)
        if size > MOST_TEXT:
            raise InputError(f"the prompt has {size:,} bytes of text, more than {MOST_TEXT:,}: shorten it")

    def text(self, text: str) -> list[int]:
        self.check(text)
        return self._fitting(self._tokenizer.encode(text))

    def prediction(self, text: str) -> list[int]:
        most = MOST_TEXT // 4 if self._most is None else self._context * self._most
        return self._tokenizer.encode_continuation(text[:most])[: self._context]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: ToolRequest | None, values: Mapping[str, Any]
    ) -> list[int]:
        from laneformer.infer.text.conversation import encode

        if self._chat is None:
            raise InputError("the model has no chat template: ask for a completion")
        return self._fitting(encode(self._chat, messages, tools, values))

    def _fitting(self, ids: list[int]) -> list[int]:
        if len(ids) >= self._context:
            raise TooLong.of(len(ids), self._context)
        return ids


# ---- the engine's side


class Folder(NamedTuple):
    """What encoders read."""

    tokenizer: Path
    """Folder with the tokenizer."""
    begin: int | None
    """Token before every text, if the tokenizer does not decide it."""
    template: Path | None
    """File of the chat template to use instead of the folder's."""
    eos: tuple[int, ...]
    """The model's ends of text."""
    context: int


class Facts(NamedTuple):
    """What is known of a folder's chat template once it was read."""

    no_chat: str | None
    """Why there is no template; None if there is one."""
    names: frozenset[str] = frozenset()
    """Names that the template reads."""
    ends: tuple[int, ...] = ()
    """Ids that end an answer in a chat."""


class Encoders:
    """The process that forks encoders."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        with theirs:
            command = START.format(path=sys.path, descriptor=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
            )
        self._control, self._using = Connection(ours.detach()), threading.Lock()
        self._folder: Folder | None = None

    def read(self, folder: Folder) -> None:
        """Begins to read the folder."""
        with suppress(OSError):  # `facts` reports that the process has ended
            self._control.send(folder)
        self._folder = folder

    def facts(self) -> Facts:
        """Waits until the folder is read. Raises LaneformerError if the tokenizer or the template of the options cannot
        be used.
        """
        try:
            facts = self._control.recv()
        except (EOFError, OSError):
            self.close()
            files = "the tokenizer" if self._folder is None else self._folder.tokenizer
            raise CheckpointError(
                f"the process that reads {files} ended: its memory is too small, or its tokenizer.json is damaged"
            ) from None
        if isinstance(facts, LaneformerError):
            self.close()
            raise facts
        return facts

    def fork(self, end: int) -> int:
        """Starts an encoder and returns its process id. end: descriptor of its end of a pipe."""
        with self._using:
            self._control.send(("fork", 0))
            reduction.send_handle(self._control, end, self._process.pid)
            return self._control.recv()

    def close(self) -> None:
        """Ends the process. Its encoders end with their pipes."""
        self._control.close()
        self._process.wait()

    def kill(self, number: int) -> None:
        """Ends an encoder that may have ended already. number: its process id."""
        with self._using, suppress(OSError):
            self._control.send(("kill", number))


class Encoder:
    """An `Encoding` in another process, with limits. One thread at a time may use it; any may call `stop`."""

    def __init__(self, encoders: Encoders):
        self._encoders = encoders
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._number = self._encoders.fork(theirs.fileno())
        self._pipe = Connection(ours.detach())

    def stop(self) -> None:
        """Ends the work on a prompt, which then raises InputError. The encoder may end later than that: `renew` it."""
        self._encoders.kill(self._number)

    def close(self) -> None:
        """Ends the process."""
        self.stop()
        self._pipe.close()

    def renew(self) -> None:
        """Replaces the process."""
        self.close()
        self._start()

    def text(self, text: str) -> list[int]:
        return self._ask("text", text)

    def prediction(self, text: str) -> list[int]:
        return self._ask("prediction", text)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: ToolRequest | None, values: Mapping[str, Any]
    ) -> list[int]:
        return self._ask("chat", messages, tools, values)

    def _ask(self, kind: str, *values: Any) -> list[int]:
        answer: Any = None
        with suppress(EOFError, OSError):
            self._pipe.send((kind, values))
            if self._pipe.poll(WALL_SECONDS):
                answer = self._pipe.recv()
        if isinstance(answer, list):
            return answer
        if not isinstance(answer, LaneformerError):  # the process has ended, or is about to
            self.renew()
        raise answer or InputError(f"the prompt cannot be read {LIMITS}: shorten it, or use another chat template")


# ---- the encoders' side


def main(descriptor: int) -> None:
    """Reads a folder and forks encoders. descriptor: one end of a socket pair."""
    # Ends like its parent: not by a signal to a group of processes, but when the pipe is closed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    import laneformer.infer.text.chat_template
    import laneformer.infer.text.conversation
    import laneformer.infer.text.tokenizer  # noqa: F401  before the fork

    control = Connection(descriptor)
    with suppress(EOFError, OSError):
        folder: Folder = control.recv()
        try:
            encoding, facts = _read(folder)
        except LaneformerError as error:
            control.send(error)
            return
        control.send(facts)
        _fork_all(control, encoding)


def _read(folder: Folder) -> tuple[Local, Facts]:
    """Reads tokenizer and template. Tries each in another process first. Raises LaneformerError."""
    from laneformer.infer.text.chat_template import ChatTemplate
    from laneformer.infer.text.token_bounds import most_bytes
    from laneformer.infer.text.tokenizer import Tokenizer
    from laneformer.infer.text.tokenizer_files import find_vocabulary

    def tokenizer() -> Tokenizer:
        if (file := find_vocabulary(folder.tokenizer)) is None:
            raise CheckpointError(f"{folder.tokenizer} has no tokenizer.json: copy it again")
        return Tokenizer(file, folder.begin)

    def template(check: Callable[[str], None] | None = None) -> ChatTemplate:
        return ChatTemplate.load(folder.tokenizer, folder.template, check=check)

    def tried() -> Facts:
        chat = template(Local(made, None, folder.context, None).check)
        return Facts(None, frozenset(chat.variables), chat.ends(folder.eos))

    _try(lambda: (tokenizer().encode(TRIAL), None)[1], "the tokenizer.json", LOAD_SECONDS)
    made = tokenizer()
    made.encode_continuation("")  # makes a tokenizer for texts that follow others, before the forks
    most = most_bytes(made.library)
    try:
        facts = _try(tried, "the chat template", CPU_SECONDS)
    except LaneformerError as error:
        if folder.template is not None:
            raise
        return Local(made, None, folder.context, most), Facts(str(error))
    local = Local(made, None, folder.context, most)
    return Local(made, template(local.check), folder.context, most), facts


def _try(act: Callable[[], Any], what: str, seconds: float) -> Any:
    """The result of `act` in a process with limits. Raises LaneformerError, also if the process ends."""
    reader, writer = socket.socketpair()
    number = os.fork()
    if number == 0:
        reader.close()
        _limit(seconds)
        pipe = Connection(writer.detach())
        with suppress(BaseException):
            pipe.send(_tried(act))
        os._exit(0)
    writer.close()
    with Connection(reader.detach()) as pipe:
        try:
            found = pipe.recv()
        except (EOFError, OSError):
            found = CheckpointError(
                f"{what} cannot be used {LIMITS}, or ends its process: use another one"
                if seconds == CPU_SECONDS
                else f"{what} cannot be read within {seconds:g} s of processor time, or ends its process: copy it again"
            )
    os.waitpid(number, 0)
    if isinstance(found, EncoderError):
        raise CheckpointError(f"{what} cannot be used ({found}): copy it again")
    if isinstance(found, LaneformerError):
        raise found
    return found


def _tried(act: Callable[[], Any]) -> Any:
    """The result of `act`, or its error as a LaneformerError or EncoderError."""
    try:
        return act()
    except LaneformerError as error:
        return (TooLong if isinstance(error, TooLong) else InputError)(str(error)[:LONGEST_ERROR])
    except RecursionError:
        return InputError(NESTED)
    except MemoryError:
        return EncoderError(f"it needs more than {MEMORY >> 30} GiB of memory")
    except BaseException as error:  # a panic in Rust is none of Exception
        return EncoderError(f"{type(error).__name__}: {one_line(error)}")


def _limit(seconds: float) -> None:
    """Limits this process. seconds: processor time until the kernel ends it, also inside of a library."""
    os.nice(NICE)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)  # a library's lines for each bad prompt would fill the log
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _arm(seconds)


def _arm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _fork_all(control: Connection, encoding: Local) -> None:
    """Forks and kills encoders until the engine's process closes the pipe."""
    alive: set[int] = set()
    while True:
        kind, number = control.recv()
        if kind == "fork":
            end = reduction.recv_handle(control)
            number = os.fork()
            if number == 0:
                control.close()
                with suppress(BaseException):
                    _encode_all(Connection(end), encoding)
                os._exit(0)
            os.close(end)
            alive.add(number)
            control.send(number)
        elif number in alive:  # not waited for, so that its number is still its own
            os.kill(number, signal.SIGKILL)
        while alive and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            alive.discard(ended)


def _encode_all(pipe: Connection, encoding: Local) -> None:
    """Encodes prompts until the pipe is closed, or a prompt fails in a way that may have damaged this process."""
    _limit(0)
    answer: Any = []
    while not isinstance(answer, EncoderError):
        kind, values = pipe.recv()
        _arm(CPU_SECONDS)
        answer = _tried(partial(getattr(encoding, kind), *values))
        _arm(0)
        pipe.send(answer)
