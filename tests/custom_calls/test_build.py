"""Building the native library: errors if that is impossible, what causes a new build, and which library is loaded."""

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laneformer import custom_calls
from laneformer.custom_calls import build, library
from laneformer.custom_calls.build import BuildError
from laneformer.custom_calls.library import NativeError


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Sources that compile quickly instead of the library's, and a separate cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.cc").write_text('extern "C" int laneformer_answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", (folder,))
    (tmp_path / "shared.h").write_text("")
    monkeypatch.setattr(build, "SHARED", tmp_path / "shared.h")
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """A function that replaces jaxlib's headers by headers with the given minor FFI version."""

    def version(minor: int) -> None:
        file = tmp_path / "include/xla/ffi/api/c_api.h"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"// text\n#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR {minor}\n")
        monkeypatch.setattr(build, "headers", lambda: tmp_path / "include")

    return version


@pytest.mark.parametrize("cxx", [None, "nowhere"])
def test_missing_compiler_is_reported_with_the_remedy(cxx, sources, monkeypatch):
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CXX", cxx)
    assert build.compiler() is None
    assert "install g++" in custom_calls.unavailable()
    with pytest.raises(BuildError, match=f"{cxx or 'clang'}.*install g\\+\\+"):
        build.build()
    library.library.cache_clear()
    try:
        with pytest.raises(NativeError, match="install g\\+\\+"):
            library.library()
    finally:
        library.library.cache_clear()
    assert not build.cache().exists()


def test_built_library_needs_no_compiler(sources, monkeypatch):
    made = build.build()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "nowhere")
    assert build.find() == made
    assert custom_calls.unavailable() is None


