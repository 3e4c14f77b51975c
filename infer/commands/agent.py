"""python -m infer agent: let a model work on a task until its tests pass, and report where the time went."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from laneformer.errors import ConfigError
from laneformer.infer.agent.client import Model, OwnServer
from laneformer.infer.agent.conversation import History
from laneformer.infer.agent.loop import check_start, solve
from laneformer.infer.agent.page import page
from laneformer.infer.agent.report import conditions, projection, record, split_table, turn_line
from laneformer.infer.agent.task import Task, load_task
from laneformer.infer.agent.turns import Run, Turn, Workspace
from laneformer.infer.engine.options import EngineOptions, Integer
from laneformer.infer.evaluate.scoring import Judge

KEY = "OPENAI_API_KEY"
RUNS = Path("runs/agent")
MOST_TURNS = {False: 6, True: 24}  # without and with tools
NO_ENGINE = EngineOptions(checkpoint="")

File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Let a model solve a task: it writes code, the tests run in the sandbox, and it corrects its code until they pass.
    The exit code is 0 if the tests pass at the end, else 1. docs/agent.md has the details.
    """

    task: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="TASK_DIR")]]
    """Folder with task.md, files to start from and tests (test*.py); it is not changed."""
    base_url: str = ""
    """URL of a server with OpenAI's API, for example http://127.0.0.1:8000/v1."""
    model: str = ""
    """Model of that server; by default its only one."""
    api_key: str = ""
    """Key for that server. The environment variable OPENAI_API_KEY keeps it out of process lists."""
    engine: tyro.conf.OmitArgPrefixes[EngineOptions] = NO_ENGINE
    """Instead of --base-url, start `infer serve` with --checkpoint and these options."""
    mode: Literal["auto", "chat", "completion"] = "auto"
    """chat: ask in messages. completion: continue a text. auto: chat, unless our server reports that it has no chat
    template.
    """
    history: History = "auto"
    """Earlier turns in each prompt. last: the last answer and its failure. whole: all turns while they fit the context,
    so that each prompt continues the previous one. auto: whole if the server reports that it keeps prompts, else last.
    """
    tools: Literal["auto", "on", "off"] = "auto"
    """Give the model tools to read and write files and to run the tests, besides whole files in answers. auto: if our
    server reports that the chat template has a format for calls.
    """
    max_turns: Integer = None
    """Maximum number of answers; by default 6, or 24 with tools."""
    max_new_tokens: int = 1024
    """Maximum number of tokens of an answer."""
    temperature: float = 0.0
    """Sampling temperature; 0 always takes the most likely token."""
    seed: Integer = None
    """Sampling seed, for servers that accept one."""
    test_seconds: float = 60.0
    """Limit on the CPU time of the tests, s, on a machine of nominal speed."""
    timeout: float = 600.0
    """Maximum time of an answer, s."""
    sandbox: Literal["auto", "bwrap", "unshare", "rlimits"] = "auto"
    """How to isolate the tests. auto: bubblewrap if installed, else unshare. rlimits: limits only, for use in VMs."""
    workspace: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """New folder for the model's copy of the task, the transcript and the record; by default in runs/agent."""
    json: File = None
    """Write the record of the run to this file; by default record.json in the workspace."""
    html: File = None
    """Write a page about the run to this file: turns, tokens, times, and the output of the tests."""


def run(options: Options) -> int:
    check(options)
    task = load_task(options.task)
    folder = find_workspace(options, task)
    with contextlib.ExitStack() as stack:
        # SIGTERM unwinds the stack, which also stops the server and running programs.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        if options.base_url:  # first, so that a wrong URL fails at once
            key = options.api_key or os.environ.get(KEY) or "none"
            model = Model(options.base_url, key, options.model, options.mode, options.timeout)
        judge = stack.enter_context(Judge(options.sandbox, workers=1))
        workspace = Workspace(task, folder / "files")
        check_start(workspace, judge, options.test_seconds)
        if options.engine.checkpoint:  # last, because loading a model takes long
            model = own_model(options, folder, stack)
        return work(options, task, workspace, model, judge, folder)


