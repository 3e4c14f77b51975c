"""An HTML page about an agent's run: its turns, tokens, times, and the output of the tests. It needs no other file."""

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from laneformer.infer.agent.report import turn_line
from laneformer.infer.agent.turns import DECODE, FIRST, TESTS, WAITING, Run, Turn

COLORS = {FIRST: "#8da0cb", DECODE: "#2a78d6", TESTS: "#e0a030"}
OTHER = "#b0b0b0"
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #c0392b; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h1 b.passed { color: var(--good); } h1 b { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
th:nth-child(2), td:nth-child(2), th:first-child, td:first-child { text-align: left; }
pre { background: var(--soft); padding: .6rem; overflow: auto; max-height: 24rem; white-space: pre-wrap;
      overflow-wrap: anywhere; }
.bar { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden; margin: .3rem 0; }
.bar i { display: block; height: 100%; }
.key span { margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .3rem; }
details { border: 1px solid var(--line); border-radius: 5px; padding: .4rem .8rem; margin: .6rem 0; }
summary { cursor: pointer; } small { opacity: .75; }
.passed { color: var(--good); } .failed { color: var(--bad); }
"""


def page(run: Run, conditions: dict[str, Any], max_turns: int) -> str:
    """The page as HTML. conditions: see `infer.agent.report.conditions`."""
    tokens = "an unknown number of" if run.tokens is None else f"{run.tokens:,}"
    speed = "" if run.rate is None else f", {run.rate:,.0f} tok/s while decoding"
    longest = max((turn.total for turn in run.turns), default=1.0) or 1.0
    name = escape(run.task.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: {run.verdict}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}: <b class="{run.verdict}">{run.verdict}</b></h1>
<p>{len(run.turns)} turns, {tokens} tokens{speed}, {run.wall:,.2f} s</p>
{_bar(run.split, run.wall)}
<p class="key">{_key(run)}</p>
<table>
<tr><th>turn</th><th>tests</th><th>prompt</th><th>cached</th><th>tokens</th><th>first token ms</th><th>decode s</th>
<th>tests s</th><th>together s</th></tr>
{"".join(map(_row, run.turns))}
</table>
{"".join(_turn(turn, max_turns, longest) for turn in run.turns)}
<details><summary>The task</summary><pre>{escape(run.task.text)}</pre></details>
<details><summary>Conditions</summary>
<pre>{escape(json.dumps(conditions, indent=1, ensure_ascii=False, default=str))}</pre></details>
<p><small>Times are measured at the client, tokens are the server's.</small></p>
</body>
</html>
"""


def _bar(parts: dict[str, float], whole: float, width: float = 100.0) -> str:
    """A bar of the parts of a time, each as wide as its share. width: width of the whole bar in percent of the page."""
    pieces = "".join(
        f'<i style="width:{100 * max(seconds, 0) / (whole or 1):.2f}%;background:{COLORS.get(name, OTHER)}"'
        f' title="{escape(name)}: {seconds:,.2f} s"></i>'
        for name, seconds in parts.items()
    )
    return f'<div class="bar" style="width:{width:.1f}%">{pieces}</div>'


def _key(run: Run) -> str:
    """The legend of the bars, with the times of the whole run."""
    return "".join(
        f'<span><i style="background:{COLORS.get(name, OTHER)}"></i>{escape(name)} {seconds:,.2f} s'
        f" ({100 * seconds / (run.wall or 1):.1f} %)</span> "
        for name, seconds in run.split.items()
    )


def _row(turn: Turn) -> str:
    reply = turn.reply
    cells = (
        turn.number,
        _verdict(turn),
        _count(reply.prompt_tokens),
        _count(reply.cached),
        _count(reply.tokens),
        f"{1000 * reply.first:,.0f}",
        f"{reply.decode:,.2f}",
        f"{turn.tests:,.2f}",
        f"{turn.total:,.2f}",
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _verdict(turn: Turn) -> str:
    if turn.outcome is None:
        return "not run"
    return f'<span class="{"passed" if turn.passed else "failed"}">{escape(turn.outcome.verdict)}</span>'


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _turn(turn: Turn, max_turns: int, longest: float) -> str:
    reply = turn.reply
    parts = {FIRST: reply.first, DECODE: reply.decode, TESTS: turn.tests}
    parts[WAITING] = turn.total - sum(parts.values())
    texts: list[tuple[str, str]] = [("Reasoning", reply.reasoning), ("Answer", reply.text)]
    for call in turn.calls:
        texts.append((f"Call of {call.name}", _arguments(call.arguments)))
        texts.append((f"Result of {call.name}, after {call.seconds:,.2f} s", call.result))
    texts += [("Notes", "\n".join(turn.notes)), ("The tests", "" if turn.calls else turn.output)]
    return f"""<details{"" if turn.passed else " open"}><summary>{escape(turn_line(turn, max_turns))}</summary>
{_bar(parts, turn.total, 100 * turn.total / longest)}
{_blocks(texts)}</details>
"""


def _blocks(texts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<p>{escape(title)}</p><pre>{escape(text)}</pre>\n" for title, text in texts if text)


def _arguments(text: str) -> str:
    """The arguments of a call, one per line, with line ends in strings as they are; the text itself if it is not a JSON
    object.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(values, dict):
        return text
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )
