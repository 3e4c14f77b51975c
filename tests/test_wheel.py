"""A wheel built from the checkout contains all files and works without the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import laneformer
from laneformer.custom_calls import build
from laneformer.custom_calls.gpu import compile as gpu_compile
from laneformer.custom_calls.library import library
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("laneformer", "custom_calls", "infer", "train", "configs", "scripts")
# The laboratory, and scripts for clusters, which are examples to edit in a checkout.
LEFT_OUT = ("laneformer/commands/lab/", "laneformer/commands/cluster/", "laneformer/commands/gpu_check.sh")


def package_files() -> set[str]:
    """The files that a wheel must have, by their names in it."""
    folders = ((folder, names) for folder, _, names in os.walk(ROOT / "laneformer", followlinks=True))
    paths = (Path(folder, name).relative_to(ROOT) for folder, names in folders for name in names)
    files = {path.as_posix() for path in paths if path.suffix != ".pyc"}
    return {name for name in files if not name.startswith((*LEFT_OUT, "laneformer/custom_calls/lib/"))}


def data_files() -> set[str]:
    """Those that are not Python."""
    return {name for name in package_files() if not name.endswith(".py")}


def test_every_data_file_is_package_data():
    matched = set()
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        matched |= {path.relative_to(ROOT).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    assert data_files() <= matched
    expected = {"py.typed", "custom_calls/cpu/decoder.cc", "infer/serve/playground/index.html"}
    assert {f"laneformer/{name}" for name in expected} <= data_files()


def test_version_is_the_same_everywhere():
    cited = re.search(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited[1] == laneformer.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "rocm"])
def test_gpu_extras_name_extras_of_jax(extra):
    (requirement,) = PROJECT["project"]["optional-dependencies"][extra]
    name = re.fullmatch(r"jax\[([\w-]+)\]>=0\.10", requirement)[1]
    assert name in metadata("jax").get_all("Provides-Extra")


def test_make_installs_the_named_extras(tmp_path):
    def commands(*arguments) -> str:
        command = ["make", "-n", "setup", f"VENV={tmp_path}", *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in ("EXTRAS", "PIP", "MAKEFLAGS")}
        done = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.stdout

    assert "install --quiet --disable-pip-version-check -e '.[test]'" in commands()
    assert "-e '.[test,cuda13]'" in commands("EXTRAS=test,cuda13")
    assert "-e '.[test]' -c constraints.txt" in commands("PIP=-c constraints.txt")


def test_constraints_pin_every_requirement():
    """constraints.txt has one version of every package that pyproject.toml names, which its bound allows."""
    pinned: dict[str, list[Version]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            (specifier,) = (pin := Requirement(line)).specifier
            assert specifier.operator == "==", line
            pinned.setdefault(canonicalize_name(pin.name), []).append(Version(specifier.version))
    extras = PROJECT["project"]["optional-dependencies"]
    listed = (*PROJECT["project"]["dependencies"], *(one for name in extras for one in extras[name]))
    for requirement in map(Requirement, listed):
        if requirement.name != "laneformer":
            versions = pinned[canonicalize_name(requirement.name)]
            assert all(requirement.specifier.contains(one) for one in versions), requirement


GPU_IMAGE = """
import types
from laneformer.recipes.tiny import tiny
from laneformer.custom_calls.gpu import compile
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200
from laneformer.infer.engine.native import plan_of
from laneformer import Precision

precision = Precision(param="bfloat16", compute="bfloat16")
source = types.SimpleNamespace(config=tiny().model, precision=precision, stored_dtype="bfloat16")
header = model_header(Layout(plan_of(source), H200, 8))
print(compile.image(header, "sm_90a", kernel=compile.STEPS)[:4])
"""


# Imports every module and asks every command for help, in a folder whose files have the names of ours.
EVERYTHING = """
import contextlib, importlib, io, os, pkgutil, sys
import laneformer

print(laneformer.__file__)
names = [info.name for info in pkgutil.walk_packages(laneformer.__path__, "laneformer.")]
for name in names:
    if not name.startswith("laneformer.commands.lab"):
        importlib.import_module(name)
from laneformer.commands import __main__ as console

for command in console.commands():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        console.main([command, "--help"])
    assert f"usage: laneformer {command}" in out.getvalue(), command
for name in laneformer.__all__:
    getattr(laneformer, name)
