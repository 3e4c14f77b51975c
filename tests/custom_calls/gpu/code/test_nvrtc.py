"""NVRTC, which compiles kernels where there is no CUDA toolkit. Needs no GPU."""

import os
import subprocess
import sys

import pytest

from laneformer.custom_calls import build
from laneformer.custom_calls.build import BuildError
from laneformer.custom_calls.gpu import compile as gpu_build

KERNEL = 'extern "C" __global__ void kernel(float* x) { x[0] = expf(x[0]) / x[1]; }'
COMPILE = """
import sys
from pathlib import Path
from laneformer.custom_calls.gpu import compile

compile.nvcc = lambda: None
folder = Path(sys.argv[1])
compile.compiler("sm_90a")(folder, folder / "image", "sm_90a")
"""


@pytest.mark.slow
@pytest.mark.skipif(gpu_build.nvrtc() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
def test_nvrtc_of_a_wheel_compiles_without_a_toolkit(tmp_path):
    """In a new process, because a library stays loaded, and without the linker's path of a toolkit."""
    (tmp_path / gpu_build.KERNEL).write_text(KERNEL)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", COMPILE, tmp_path], check=True, env=environment)
    image = (tmp_path / "image").read_bytes()
    assert image.startswith(b"\x7fELF") and b".text.kernel" in image


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A folder of libraries as wheels install them, with two versions of NVRTC that no CUDA has."""
    folder = tmp_path / "nvidia" / "cu99" / "lib"
    folder.mkdir(parents=True)
    for version in (98, 99):
        (folder / f"libnvrtc.so.{version}").write_text("not a library")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize(("driver", "version"), [(None, 99), (100, 99), (99, 99), (98, 98)])
def test_newest_nvrtc_is_used_whose_code_the_driver_runs(driver, version, wheel, monkeypatch):
    monkeypatch.setattr(gpu_build, "driver_version", lambda: driver)
    assert gpu_build.nvrtc() == wheel / f"libnvrtc.so.{version}"


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_broken_nvrtc_is_an_error_of_one_line(wheel):
    with pytest.raises(BuildError) as error:
        gpu_build.load_nvrtc(wheel / "libnvrtc.so.99")
    assert str(wheel / "libnvrtc.so.99") in one_line(error)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_nvrtc_without_its_built_in_functions_is_an_error_of_one_line(wheel, monkeypatch):
    """Reported before anything is compiled, with the missing file and the package that has it."""
    source, library = wheel / "nvrtc.cc", wheel / "libnvrtc.so.12"
    source.write_text('extern "C" int nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = 9, 0; }')
    subprocess.run([*build.compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setattr(gpu_build, "nvcc", lambda: None)
    monkeypatch.setattr(gpu_build, "nvrtc", lambda: library)
    with pytest.raises(BuildError) as error:
        gpu_build.compiler("sm_90a")
    message = one_line(error)
    assert str(wheel / "libnvrtc-builtins.so.12.9") in message and message.endswith(" nvidia-cuda-nvrtc-cu12")