def check(options: Options) -> None:
    """Raises ConfigError for values outside their range, and for options that exclude each other."""
    if bool(options.base_url) == bool(options.engine.checkpoint):
        raise ConfigError("give either --base-url of a server, or --checkpoint to start one")
    if options.base_url and (given := changed(options.engine)):
        raise ConfigError(f"--{next(iter(given))} needs --checkpoint; it does not apply to --base-url")
    if options.engine.checkpoint and (options.model or options.api_key):
        raise ConfigError(
            f"--{'model' if options.model else 'api-key'} needs --base-url; it does not apply to --checkpoint"
        )
    if options.tools == "on" and options.mode == "completion":
        raise ConfigError("--tools on needs --mode chat or auto, got completion")
    for name, least in (("max_turns", 1), ("max_new_tokens", 1), ("temperature", 0)):
        if getattr(options, name) is not None and not getattr(options, name) >= least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    for name in ("test_seconds", "timeout"):
        if not 0 < getattr(options, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0 seconds, got {getattr(options, name)}")


def changed(options: EngineOptions) -> dict[str, Any]:
    """The options that differ from their defaults: name -> value."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value != getattr(NO_ENGINE, name)}


def find_workspace(options: Options, task: Task) -> Path:
    """The path of the new workspace. Raises ConfigError for a folder that is not empty or is inside the task."""
    folder = options.workspace or next(
        unused for number in itertools.count(1) if not (unused := RUNS / f"{task.name}-{number}").exists()
    )
    if folder.resolve().is_relative_to(options.task.resolve()):
        raise ConfigError(
            f"--workspace {folder} is in the task's folder, which must not change: name a folder elsewhere"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--workspace {folder} exists already: name a new folder")
    return folder


def own_model(options: Options, folder: Path, stack: contextlib.ExitStack) -> Model:
    """Starts `infer serve` with the checkpoint and returns its model. The server runs until `stack` is closed."""
    args = [
        word
        for name, value in changed(options.engine).items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    args += ["--timeout", f"{options.timeout:g}"]
    server = stack.enter_context(OwnServer(args, folder / "server.log"))
    print(f"loading {options.engine.checkpoint} (log in {folder / 'server.log'})", file=sys.stderr)
    return Model(server.wait(), server.key, "", options.mode, options.timeout)


def work(options: Options, task: Task, workspace: Workspace, model: Model, judge: Judge, folder: Path) -> int:
    """Runs the loop, writes its transcript and record, and returns the exit code."""
    asked = {"max_tokens": options.max_new_tokens, "temperature": options.temperature}
    asked |= {} if options.seed is None else {"seed": options.seed}
    tools = has_tools(options, model)
    max_turns = options.max_turns or MOST_TURNS[tools]
    described = conditions(
        model,
        judge.report,
        judge.sandbox.report,
        asked,
        history=options.history,
        tools=tools,
        max_turns=max_turns,
        test_seconds=options.test_seconds,
    )
    found, path = Run(task), options.json or folder / "record.json"
    print(f"{task.name}: {model.name} at {model.base_url}, {model.mode}{' with tools' * tools}", file=sys.stderr)
    live = Live(max_turns)
    with (folder / "transcript.jsonl").open("w", encoding="utf-8") as transcript:

        def report(turn: Turn, prompt: Any) -> None:
            line = {
                "turn": turn.number,
                "prompt": prompt,
                "answer": turn.reply.text,
                "calls": [dataclasses.asdict(call) for call in turn.calls],
                "written": turn.written,
                "notes": turn.notes,
                "verdict": turn.outcome and turn.outcome.verdict,
                "output": turn.output,
            }
            transcript.write(json.dumps(line, ensure_ascii=False) + "\n")
            transcript.flush()
            live.end(turn_line(turn, max_turns))

        try:
            solve(
                found,
                workspace,
                model,
                judge,
                max_turns=max_turns,
                test_seconds=options.test_seconds,
                history=options.history,
                options=asked,
                tools=tools,
                progress=live.show,
                report=report,
            )
        finally:
            live.end()
            written = json.dumps(record(found, described, task), indent=1, ensure_ascii=False) + "\n"
            save(path, written)
            if options.html is not None:
                save(options.html, page(found, described, max_turns))
    print(split_table(found, described).text())
    if found.turns and (table := projection(found)) is not None:
        print(f"\n{table.text()}")
    print(f"record in {path}, files and transcript in {folder}", file=sys.stderr)
    return {"passed": 0, "failed": 1}.get(found.verdict, 130)


def has_tools(options: Options, model: Model) -> bool:
    """Whether the model gets tools. Raises ConfigError if --tools is on but the model is not asked in a chat."""
    if options.tools == "on" and model.mode != "chat":
        raise ConfigError("--tools on needs a chat template, which the model does not have")
    return options.tools == "on" or (options.tools == "auto" and model.mode == "chat" and model.tool_form is not None)


def save(path: Path, text: str) -> None:
    """Writes a file and its folder. Raises ConfigError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): give another file") from None


class Live:
    """A line on standard error that shows the progress of the current answer, on a terminal only."""

    def __init__(self, turns: int):
        self._turns, self._shown, self._next = turns, False, 0.0

    def show(self, turn: int, characters: int) -> None:
        if sys.stderr.isatty() and time.monotonic() >= self._next:
            self._shown, self._next = True, time.monotonic() + 0.1
            print(f"\r\x1b[Kturn {turn}/{self._turns}: {characters:,} characters", end="", file=sys.stderr, flush=True)

    def end(self, line: str = "") -> None:
        """Removes the line, and prints `line` in its place if it is not empty."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr)
            self._shown = False
        if line:
            print(line, file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