def test_missing_jaxlib_is_reported(monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert "jaxlib" in custom_calls.unavailable()


def test_compiler_errors_are_reported(sources):
    (sources / "small.cc").write_text("int f() { return undeclared_thing; }\n")
    with pytest.raises(BuildError, match=r"(?s)compiling failed: .*small\.cc.*undeclared_thing"):
        build.build()
    assert not build.cache().exists()


def test_command_without_a_compiler_reports_one_line(tmp_path):
    def command(**env):
        text = [sys.executable, "-m", "custom_calls", "--out", str(tmp_path / "out")]
        return subprocess.run(text, capture_output=True, text=True, check=False, env=os.environ | env)

    done = command(CXX="nowhere")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: no C++ compiler was found (nowhere)")
    assert not (tmp_path / "out").exists()


def test_key_changes_with_sources_flags_and_headers(sources, headers, monkeypatch):
    headers(3)
    first = build.key()
    assert build.key() == first and len(first) == 16
    headers(4)
    assert build.key() != first
    headers(3)
    text = (sources / "small.cc").read_text()
    (sources / "small.cc").write_text(text + "//\n")
    assert build.key() != first
    (sources / "small.cc").write_text(text)
    assert build.key() == first
    (sources / "small.cc").rename(sources / "other.cc")
    assert build.key() != first
    (sources / "other.cc").rename(sources / "small.cc")
    with monkeypatch.context() as patch:
        patch.setattr(build, "generated", lambda: {"plan_ops.h": "struct Attend {};"})
        assert build.key() != first
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.key() != first


def test_changed_source_is_compiled_again(sources):
    first = build.build()
    assert build.find() == first == build.cache() / f"cpu-{build.key()}.so"
    (sources / "small.cc").write_text('extern "C" int laneformer_answer() { return 43; }\n')
    assert build.find() is None
    second = build.build()
    assert build.find() == second != first


def test_installed_library_has_precedence(sources):
    build.build()
    installed = build.build(build.INSTALLED)
    assert build.find() == installed


def test_library_is_written_atomically(sources, monkeypatch):
    """Other processes find no file or the complete file: the copy has another name until it is complete."""
    states = []

    def replace(self, target):
        states.append((build.find(), self.parent == target.parent, self.stat().st_size))
        return rename(self, target)

    rename = Path.replace
    monkeypatch.setattr(Path, "replace", replace)
    made = build.build()
    assert states == [(None, True, made.stat().st_size)]
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert stat.S_ISREG(made.stat().st_mode)


def test_library_is_compiled_once_by_several_processes(sources, tmp_path, monkeypatch):
    compiled, ways = [], build.compile_objects

    def slowly(*args, **kwargs):
        compiled.append(args)
        time.sleep(0.2)
        return ways(*args, **kwargs)

    monkeypatch.setattr(build, "compile_objects", slowly)
    with ThreadPoolExecutor(3) as pool:  # each thread opens the lock file, as processes do
        made = set(pool.map(lambda _: build.build(tmp_path / "new"), range(3)))
    assert len(made) == len(compiled) == 1 and list((tmp_path / "new").iterdir()) == list(made)
    assert build.build(tmp_path / "new") in made and len(compiled) == 2, "a later call compiles again"


def test_library_for_another_ffi_version_is_not_registered(headers, monkeypatch):
    path = build.find() or build.build()
    headers(99)
    monkeypatch.setattr(build, "find", lambda: path)
    registered = []
    monkeypatch.setattr(library.jax.ffi, "register_ffi_target", lambda *a, **k: registered.append(a))
    library.library.cache_clear()
    try:
        with pytest.raises(NativeError, match=r"version 0\.\d+ .* 0\.99: remove the file"):
            library.library()
    finally:
        library.library.cache_clear()
    assert registered == []


def test_invalid_library_file_is_an_error(tmp_path, monkeypatch):
    broken = tmp_path / "cpu-broken.so"
    broken.write_bytes(b"nothing")
    monkeypatch.setattr(build, "find", lambda: broken)
    library.library.cache_clear()
    try:
        with pytest.raises(NativeError, match=r"cannot be used.*cpu-broken"):
            library.library()
    finally:
        library.library.cache_clear()


@pytest.mark.parametrize("broken", ["missing", "fails", "not a program", "long output"])
def test_installation_continues_without_a_working_compiler(sources, tmp_path, monkeypatch, broken):
    compiler = tmp_path / "compiler"
    if broken != "missing":
        compiler.write_text(
            {"fails": "#!/bin/sh\nexit 1\n", "long output": "#!/bin/sh\nseq 9999 >&2; exit 1\n"}.get(broken, "x")
        )
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    reason = build.try_build(tmp_path / "lib")
    assert reason and "\n" not in reason and len(reason) <= 500 and not (tmp_path / "lib").exists()


def test_broken_compiler_makes_the_library_unavailable(sources, tmp_path, monkeypatch):
    """Backend auto then chooses another backend."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library._compile.cache_clear()
    try:
        assert custom_calls.unavailable().endswith("broken): repair the C++ compiler, or name another in CXX")
    finally:
        library._compile.cache_clear()


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_these_sources_compile():
    """Tests of the CPU kernel skip where there is no library."""
    assert custom_calls.unavailable() is None


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_installation_compiles_the_library_once(sources, tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "cpu-0000.so").touch()  # a library of other sources
    assert build.try_build(folder) is None
    (made,) = folder.glob("cpu-*.so")
    assert made.stat().st_size and build.find() is None, "find searches only the package's folder and the cache"

    monkeypatch.setattr(build, "INSTALLED", folder)
    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_objects", None)
        assert build.try_build(folder) is None and list(folder.iterdir()) == [made]
        assert build.try_build(tmp_path / "wheel" / "lib") is None
    assert (tmp_path / "wheel" / "lib" / made.name).read_bytes() == made.read_bytes()

    compiled, ways = [], build.compile_objects
    monkeypatch.setattr(build, "compile_objects", lambda cxx, *a, **k: compiled.append(cxx) or ways(cxx, *a, **k))
    monkeypatch.setenv("CXX", build.compiler()[0])
    assert build.try_build(folder) is None and compiled == [build.compiler()], "CXX forces a build"
