"""Rules of imports: floors between packages, rooms within infer/ and train/, and no cycles.

Imports are read from the sources: those at the top of a file, those in functions, and modules imported by name.
"""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import laneformer
from tests.support.paths import ROOT

# Folder -> the package that it is. All but the first are links in laneformer/.
PACKAGES = {
    "laneformer": "laneformer",
    "custom_calls": "laneformer.custom_calls",
    "infer": "laneformer.infer",
    "train": "laneformer.train",
    "configs": "laneformer.recipes",
    "scripts": "laneformer.commands",
}
FLOORS = {
    "laneformer": 0,
    "laneformer.custom_calls": 1,
    "laneformer.infer": 2,
    "laneformer.train": 3,
    "laneformer.recipes": 4,
    "laneformer.commands": 4,
}
DATA_FILES = ("config", "layout", "ops", "formats", "quantized", "errors")  # need no JAX; custom_calls may import them
ROOMS = {  # lowest first; the longest name that matches a module determines its room
    "laneformer.infer": (
        "sampling noise text sandbox roofline",
        "engine",
        "bench evaluate serve __init__",
        "agent",
        "commands",
        "__main__",
    ),
    "laneformer.train": (
        "rounding",
        "__init__ config same_run data tokenizing recipes program metrics samples dense flops planning.cluster",
        "optimizer distill",
        "step",
        "checkpoint initial run_folder evaluation planning bench",
        "loop",
        "ablate",
        "__main__",
    ),
}
MOST_FILES = 20  # per folder; the aim is 15

# (importer, imported): exceptions to the rules.
ALLOWED = {
    ("laneformer.infer.__main__", "laneformer.infer.commands"),  # the list of commands
    ("laneformer.train.recipes", "laneformer.recipes"),  # recipes are named on the command line
    ("laneformer.train.ablate.__main__", "laneformer.recipes.ablations"),  # grids are named on the command line
}


@cache
def sources() -> dict[str, Path]:
    """The file of every module, by dotted name. The file of a package is its `__init__.py`."""
    return {
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for folder, package in PACKAGES.items()
        for path in sorted((ROOT / folder).rglob("*.py"))  # does not follow links
    }


def package_of(module: str) -> str:
    """The entry of PACKAGES that has the module."""
    return max((package for package in FLOORS if within(module, package)), key=len)


@cache
def parsed(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imported(nodes: list[ast.AST], module: str, is_package: bool, known) -> set[str]:
    """The modules among `known` that the source of `module` imports, including imports in functions and by name."""
    package = module if is_package else module.rpartition(".")[0]
    found, by_name = set(), False
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            by_name |= bool({alias.name for alias in node.names} & _IMPORTERS)
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in known else base for name in names}
        elif isinstance(node, ast.Name | ast.Attribute):
            by_name |= (node.id if isinstance(node, ast.Name) else node.attr) in _IMPORTERS
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found |= {text for text in texts if "." in text}  # for a function that imports by name
    if by_name:
        found |= texts | {f"{package}.{text}" for text in texts}
    return {name for name in found if name in known} - {module}


_IMPORTERS = {"import_module", "__import__", "run_module"}


@cache
def imports() -> dict[str, set[str]]:
    known = sources().keys() - {"laneformer"}  # whose names for users are imported on first use
    return {
        module: imported(parsed(path), module, path.name == "__init__.py", known)
        for module, path in sources().items()
        if module in known
    }


def pairs() -> list[tuple[str, str]]:
    return [(importer, name) for importer, names in imports().items() for name in sorted(names)]


def within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def room(module: str) -> int:
    """The level of a module of infer/ or train/ within its package."""
    package = package_of(module)
    name = module[len(package) + 1 :]
    levels = {each: level for level, names in enumerate(ROOMS[package]) for each in names.split()}
    fitting = [each for each in levels if within(name or "__init__", each)]
    assert fitting, f"{module} is in no room: give it a level in ROOMS of tests/test_house.py"
    return levels[max(fitting, key=len)]


# ---- the rules: each yields the pairs (importer, imported) that violate it


def up_a_floor():
    for importer, name in pairs():
        floor, other = (FLOORS[package_of(module)] for module in (importer, name))
        if other > floor and not (within(name, "laneformer.recipes.models") and within(importer, "laneformer.infer")):
            yield importer, name


def up_a_room():
    for importer, name in pairs():
        package = package_of(importer)
        if package in ROOMS and within(name, package) and room(name) > room(importer):
            yield importer, name


def kernels_import_more_than_data():
    allowed = {f"laneformer.{name}" for name in DATA_FILES}
    for importer, name in pairs():
        if (
            package_of(importer) == "laneformer.custom_calls"
            and package_of(name) == "laneformer"
            and name not in allowed
        ):
            yield importer, name


def named_models_import_more_than_the_model():
    for importer, name in pairs():
        if within(importer, "laneformer.recipes.models") and package_of(name) != "laneformer":
            yield importer, name


def commands_are_imported():
    for importer, name in pairs():
        for leaf in ("laneformer.infer.commands", "laneformer.commands"):
            if within(name, leaf) and not within(importer, leaf):
                yield importer, name


