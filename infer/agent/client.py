"""The agent's model: on any server with OpenAI's API, or on `infer serve` in a child process."""

import os
import re
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from laneformer.errors import ConfigError, InputError

Mode = Literal["chat", "completion"]
SERVER_KEY = "LANEFORMER_API_KEY"
PATIENCE_SECONDS = 10.0  # time for our server to end before it is killed


@dataclass(frozen=True)
class Reply:
    """An answer, with its times in seconds, measured by the client. Counts are None if the server does not report
    them.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    cached: int | None
    """Number of prompt tokens that the server did not compute."""
    tokens: int | None
    """Number of generated tokens."""
    first: float
    """Time from sending the request to the first text, without the time in the server's queue if that is reported."""
    decode: float
    """Time from the first text to the last."""
    queue: float
    """Time in the server's queue; 0 if the server does not report it."""
    server: dict[str, Any] | None
    """Measurements of the server, in vLLM's field `metrics`; None if it reports none."""
    calls: tuple[tuple[str, str, str], ...] = ()
    """Id, name and arguments of each tool call."""
    reasoning: str = ""

    @property
    def drafting(self) -> dict[str, Any] | None:
        """Counts of passes and correct drafts, as our server reports them; None without drafts."""
        return (self.server or {}).get("speculative_decoding")


class Model:
    """A model on a server."""

    def __init__(self, base_url: str, key: str, name: str, mode: Literal["auto", "chat", "completion"], timeout: float):
        """name: name of the model; "" for the server's only model. mode: auto is chat, unless the server reports that
        the model has no chat template. timeout: seconds for a request.

        Raises ConfigError or InputError without the client library, and for an unknown server or model.
        """
        try:
            import openai
        except ImportError:
            raise ConfigError("the agent needs OpenAI's client library: pip install 'laneformer[agent]'") from None
        self._openai, self.base_url = openai, base_url
        try:
            with self._translated_errors():
                self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout)
                known = {model.id: model for model in self._client.models.list()}
        except openai.NotFoundError:  # a server may not list its models
            known = {}
        except (AttributeError, TypeError):  # the page is not a list of models
            raise InputError(
                f"--base-url {base_url} does not speak OpenAI's protocol: give its base URL, which often ends in /v1"
            ) from None
        if not name and len(known) != 1:
            raise ConfigError(f"{base_url} has {', '.join(known) or 'no list of models'}: name one with --model")
        self.name = name or next(iter(known))
        if known and self.name not in known:
            raise ConfigError(f"unknown --model {self.name}: {base_url} has {', '.join(known)}")
        described = known[self.name].model_extra or {} if known else {}
        self.conditions: dict[str, Any] | None = described.get("conditions")
        """Conditions of the engine, as our server reports them; None for other servers."""
        self.tool_form: str | None = described.get("tools")
        """Name of the chat template's tool format, as our server reports it; None without one, and for other
        servers.
        """
        context = described.get("max_model_len")
        self.context: int | None = context if isinstance(context, int) else None
        """Limit on the tokens of prompt and answer together, as our server and vLLM report it; None if unknown."""
        self.mode: Mode = mode if mode != "auto" else "completion" if described.get("chat") is False else "chat"

    def ask(
        self,
        prompt: str | Sequence[dict[str, str]],
        stop: Sequence[str],
        progress: Callable[[int], None],
        **options: Any,
    ) -> Reply:
        """Streams an answer.

        prompt: text in completion mode, messages in chat mode. stop: stop strings. progress: called with the number of
        characters so far. options: max_tokens, temperature and so on. Raises InputError if the server refuses the
        request or fails.
        """
        fields = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **options}
        if stop:
            fields["stop"] = list(stop)
        began = time.perf_counter()
        first = last = None
        calls: dict[int, list[str]] = {}
        pieces, thoughts, reason, usage, server = [], [], None, None, None
        create: Callable[..., Any] = (  # its types do not know a stream of either kind
            partial(self._client.chat.completions.create, messages=list(prompt))
            if self.mode == "chat"
            else partial(self._client.completions.create, prompt=prompt)
        )
        try:
            with self._translated_errors(), create(**fields) as stream:
                for chunk in stream:
                    usage, server = chunk.usage or usage, (chunk.model_extra or {}).get("metrics") or server
                    for choice in chunk.choices[:1]:
                        reason = choice.finish_reason or reason
                        text, thought = _texts(choice)
                        called = _add_calls(calls, choice)
                        thoughts.append(thought)
                        if text or thought or called:
                            last = time.perf_counter()
                            first = first or last
                        if text:
                            pieces.append(text)
                            progress(sum(map(len, pieces)))
        except self._openai.NotFoundError as error:
            raise InputError(f"--model {self.name} at {self.base_url}: {_message(error)}") from None
        first, last = first or time.perf_counter(), last or time.perf_counter()
        queue = 0.001 * ((server or {}).get("queue_time_ms") or 0.0)
        queue = min(queue, first - began)
        return Reply(
            "".join(pieces),
            reason,
            usage and usage.prompt_tokens,
            usage and usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens,
            usage and usage.completion_tokens,
            first - began - queue,
            last - first,
            queue,
            server,
            tuple((number, name, arguments) for number, name, arguments in calls.values()),
            "".join(thoughts),
        )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turns the library's errors into ConfigError or InputError, except 404."""
        openai, url = self._openai, self.base_url
        try:
            yield
        except openai.NotFoundError:
            raise
        except openai.APITimeoutError:
            raise InputError(f"{url} timed out: raise --timeout") from None
        except openai.APIConnectionError as error:
            why = error.__cause__ or error
            raise InputError(
                f"cannot connect to --base-url {url} ({why}): start a server there, or give --checkpoint"
            ) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise InputError(
                f"{url} refused the key ({_message(error)}): set OPENAI_API_KEY or give --api-key"
            ) from None
        except openai.APIError as error:
            raise InputError(f"{url}: {_message(error)}") from None
        except ValueError as error:  # an invalid stream or address
            raise InputError(f"{url} does not speak OpenAI's protocol ({error})") from None


