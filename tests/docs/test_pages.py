"""The pages of docs/ and of the repository: their links, and the website that Sphinx makes of them."""

import functools
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import laneformer
from laneformer import infer
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
WEBSITE = [page for page in DOCS.rglob("*.md") if "examples" not in page.parts]
PAGES = sorted([*ROOT.glob("*.md"), *WEBSITE])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
without_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="no Sphinx: pip install -e '.[docs]'",
)


def prose(page: Path) -> str:
    """The text of a page without blocks and spans of code."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda span: span[0].replace("(", "").replace("[", ""), text)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for found in LINK.finditer(prose(page)):
        link = found[1] or found[2]
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_website_has_every_page():
    contents = runpy.run_path(str(DOCS / "conf.py"))["PAGES"]
    named = [name for names in contents.values() for name in names.split()]
    assert sorted(["index", *named]) == sorted(str(page.relative_to(DOCS).with_suffix("")) for page in WEBSITE)


def test_api_page_has_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```{api}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).split()
    assert len(set(blocks)) == len(blocks)
    public = {name for package in (laneformer, infer) for name in package.__all__}
    assert public <= {name.rpartition(".")[2] for name in blocks}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", source, target]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)


@without_sphinx
@pytest.mark.slow
def test_website_builds_without_warnings(tmp_path):
    done = build(DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for anchor in (
        "laneformer.load",
        "laneformer.Engine.generate",
        "laneformer.Sampling.top_k",
        "laneformer.train.config.TrainConfig.steps",
    ):
        assert f'id="{anchor}"' in api


@without_sphinx
@pytest.mark.slow
def test_broken_links_fail_the_build(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    settings = (DOCS / "conf.py").read_text(encoding="utf-8")
    settings = re.sub(r"^PAGES = {.*?^}", 'PAGES = {"Pages": "api"}', settings, flags=re.MULTILINE | re.DOTALL)
    (folder / "conf.py").write_text(settings, encoding="utf-8")
    (folder / "api.md").write_text("# API\n")
    links = ["[a](page.md)", "[a](api.md#heading)", "[a](../module.py)", "![a](picture.png)"]
    (folder / "index.md").write_text("# Index\n\n[good](api.md#api)\n\n" + "\n\n".join(links) + "\n")
    done = build(folder, tmp_path / "built")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "WARNING" in line and "index.md:3:" in line] == []
    for name in ("page.md", "heading", "module.py", "picture.png"):
        assert len([line for line in done.stderr.splitlines() if name in line]) == 1, done.stderr