RULES = (
    up_a_floor,
    up_a_room,
    kernels_import_more_than_data,
    named_models_import_more_than_the_model,
    commands_are_imported,
)


def allowed(importer: str, name: str) -> bool:
    return any(importer == above and within(name, below) for above, below in ALLOWED)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_imports_follow_the_rule(rule):
    violations = {pair for pair in rule() if not allowed(*pair)}
    assert not violations


def test_every_exception_is_needed():
    violations = {pair for rule in RULES for pair in rule()}
    for above, below in ALLOWED:
        assert any(importer == above and within(name, below) for importer, name in violations), (above, below)


def test_imports_have_no_cycle():
    sorter = graphlib.TopologicalSorter(imports())
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_nothing_imports_a_test_file():
    files = [*sources().values(), *sorted((ROOT / "tests").rglob("*.py"))]
    for path in files:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules = {node.module for node in parsed(path) if isinstance(node, ast.ImportFrom) and node.module}
        modules |= {alias.name for node in parsed(path) if isinstance(node, ast.Import) for alias in node.names}
        if "tests" in modules:
            modules |= {f"tests.{name}" for name in names_from_tests(path)}
        ours = {name for name in modules - {"tests"} if within(name, "tests")}
        shared = {name for name in ours if within(name, "tests.support") and within(module, "tests")}
        assert ours == shared, f"{module} imports {ours - shared}: move what is shared to tests/support"


def test_packages_are_links_in_the_one_package():
    """A clone has the packages of a wheel, under the same names."""
    links = {path.name: path.resolve() for path in (ROOT / "laneformer").iterdir() if path.is_symlink()}
    expected = {package.removeprefix("laneformer."): ROOT / folder for folder, package in PACKAGES.items()}
    assert links == {name: folder for name, folder in expected.items() if name != "laneformer"}


def test_code_imports_the_one_package():
    """A folder of a user may have its own train.py. Names for users in `laneformer` would be a cycle."""
    for module, path in sources().items():
        nodes = parsed(path)
        lines = [
            (node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        lines += [(alias.name, "") for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        tops = {(name or "").partition(".")[0] for name, _ in lines}
        assert not tops & (PACKAGES.keys() - {"laneformer"}), f"{module} imports a folder instead of its package"
        facade = {name for base, name in lines if base == "laneformer"} & {*laneformer.__all__}
        assert not facade or module == "laneformer", f"{module}: import {facade} from the modules that define them"


def names_from_tests(path: Path) -> set[str]:
    """The names that the file imports with `from tests import NAME`."""
    lines = [node for node in parsed(path) if isinstance(node, ast.ImportFrom) and node.module == "tests"]
    return {alias.name for node in lines for alias in node.names}


def test_data_files_do_not_import_jax():
    """Neither directly nor through another module: the build of the kernels and --help of the commands import them."""
    modules = [f"laneformer.{name}" for name in DATA_FILES if f"laneformer.{name}" in sources()]
    assert {"laneformer.config", "laneformer.layout", "laneformer.errors"} <= {*modules}
    code = f"import sys, {', '.join(modules)}\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def folders() -> dict[Path, list[Path]]:
    """The files of every folder in the packages and in tests/."""
    found: dict[Path, list[Path]] = {}
    for name in (*PACKAGES, "tests"):
        for path in (ROOT / name).rglob("*"):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and "__pycache__" not in parts and parts[:2] != ("custom_calls", "lib"):
                found.setdefault(path.parent, []).append(path)
    return found


def test_folders_are_small():
    too_large = {str(folder.relative_to(ROOT)): len(files) for folder, files in folders().items()}
    assert not {name: count for name, count in too_large.items() if count > MOST_FILES}


def test_every_package_folder_is_a_package():
    for folder, files in folders().items():
        of_python = any(path.suffix == ".py" for path in files) and folder.relative_to(ROOT).parts[0] in PACKAGES
        assert not of_python or folder / "__init__.py" in files, f"{folder.relative_to(ROOT)} has no __init__.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import train.loop", {"train.loop"}),
        ("def run():\n    from train import loop, Error", {"train.loop", "train"}),
        ("from ..engine import job", {"infer.engine.job"}),
        ("from . import pages", {"infer.serve.pages"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from train.loop import train", {"train.loop"}),
        ("import importlib\nimportlib.import_module('train.loop')", {"train.loop"}),
        ("from importlib import import_module as load\nHOUSE = 'train'\nload(HOUSE)", {"train"}),
        ("import importlib\nHOMES = {'Page': 'pages'}\nimportlib.import_module(HOMES['Page'])", {"infer.serve.pages"}),
        ("import runpy\nrunpy.run_module('train')", {"train"}),
        ("run(HOUSE := 'train.loop')", {"train.loop"}),
        ("print('train', 'pages')\nimport json", set()),
    ],
)
def test_imports_are_found_in_every_form(text, expected):
    known = {"train", "train.loop", "infer.engine.job", "infer.serve.pages", "infer.serve.worker"}
    assert imported([*ast.walk(ast.parse(text))], "infer.serve.worker", False, known) == expected
