"""The names of the two packages are available without importing their modules, or JAX, before they are used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("name", ["laneformer", "laneformer.infer"])
def test_names_match_type_checking_imports(name):
    package = importlib.import_module(name)
    assert {*package.__all__} <= {*dir(package)}
    seen = {}
    for node in ast.parse(Path(package.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            seen |= {each.asname: line.module for line in node.body for each in line.names}
    assert {*seen} == {*package.__all__}
    for each, module in seen.items():
        assert getattr(package, each) is getattr(importlib.import_module(module), each)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {name} import nothing", {})


def test_jax_is_not_imported():
    """One process imports everything that must not import JAX."""
    lines = (
        "import laneformer.infer; laneformer.ConfigError, laneformer.ModelConfig, laneformer.LAYOUTS",
        "import laneformer.infer.__main__, laneformer.infer.commands.serve",
        "from laneformer.infer.commands import roofline; from laneformer.infer.roofline import hf_config, published",
        "import laneformer.train.planning.cluster",
    )
    code = "\n".join(f"{line}\nassert 'jax' not in sys.modules, {line!r}" for line in ("import sys", *lines))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_star_imports_work(monkeypatch):
    for name in ("laneformer", "laneformer.infer"):
        package, names = importlib.import_module(name), {}
        for each in package.__all__:
            monkeypatch.delitem(vars(package), each, raising=False)  # what the first import of a name does
        exec(f"from {name} import *", names)
        assert {*package.__all__} <= {*names}
    assert names["Engine"].load and names["Sampling"]
