"""python -m infer serve: an OpenAI-compatible HTTP server for one checkpoint, with the engine in a separate process."""

import asyncio
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from laneformer.errors import ConfigError
from laneformer.infer.engine.options import Integer, JobEngineOptions
from laneformer.interrupts import importing

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
KEY = "LANEFORMER_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Serve a checkpoint over HTTP with OpenAI's APIs for completions, chat completions and responses. docs/serving.md
    has the details.
    """

    engine: tyro.conf.OmitArgPrefixes[JobEngineOptions]
    """The engine that answers."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs a key."""
    port: int = 8000
    """Port to listen on; 0 for any free one."""
    model_name: str = ""
    """Name of the model for clients; by default that of the checkpoint's folder."""
    any_model_name: bool = False
    """Accept requests for any model name, and answer with this model."""
    api_key_file: File = None
    """File with the keys of which clients must send one, a line each; or set the environment variable
    LANEFORMER_API_KEY to one key.
    """
    insecure: bool = False
    """Listen on --host without a key, so that any client that reaches it may use it."""
    allowed_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Accept requests for this host name besides localhost and IP addresses; may be repeated."""
    chat_template: File = None
    """Chat template (Jinja) instead of the checkpoint's."""
    max_waiting: int = 16
    """Maximum number of waiting requests; more are refused."""
    connections_per_address: int = 256
    """Maximum number of connections from one address. Raise it behind a proxy, whose address all clients share."""
    timeout: float = 120.0
    """Maximum time of a request, including the queue, s."""
    stream_interval_ms: float = 0.0
    """Minimum time between two events of a stream, ms; longer times give fewer and larger events."""
    tokens_per_dispatch: Integer = None
    """Number of tokens after which a disconnected client is noticed; by default the engine's choice."""
    prefix_cache: bool = True
    """Keep the last conversations for prompts that continue them, if the backend supports it. Answers do not change."""
    prefix_slots: Integer = None
    """Number of conversations to keep, each with its own caches; by default as many as --parallel."""
    parallel: Annotated[Integer, tyro.conf.arg(aliases=["-np"])] = None
    """Number of requests that may run together. Answers are the same as if each ran alone. By default on backend cpu as
    many as fit a quarter of the free memory, at most 4, and on other backends 1.
    """
    most_slowdown: float = 1.5
    """Let requests run together while each takes at most this many times its time alone."""


def run(options: Options) -> int:
    signal.signal(signal.SIGTERM, _stopped)
    try:
        with importing():
            import uvicorn
            from uvicorn.protocols.http.h11_impl import H11Protocol  # limits headers, as httptools does not

            from laneformer.infer.serve import connections
            from laneformer.infer.serve.application import Api
            from laneformer.infer.serve.engine import EngineProcess, Limits
            from laneformer.infer.serve.guard import is_loopback
            from laneformer.infer.serve.metrics import Metrics
            from laneformer.infer.serve.processes import log
            from laneformer.infer.serve.processes.pauses import shorten_pauses
            from laneformer.infer.serve.worker import ServedModel, follow
    except ImportError as error:
        raise ConfigError(f"the server needs the {error.name} library: pip install 'laneformer[serve]'") from None
    check(options)
    model = ServedModel(options.engine, options.chat_template, backend_options(options))
    if options.engine.distributed and not _is_first():
        follow(model)
        return 0
    keys = read_keys(options)
    if not keys and not is_loopback(options.host) and not options.insecure:
        raise ConfigError(
            f"--host {options.host} is reachable by others: set a key with {KEY} or --api-key-file, or give --insecure"
        )
    listening = listen(options.host, options.port)
    log.show()
    metrics = Metrics()
    metrics.lost_lines.set_function(lambda: log.LOG.lost)
    limits = Limits(options.max_waiting, options.timeout, options.tokens_per_dispatch)
    engine = EngineProcess(model, limits, metrics, end=lambda: setattr(server, "should_exit", True))
    name = options.model_name or Path(options.engine.checkpoint.rsplit(":", 1)[-1]).absolute().name

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.stop()  # first, because uvicorn would wait for open streams
            await super().shutdown(sockets)

    api = Api(engine, metrics, name, options.stream_interval_ms / 1000, options.any_model_name)
    limit = connections.Limits(options.connections_per_address, connections.most_connections())
    clients = connections.Connections(limit)
    server = Server(
        uvicorn.Config(
            clients.app(api.app(keys, {options.host, *options.allowed_host})),
            http=clients.protocol(H11Protocol),
            backlog=connections.BACKLOG,
            proxy_headers=False,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
    )
    # Until uvicorn handles signals, and after its shutdown, when it raises them again.
    signal.signal(signal.SIGINT, server.handle_exit)
    signal.signal(signal.SIGTERM, server.handle_exit)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not with nohup
        signal.signal(signal.SIGHUP, server.handle_exit)
    host, port = listening.getsockname()[:2]
    log.say(f"http://{f'[{host}]' if ':' in host else host}:{port}: loading {name}")
    shorten_pauses()
    asyncio.run(server.serve([listening]))
    if engine.failure is not None:
        raise ConfigError(engine.failure)
    log.say("stopped")
    return 0


def _stopped(*_: Any) -> None:
    """Ends the process before the server runs."""
    os.write(2, b"stopped\n")
    os._exit(0)


def backend_options(options: Options) -> dict[str, Any]:
    """Options of the backend that only a server sets. The backend chooses the options that are left out."""
    slots = options.prefix_slots if options.prefix_cache else 0
    together = {"parallel": options.parallel or 0, "most_slowdown": options.most_slowdown}
    return options.engine.drafts() | together | ({} if slots is None else {"prefix_cache": slots})


def _is_first() -> bool:
    """Whether this process of the job is the one that listens."""
    from laneformer.processes import job_index  # here, because it imports JAX, which the web process does not need

    return job_index() == 0


def check(options: Options) -> None:
    """Raises ConfigError for values outside their range."""
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be from 1 to 65535, or 0 for any free port, got {options.port}")
    options.engine.check()
    for name, least in (
        ("max_waiting", 0),
        ("connections_per_address", 1),
        ("stream_interval_ms", 0),
        ("tokens_per_dispatch", 1),
        ("prefix_slots", 1),
        ("parallel", 1),
        ("most_slowdown", 1),
    ):
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 < options.timeout < float("inf"):
        raise ConfigError(f"--timeout must be above 0 seconds, got {options.timeout}")


def read_keys(options: Options) -> tuple[str, ...]:
    """The keys of which clients must send one; () if they need none. Removes them from the environment, which the
    engine's process inherits. Raises ConfigError for an unusable key.
    """
    if options.api_key_file is not None and KEY in os.environ:
        raise ConfigError(f"give either --api-key-file or {KEY}, not both")
    if options.api_key_file is not None:
        text, source = options.api_key_file.read_text(encoding="utf-8", errors="replace"), str(options.api_key_file)
        keys = [line.strip() for line in text.splitlines() if line.strip()]
    elif KEY in os.environ:
        keys, source = [os.environ.pop(KEY)], KEY
    else:
        return ()
    if not keys or not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(f"{source} has no valid key: use printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises ConfigError if the address cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])
    except OSError as error:
        # Python's own text repeats the address. The codes of name lookups are negative.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on --host {host} --port {port} ({reason}): choose others") from None
