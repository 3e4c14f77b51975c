"""Which engines there are, and the environment that each needs: packages from PyPI in a folder of its own, never among
ours.
"""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from laneformer.errors import ConfigError
from scripts.peers.protocol import CPP_WRAPPER, XLA

INSTALLED = "laneformer-peer"  # file in an environment, written when everything is in it

# Each line is one call of pip.
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama.cpp": (("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),),  # compiled here, for this machine
    "torch": (("torch==2.13.0", "numpy"),),
    "openvino": (
        ("openvino==2026.4.1", "torch==2.13.0", "transformers==5.5.4", "optimum==2.3.0", "nncf==3.4.0"),
        # It also asks for torchvision, which it does not need here and which would have to be of the same build as
        # torch.
        ("--no-deps", "optimum-intel==2.2.0"),
    ),
}
VARIABLES = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}


@dataclass(frozen=True)
class Engine:
    """A program that speaks the protocol."""

    name: str
    module: str
    environment: str | None = None
    """One of ENVIRONMENTS; None for the Python that runs this."""
    option: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of the process."""

    def python(self, folder: Path) -> str | None:
        """The interpreter to run it with; None if its environment is not there, or of other versions."""
        return sys.executable if self.environment is None else installed(folder, self.environment)


INDUCTOR = (("TORCHINDUCTOR_COMPILE_THREADS", "1"),)  # no pool of processes beside the measured one
OURS = Engine("laneformer", "scripts.peers.ours")
PEERS = {
    engine.name: engine
    for engine in (
        Engine("llama.cpp", "scripts.peers.llama_cpp", "llama.cpp"),
        Engine("torch", "scripts.peers.torch_compiled", "torch", variables=INDUCTOR),
        Engine("openvino", "scripts.peers.openvino_ir", "openvino"),
        Engine("torch-cpp", "scripts.peers.torch_compiled", "torch", option=CPP_WRAPPER, variables=INDUCTOR),
        Engine("xla", "scripts.peers.ours", option=XLA),
    )
}


def installed(folder: Path, name: str) -> str | None:
    """The Python of an environment that is complete and has what ENVIRONMENTS says now."""
    marker = folder / name / INSTALLED
    return (
        str(folder / name / "bin" / "python")
        if marker.exists() and marker.read_text() == repr(ENVIRONMENTS[name])
        else None
    )


def set_up(folder: Path, names: list[str]) -> str:
    """Makes environments, and says a line of each. Raises ConfigError if one of them failed, after the others."""
    lines, failed = [], []
    for name in names:
        log = folder / f"{name}.log"
        if installed(folder, name):
            lines.append(f"{name}: was there")
        elif _install(folder / name, name, log):
            lines.append(f"{name}: installed")
        else:
            failed.append(f"{name}: pip failed, {log} has what it said")
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
