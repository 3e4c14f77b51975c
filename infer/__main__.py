"""Command line: python -m infer COMMAND --checkpoint DIR ..."""

import importlib
import os
import sys
from collections.abc import Sequence

import tyro

from laneformer.errors import LaneformerError, say_errors_once

# Name -> module with an `Options` dataclass and `run(options) -> exit code`, imported when asked for; and what it does.
COMMANDS = {
    "generate": ("infer.commands.generate", "continue a prompt and print the text as it comes"),
    "bench": ("infer.commands.bench", "measure the latency of decoding, with all conditions"),
    "roofline": ("infer.commands.roofline", "project the speed of a model on hardware that need not be there"),
    "serve": ("infer.commands.serve", "answer over HTTP, as OpenAI's completions and chat completions do"),
    "humaneval": ("infer.commands.humaneval", "solve programming problems (HumanEval, MBPP), and score the solutions"),
    "agent": ("infer.commands.agent", "work on a task until its tests pass, and tell where the time goes"),
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
            "python -m infer COMMAND --help: its options",
        ]
    )


def main(args: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    name, *rest = args
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    say_errors_once()
    try:
        module = importlib.import_module(COMMANDS[name][0])
        options = tyro.cli(
            module.Options, args=rest, prog=f"python -m infer {name}", config=(tyro.conf.FlagCreatePairsOff,)
        )
        return module.run(options)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (LaneformerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
