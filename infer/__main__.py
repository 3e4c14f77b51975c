"""Command line: python -m infer COMMAND --checkpoint DIR ..."""

import difflib
import importlib
import sys
from collections.abc import Sequence

import tyro

from laneformer.errors import run_command
from laneformer.interrupts import end, importing

# Name -> (module, summary). The module has a dataclass `Options` and `run(options) -> exit code`; only the module of
# the command that runs is imported.
COMMANDS = {
    "generate": ("laneformer.infer.commands.generate", "stream a completion of a prompt"),
    "bench": ("laneformer.infer.commands.bench", "measure decode latency, and record the conditions with it"),
    "roofline": ("laneformer.infer.commands.roofline", "project the speed of a model on hardware you do not have"),
    "serve": ("laneformer.infer.commands.serve", "serve a model over HTTP, with OpenAI's APIs"),
    "humaneval": (
        "laneformer.infer.commands.humaneval",
        "solve programming problems (HumanEval, MBPP) and score the solutions",
    ),
    "agent": ("laneformer.infer.commands.agent", "work on a task until its tests pass, and report where the time went"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m infer COMMAND --checkpoint DIR ...",
            "",
            *lines,
            "",
            "python -m infer COMMAND --help lists the options of a command",
        ]
    )


def main(args: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        return run_command(lambda: print(usage(), flush=True) or (0 if args else 2))
    name, *rest = args
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS)
        remedy = f"did you mean {' or '.join(near)}?" if near else "python -m infer --help lists all commands"
        print(f"error: unknown command {name!r}; {remedy}", file=sys.stderr)
        return 2

    def command() -> int:
        with importing():  # takes seconds
            module = importlib.import_module(COMMANDS[name][0])
        markers = (tyro.conf.FlagCreatePairsOff,)
        return run_command(module.run, module.Options, f"python -m infer {name}", rest, markers=markers)

    return run_command(command)


if __name__ == "__main__":
    end(main())
