"""Compiles the native library when the package is installed, if a C++ compiler is found; see also pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent


class BuildNative(build_ext):
    """Runs custom_calls/build.py, loaded by its path, because importing the package would need JAX."""

    def run(self):
        spec = importlib.util.spec_from_file_location("build_native", HERE / "laneformer" / "custom_calls" / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        in_place = self.inplace or getattr(self, "editable_mode", False)
        folder = (HERE if in_place else Path(self.build_lib)) / "laneformer" / "custom_calls" / "lib"
        if problem := build.try_build(folder):
            print(f"installing without the native kernels; their first use compiles them: {problem}", file=sys.stderr)

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


setup(ext_modules=[Extension("laneformer.custom_calls.native", sources=[])], cmdclass={"build_ext": BuildNative})
