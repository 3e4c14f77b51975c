"""The model that an agent asks: any server that speaks OpenAI's completions, or `infer serve` in a process of
its own.
"""

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
from pathlib import Path
from typing import Any, Literal

from laneformer.errors import ConfigError, InputError

Mode = Literal["chat", "completion"]
SERVER_KEY = "LANEFORMER_API_KEY"
PATIENCE_SECONDS = 10.0  # that our server gets to end


@dataclass(frozen=True)
class Reply:
    """An answer and its times on this side of the connection, in seconds."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    """None where the server does not tell."""
    tokens: int | None
    first: float
    """From sending the request to the first text, the time in the server's queue left out where the server tells it."""
    decode: float
    """From the first text to the last."""
    queue: float
    """In the server's queue; 0 where it does not tell."""
    server: dict[str, Any] | None
    """What the server measured itself: vLLM's `metrics`."""


class Model:
    """A model on a server."""

    def __init__(self, base_url: str, key: str, name: str, mode: Literal["auto", "chat", "completion"], timeout: float):
        """name: "" for the only one that the server has. mode auto: chat, but for a model that the server says cannot.

        Raises ConfigError without the client's library, and for a server or a model that is not there.
        """
        try:
            import openai
        except ImportError:
            raise ConfigError(
                "the agent speaks through OpenAI's client library: pip install 'laneformer[agent]'"
            ) from None
        self._openai, self.base_url = openai, base_url
        try:
            with self._told():
                self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout)
                known = {model.id: model for model in self._client.models.list()}
        except openai.NotFoundError:  # a server need not have a list
            known = {}
        except (AttributeError, TypeError):  # nor is every page that is there one
            raise InputError(
                f"--base-url {base_url}: what answers there does not speak OpenAI's protocol; it often ends in /v1"
            ) from None
        if not name and len(known) != 1:
            raise ConfigError(f"--model: {base_url} has {', '.join(known) or 'no list of models'}: name one")
        self.name = name or next(iter(known))
        if known and self.name not in known:
            raise ConfigError(f"--model {self.name}: {base_url} has {', '.join(known)}")
        described = known[self.name].model_extra or {} if known else {}
        self.conditions: dict[str, Any] | None = described.get("conditions")
        """What our own server says of the engine; None for others."""
        self.mode: Mode = mode if mode != "auto" else "completion" if described.get("chat") is False else "chat"

    def ask(
        self,
        prompt: str | Sequence[dict[str, str]],
        stop: Sequence[str],
        progress: Callable[[int], None],
        **options: Any,
    ) -> Reply:
        """Streams an answer. prompt: text in completion mode, messages in chat mode. progress: called with the
        characters so far.

        options: max_tokens, temperature and so on. Raises InputError where the server refuses or fails.
        """
        fields = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **options}
        if stop:
            fields["stop"] = list(stop)
        began = time.perf_counter()
        first = last = None
        pieces, reason, usage, server = [], None, None, None
        try:
            with self._told():
                if self.mode == "chat":
                    stream = self._client.chat.completions.create(messages=list(prompt), **fields)
                else:
                    stream = self._client.completions.create(prompt=prompt, **fields)
                with stream:
                    for chunk in stream:
                        usage, server = chunk.usage or usage, (chunk.model_extra or {}).get("metrics") or server
                        for choice in chunk.choices[:1]:
                            reason = choice.finish_reason or reason
                            text, thought = _said(choice)
                            if text or thought:
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
            usage and usage.completion_tokens,
            first - began - queue,
            last - first,
            queue,
            server,
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the library's errors into ours; 404 stays."""
        openai, url = self._openai, self.base_url
        try:
            yield
        except openai.NotFoundError:
            raise
        except openai.APITimeoutError:
            raise InputError(f"{url} did not answer in time: give more seconds with --timeout") from None
        except openai.APIConnectionError as error:
            why = error.__cause__ or error
            raise InputError(
                f"--base-url {url}: no server answers there ({why}): start one, or give --checkpoint"
            ) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise InputError(
                f"{url} wants another key ({_message(error)}): set OPENAI_API_KEY or give --api-key"
            ) from None
        except openai.APIError as error:
            raise InputError(f"{url}: {_message(error)}") from None
        except ValueError as error:  # a stream that is no stream, an address that is none
            raise InputError(f"{url} does not speak OpenAI's protocol ({error})") from None


def _said(choice: Any) -> tuple[str, str]:
    """Text of an answer, and of thinking before it, in one chunk."""
    delta = getattr(choice, "delta", None)
    if delta is None:
        return getattr(choice, "text", None) or "", ""
    more = delta.model_extra or {}
    return delta.content or "", more.get("reasoning_content") or more.get("reasoning") or ""


def _message(error: Any) -> str:
    """The server's own words."""
    body = error.body if isinstance(error.body, dict) else {}
    return " ".join(str(body.get("message") or error.message).split())


class OwnServer:
    """`python -m infer serve` on a free port of this machine, with a key that only this process has. Use it in a `with`
    block.
    """

    def __init__(self, options: Sequence[str], log: Path):
        """options: of `infer serve`. log: what it writes."""
        self.key, self._log = secrets.token_urlsafe(24), log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "infer", "serve", "--host", "127.0.0.1", "--port", "0", *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, SERVER_KEY: self.key},
            )

    def wait(self) -> str:
        """The base URL, once the model is loaded. Raises ConfigError with the server's own words where it cannot be."""
        url = None
        while True:
            ended, said = (
                self._process.poll() is not None,
                self._log.read_text(encoding="utf-8", errors="replace").strip(),
            )
            if ended:
                told = re.search(r"^error: (.*)", said, re.MULTILINE)
                raise ConfigError(told[1] if told else f"infer serve ended before it was ready: {self._log} says why")
            if url is None and (found := re.search(r"^(http://\S+): loading", said, re.MULTILINE)):
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