def _texts(choice: Any) -> tuple[str, str]:
    """The text of the answer in one chunk, and that of the reasoning."""
    delta = getattr(choice, "delta", None)
    if delta is None:
        return getattr(choice, "text", None) or "", ""
    more = delta.model_extra or {}
    return delta.content or "", more.get("reasoning_content") or more.get("reasoning") or ""


def _add_calls(calls: dict[int, list[str]], choice: Any) -> bool:
    """Adds the parts of tool calls in a chunk to `calls`: index -> id, name and arguments. Returns whether the chunk
    has any.
    """
    parts = getattr(getattr(choice, "delta", None), "tool_calls", None) or ()
    for part in parts:
        call = calls.setdefault(part.index, ["", "", ""])
        function = part.function
        call[0] = part.id or call[0]
        call[1] += (function and function.name) or ""
        call[2] += (function and function.arguments) or ""
    return bool(parts)


def _message(error: Any) -> str:
    """The server's error message in one line."""
    body = error.body if isinstance(error.body, dict) else {}
    return " ".join(str(body.get("message") or error.message).split())


class OwnServer:
    """Runs `python -m infer serve` on a free port of this machine, with a key that only this process has. Use it in a
    `with` block.
    """

    def __init__(self, options: Sequence[str], log: Path):
        """options: further words of the command line of `infer serve`. log: file for its output."""
        self.key, self._log = secrets.token_urlsafe(24), log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "laneformer.infer", "serve", "--host", "127.0.0.1", "--port", "0", *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, SERVER_KEY: self.key},
            )

    def wait(self) -> str:
        """Waits until the model is loaded and returns the base URL. Raises ConfigError with the server's error if
        loading fails.
        """
        url = None
        while True:
            ended = self._process.poll() is not None  # before the log is read, so that it is complete then
            output = self._log.read_text(encoding="utf-8", errors="replace").strip()
            if ended:
                found = re.search(r"^error: (.*)", output, re.MULTILINE)
                raise ConfigError(found[1] if found else f"infer serve ended before it was ready: read {self._log}")
            if url is None and (found := re.search(r"^(http://\S+): loading", output, re.MULTILINE)):
                url = found[1]
            if url is not None and _is_ready(url):
                return f"{url}/v1"
            time.sleep(0.05)

    def __enter__(self) -> "OwnServer":
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
