"""The engines, and the environment that each needs: packages from PyPI in a separate folder."""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from laneformer.commands.lab.peers.gguf_file import QUANTIZED
from laneformer.commands.lab.peers.protocol import BF12, CPP_WRAPPER, XLA
from laneformer.errors import ConfigError

INSTALLED = "laneformer-peer"  # file in an environment, written once it is complete

# Each entry is one call of pip.
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama.cpp": (("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),),  # compiled for this machine
    "torch": (("torch==2.13.0", "numpy"),),
    "openvino": (
        ("openvino==2026.4.1", "torch==2.13.0", "transformers==5.5.4", "optimum==2.3.0", "nncf==3.4.0"),
        # Without its dependency torchvision, which is unused here and would have to match the build of torch.
        ("--no-deps", "optimum-intel==2.2.0"),
    ),
}
VARIABLES = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}


@dataclass(frozen=True)
class Engine:
    """A program that implements the protocol (scripts/lab/peers/protocol.py)."""

    name: str
    module: str
    environment: str | None = None
    """One of ENVIRONMENTS; None for the current Python."""
    option: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of the process."""
    quantized: tuple[str, ...] = ()
    """Kinds of quantized weights that the engine supports."""
    beyond_llama: bool = False
    """Whether the engine runs other architectures than a dense Llama."""

    def python(self, folder: Path) -> str | None:
        """The interpreter to run the engine with; None if its environment is missing or has other versions."""
        return sys.executable if self.environment is None else installed(folder, self.environment)


SERVING = {  # name of an engine -> its program that serves requests
    "laneformer": "scripts.lab.peers.ours_serving",
    "llama.cpp": "scripts.lab.peers.llama_cpp_serving",
}
INDUCTOR = (("TORCHINDUCTOR_COMPILE_THREADS", "1"),)  # no pool of processes next to the measured one
OURS = Engine("laneformer", "scripts.lab.peers.ours")
PEERS = {
    engine.name: engine
    for engine in (
        Engine("llama.cpp", "scripts.lab.peers.llama_cpp", "llama.cpp", quantized=tuple(QUANTIZED), beyond_llama=True),
        Engine("torch", "scripts.lab.peers.torch_compiled", "torch", variables=INDUCTOR),
        Engine("openvino", "scripts.lab.peers.openvino_ir", "openvino"),
        Engine("torch-cpp", "scripts.lab.peers.torch_compiled", "torch", option=CPP_WRAPPER, variables=INDUCTOR),
        Engine("xla", "scripts.lab.peers.ours", option=XLA),
        Engine("bf12", "scripts.lab.peers.ours", option=BF12),
    )
}


def installed(folder: Path, name: str) -> str | None:
    """The Python of an environment; None unless it is complete and matches ENVIRONMENTS."""
    marker = folder / name / INSTALLED
    return (
        str(folder / name / "bin" / "python")
        if marker.exists() and marker.read_text() == repr(ENVIRONMENTS[name])
        else None
    )


def set_up(folder: Path, names: list[str]) -> str:
    """Installs environments; returns a line for each. Raises ConfigError if any failed, after trying all."""
    lines, failed = [], []
    for name in names:
        log = folder / f"{name}.log"
        if installed(folder, name):
            lines.append(f"{name}: already installed")
        elif _install(folder / name, name, log):
            lines.append(f"{name}: installed")
        else:
            failed.append(f"{name}: pip failed, see {log}")
    if failed:
        raise ConfigError("; ".join([*failed, *lines]))
    return "\n".join(lines)


def _install(place: Path, name: str, log: Path) -> bool:
    print(f"{name}: installing into {place}, see {log}", file=sys.stderr, flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    venv.create(place, clear=True, with_pip=True)
    with log.open("w", encoding="utf-8") as file:
        for packages in ENVIRONMENTS[name]:
            command = [str(place / "bin" / "python"), "-m", "pip", "install", *packages]
            if subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=VARIABLES | os.environ, check=False
            ).returncode:
                return False
    (place / INSTALLED).write_text(repr(ENVIRONMENTS[name]))
    return True
