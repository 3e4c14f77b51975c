"""Settings of Sphinx, which makes a website of this folder's pages: `make docs`.

PAGES is the website's table of contents. The block `api` of a page lists what to document from its docstrings.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
import typing
from pathlib import Path

PAGES = {
    "Use": "training ablations layouts serving agent evaluation conversion quantized",
    "Speed": "benchmarks peers roofline bf12",
    "Code": "api architecture decode_kernel gpu security",
    "Log": "log log/2026-11-20 log/2026-11-21 log/2026-11-22 log/2026-11-23-1 log/2026-11-23-2 log/2026-11-24"
    " log/2026-11-25 log/2026-11-26 log/2026-11-27 log/2026-11-28 log/2026-11-29",
}

project = "Laneformer"
copyright = "the Laneformer authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["examples"]
html_theme = "furo"
myst_heading_anchors = 6
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
smartquotes = False


def complete_page(app, name, source):
    """Append PAGES to the first page, document the names of `api` blocks, and drop links that the website cannot have:
    those to folders and to pages outside of this folder.
    """
    if name == root_doc:
        for caption, pages in PAGES.items():
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages.split(), "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"
    folder = (Path(app.srcdir) / name).parent

    def link(found):
        path = folder / found[2]
        outside = path.suffix == ".md" and Path(app.srcdir) not in path.resolve().parents
        return found[1] if path.is_dir() or outside else found[0]

    source[0] = re.sub(r"\[([^\]]+)\]\(([^)#:]+)\)", link, source[0])
    source[0] = re.sub(r"```{api}\n(.*?)\n```", lambda block: api_block(block[1]), source[0], flags=re.DOTALL)


def as_rst(app, what, name, obj, options, lines):
    """Replace a docstring by reStructuredText: code in backticks, paragraphs of Python, lines with indented rest."""
    paragraphs = []
    for paragraph in "\n".join(lines).strip().split("\n\n"):
        text = re.sub(r"\n +", " ", paragraph)
        if "\n" in paragraph and _is_python(paragraph):
            paragraphs.append("::\n\n" + textwrap.indent(paragraph, "    "))
            continue
        if text != paragraph:  # a list of parameters
            text = "\n".join(f"- {item.removeprefix('- ')}" for item in text.split("\n"))
        parts = re.split(r"(`[^`]+`)", text)
        parts[::2] = [re.sub(r"([\\*_|])", r"\\\1", part) for part in parts[::2]]
        for n in range(1, len(parts), 2):  # code that a letter follows needs a mark between them
            parts[n] = f"`{parts[n]}`" + ("\\ " if parts[n + 1][:1].isalnum() else "")
        paragraphs.append("".join(parts))
    lines[:] = "\n\n".join(paragraphs).split("\n")


def without_fields(app, what, name, obj, options, signature, returned):
    """Leave out the parameters of a dataclass, since its fields are documented below."""
    return ("", None) if what == "class" and dataclasses.is_dataclass(obj) else None


def _is_python(text: str) -> bool:
    try:
        return bool(ast.parse(textwrap.dedent(text)).body)
    except SyntaxError:
        return False


def api_block(names: str) -> str:
    """A block of reStructuredText that documents each of the names, a line each; of a table, it lists the keys."""
    lines = ["```{eval-rst}"]
    for name in names.split():
        module, _, last = name.rpartition(".")
        thing = getattr(importlib.import_module(module), last)
        if not inspect.isclass(thing):
            function = inspect.isfunction(thing)
            lines += [f".. autofunction:: {name}" if function else f".. py:data:: {name}\n\n   {', '.join(thing)}", ""]
            continue
        kind = "exception" if issubclass(thing, Exception) else "class"
        fields = ["   :inherited-members:", "   :undoc-members:"] if dataclasses.is_dataclass(thing) else []
        lines += [f".. auto{kind}:: {name}", "   :members:", *fields, ""]
        for base in thing.__mro__:  # types of fields, without what tyro reads beside them
            for field, hint in inspect.get_annotations(base).items():
                if typing.get_origin(hint) is typing.Annotated:
                    base.__annotations__[field] = hint.__origin__
    return "\n".join([*lines, "```"])


def setup(app):
    """Register what changes pages and docstrings before they are read."""
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", without_fields)