assert not {"train", "infer", "configs", "scripts", "custom_calls"} & {*sys.modules}
"""
LIBRARY = build.compiler() is not None and int(version("setuptools").split(".")[0]) >= 77
needs_setup = pytest.mark.skipif(
    not LIBRARY, reason="a C++ compiler and setuptools 77 are needed: pip install '.[test]'"
)


class Install:
    """An installation of a copy of the checkout in its own virtual environment, used in the folder of a user who has
    files of the same names as ours.
    """

    def __init__(self, folder: Path):
        self.folder, self.checkout, self.python = folder, folder / "checkout", folder / "venv" / "bin" / "python"
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        for name in (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
            if (ROOT / name).is_dir():
                skipped = shutil.ignore_patterns("__pycache__", "lib")
                shutil.copytree(ROOT / name, self.checkout / name, symlinks=True, ignore=skipped)
            else:
                shutil.copy(ROOT / name, self.checkout / name)
        (folder / "user").mkdir()
        for name in ("train.py", "infer.py", "configs.py", "scripts.py", "custom_calls.py"):
            (folder / "user" / name).write_text("raise SystemExit('this file is of the user')\n")
        library()  # compiles the native library unless it is compiled already
        (folder / "cache" / "laneformer").mkdir(parents=True)
        shutil.copy(build.find(), folder / "cache" / "laneformer")  # compiling takes minutes
        venv.create(folder / "venv")
        # Shares the installed packages but not their .pth files, one of which may add the checkout.
        site = self.run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        self.site = Path(site)
        (self.site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))

    def run(self, *command, status: int = 0, **environment) -> str:
        done = subprocess.run(
            [*map(str, command)],
            check=False,
            cwd=self.folder / "user",
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stdout

    def pip(self, command: str, *arguments) -> None:
        options = ("-q", "--no-deps", *(("--ignore-installed",) if command == "install" else ()))
        self.run(self.python, "-m", "pip", command, *options, *arguments)


@pytest.mark.slow
@needs_setup
def test_editable_install_works_beside_files_of_the_same_names(tmp_path):
    install = Install(tmp_path)
    install.pip("install", "--no-build-isolation", "-e", install.checkout)
    place = install.run(install.python, "-c", EVERYTHING).splitlines()[0]
    assert Path(place).is_relative_to(install.checkout)
    assert "  laneformer_2b " in install.run(install.python.with_name("laneformer"), "train", status=2)


@pytest.mark.slow
@needs_setup
def test_wheel_works_without_the_checkout(tmp_path):
    install = Install(tmp_path)
    run, python = install.run, install.python
    install.pip("wheel", "--no-build-isolation", "-w", tmp_path / "wheels", install.checkout)
    (wheel,) = (tmp_path / "wheels").glob("laneformer-*.whl")
    files = {*zipfile.ZipFile(wheel).namelist()}
    assert package_files() <= files
    assert {name.split("/")[0].split("-")[0] for name in files} == {"laneformer"}  # and its dist-info
    assert not {name for name in files if name.startswith(LEFT_OUT)}
    install.pip("install", wheel)
    shutil.rmtree(install.checkout)
    shutil.rmtree(tmp_path / "cache")

    place = run(python, "-c", EVERYTHING).splitlines()[0]
    assert Path(place).is_relative_to(install.site)
    command = python.with_name("laneformer")
    listed = run(command, "--help")
    assert listed.startswith("usage: laneformer COMMAND") and "  train " in listed
    assert "  laneformer_2b " in run(python, "-m", "laneformer.train", status=2)
    assert "ceiling" in run(python, "-m", "laneformer.infer", "roofline", "--checkpoint", "laneformer_2b")
    few = ("--context", 16, "--output-tokens", 8, "--runs", 1, "--warmup-runs", 0, "--json", tmp_path / "bench.json")
    bench = ("bench", "--checkpoint", "stdlib", "--backend", "cpu", *few)
    run(command, *bench, CXX="not-a-compiler")  # the library is in the wheel
    assert json.loads((tmp_path / "bench.json").read_text())
    code = "from laneformer.infer.serve.pages import Pages; print(Pages().response('index.html', {}).body)"
    assert "<html" in run(python, "-c", code)
    code = "from laneformer.custom_calls import build; print(build.__file__, build.find(), sep='\\n')"
    assert all(Path(line).is_relative_to(install.site) for line in run(python, "-c", code).split())
    if gpu_compile.nvcc() is not None:
        assert "ELF" in run(python, "-c", GPU_IMAGE)
