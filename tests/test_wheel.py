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

from custom_calls import build
from custom_calls.gpu import compile as gpu_compile
from custom_calls.library import library
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [pattern.removesuffix("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
LEFT_OUT = {"scripts"}  # its data files are batch files for clusters, examples to edit in a checkout


def data_files() -> set[str]:
    """The files of the packages that are not Python, relative to the checkout."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    names = {path.relative_to(ROOT).as_posix() for path in found if path.suffix not in (".py", ".pyc")}
    return {name for name in names if name.split("/")[0] not in LEFT_OUT and not name.startswith("custom_calls/lib/")}


def test_every_data_file_is_package_data():
    matched = set()
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        matched |= {path.relative_to(ROOT).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    assert data_files() <= matched
    assert {"custom_calls/cpu/decoder.cc", "infer/serve/playground/index.html"} <= data_files()


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "rocm"])
def test_gpu_extras_name_extras_of_jax(extra):
    (requirement,) = PROJECT["project"]["optional-dependencies"][extra]
    name = re.fullmatch(r"jax\[([\w-]+)\]>=0\.10", requirement)[1]
    assert name in metadata("jax").get_all("Provides-Extra")


def test_make_installs_the_named_extras(tmp_path):
    def commands(*arguments) -> str:
        command = ["make", "-n", "setup", f"VENV={tmp_path}", *arguments]
        return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout

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
from configs.tiny import tiny
from custom_calls.gpu import compile
from custom_calls.gpu.header import model_header
from custom_calls.gpu.layout import Layout
from custom_calls.gpu.tiling import H200
from infer.engine.native import plan_of
from laneformer import Precision

precision = Precision(param="bfloat16", compute="bfloat16")
source = types.SimpleNamespace(config=tiny().model, precision=precision, stored_dtype="bfloat16")
header = model_header(Layout(plan_of(source), H200, 8))
print(compile.image(header, "sm_90a", kernel=compile.STEPS)[:4])
"""


@pytest.mark.slow
@pytest.mark.skipif(build.compiler() is None, reason="the wheel is built without the native library: no C++ compiler")
@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="the wheel is built with setuptools 77: pip install '.[test]'"
)
def test_wheel_works_without_the_checkout(tmp_path):
    checkout = tmp_path / "checkout"
    for name in (*PACKAGES, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    (tmp_path / "empty").mkdir()
    library()  # compiles the native library unless it is compiled already

    def run(*command, status: int = 0, **environment) -> str:
        done = subprocess.run(
            [*map(str, command)],
            check=False,
            cwd=tmp_path / "empty",
            env=outside | environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stdout

    cache = tmp_path / "cache" / "laneformer"
    cache.mkdir(parents=True)
    shutil.copy(build.find(), cache)  # compiling takes minutes; installing in a checkout tests it
    built = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", checkout)
    run(sys.executable, "-m", "pip", *built)
    (wheel,) = (tmp_path / "wheels").glob("laneformer-*.whl")
    files = {*zipfile.ZipFile(wheel).namelist()}
    python_files = {
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert python_files | data_files() <= files
    assert not {name for name in files if name.startswith("tests/")}

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Share the installed packages but not their .pth files: one of them would add the checkout of an editable install.
    (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel)
    shutil.rmtree(checkout)
    shutil.rmtree(cache)

    laneformer = python.with_name("laneformer")
    listed = run(laneformer, "--help")
    assert listed.startswith("usage: laneformer COMMAND") and "  train " in listed
    assert "  laneformer_2b " in run(python, "-m", "train", status=2)
    assert "ceiling" in run(python, "-m", "infer", "roofline", "--checkpoint", "laneformer_2b")
    few = ("--context", 16, "--output-tokens", 8, "--runs", 1, "--warmup-runs", 0, "--json", tmp_path / "bench.json")
    bench = ("bench", "--checkpoint", "stdlib", "--backend", "cpu", *few)
    run(laneformer, *bench, CXX="not-a-compiler")  # the library is in the wheel
    assert json.loads((tmp_path / "bench.json").read_text())
    code = "from infer.serve.pages import Pages; print(Pages().response('index.html', {}).body)"
    assert "<html" in run(python, "-c", code)
    code = "import laneformer; from custom_calls import build; print(laneformer.__file__, build.find(), sep='\\n')"
    assert all(Path(line).is_relative_to(site) for line in run(python, "-c", code).split())
    if gpu_compile.nvcc() is not None:
        assert "ELF" in run(python, "-c", GPU_IMAGE)
