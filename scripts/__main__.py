"""The console command: `laneformer COMMAND ...` does what `python -m MODULE ...` does."""

import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from laneformer.interrupts import LINE, end, importing


class Command(NamedTuple):
    """One command of `laneformer`."""

    module: str
    """Module with `main(arguments) -> exit status`; imported when the command runs."""
    what: str
    """What the command does, in one line."""
    first: tuple[str, ...] = ()
    """Arguments that precede the user's."""

    @property
    def program(self) -> str:
        """The equivalent command with `python -m`."""
        module = self.module.removeprefix("laneformer.").removesuffix(".__main__").replace("commands.", "scripts.", 1)
        return " ".join(["python -m", module, *self.first])


def commands() -> dict[str, Command]:
    """All commands by name, in the order in which a project uses them."""
    from laneformer.infer.__main__ import COMMANDS

    return {
        "tokenize": Command("laneformer.commands.tokenize", "write text or conversations as a folder of tokens"),
        "train": Command("laneformer.train.__main__", "pretrain the model of a recipe, or resume its run"),
        "ablate": Command(
            "laneformer.train.ablate.__main__", "train a grid of variants, and report speed and loss of each"
        ),
        "train-bench": Command("laneformer.train.bench", "measure the speed of training on this hardware"),
        "plot": Command("laneformer.commands.plot", "plot what training runs recorded"),
        **{name: Command("laneformer.infer.__main__", what, (name,)) for name, (_, what) in COMMANDS.items()},
        "convert": Command("laneformer.commands.convert", "write any checkpoint as a Hugging Face folder"),
        "quantize": Command("laneformer.commands.quantize", "round a model's matrices to 8 or 4 bits per weight"),
        "convert-dense": Command("laneformer.commands.convert_dense", "cut a dense model into lanes"),
        "draw-layout": Command("laneformer.commands.draw_layout", "draw the lanes, modules and landings of a layout"),
        "plot-trace": Command(
            "laneformer.commands.plot_trace", "plot where the time of a token went, from a trace of bench"
        ),
    }


def usage() -> str:
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {command.what}" for name, command in known.items()]
    return "\n".join(
        ["usage: laneformer COMMAND ...", "", *lines, "", "laneformer COMMAND --help lists arguments and options"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: the command's, 2 for an unknown command, 130 after Ctrl-C, 141 if the reader of the
    output has closed it, as with `| head`.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:  # before the command handles it
        print(LINE, file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), flush=True)
        return 0 if arguments else 2
    name, *rest = arguments
    with importing():
        known = commands()
    if name not in known:
        near = difflib.get_close_matches(name, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "laneformer --help lists all"
        print(f"error: unknown command {name!r}; {remedy}", file=sys.stderr)
        return 2
    if not {"", os.getcwd()} & {*sys.path}:  # as with python -m, for recipes written as MODULE:FUNCTION
        sys.path.append(os.getcwd())
    command = known[name]
    with importing():
        act = importlib.import_module(command.module).main
    asks_help = not rest or {"-h", "--help"} & {*rest}
    with _renamed(command.program, f"laneformer {name}") if asks_help else contextlib.nullcontext():
        return act([*command.first, *rest])


class _Renaming:
    """Standard output with the program renamed, except in the boxes around options, which have a fixed width."""

    def __init__(self, out, program: str, name: str):
        self._out, self._name = out, name
        self._program = re.compile(rf"{re.escape(program)}(?![\w.])")

    def write(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        renamed = (line if "│" in line else self._program.sub(self._name, line) for line in lines)
        return self._out.write("".join(renamed))

    def __getattr__(self, name: str):
        return getattr(self._out, name)


@contextlib.contextmanager
def _renamed(program: str, name: str) -> Iterator[None]:
    with contextlib.redirect_stdout(_Renaming(sys.stdout, program, name)):
        yield


def console() -> NoReturn:
    """Entry point of the console command; ends the process."""
    end(main())


if __name__ == "__main__":
    console()
