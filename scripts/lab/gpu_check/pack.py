"""One small file with what matters of a folder of results, for machines that return few files. Needs only Python."""

import io
import tarfile
from pathlib import Path

MOST = 15 << 20  # bytes before compression, so that the file stays below 16 MiB
MOST_LOG = 256 << 10  # bytes of the end of a log
# The first patterns matter most; larger files of later ones are left out.
PATTERNS = (
    "report.json",
    "report.md",
    "plan.json",
    "*.log",
    "*.json",
    "*.cudacore.txt",
    "rows/*.json",
    "*.npz",
    "*.ncu-rep",
    "*.json.gz",
    "*.cudacore",
)


def pack(folder: Path, target: Path) -> list[str]:
    """Writes the files of a folder into a .tgz, which a reader sees either as it was or complete. Returns the names of
    the files that are too large; CONTENTS in it lists them too.
    """
    left, named, left_out = MOST, set(), []
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(part, "w:gz", compresslevel=1) as tar:
        for pattern in PATTERNS:
            for path in sorted(folder.glob(pattern)):
                name = str(path.relative_to(folder))
                if name in named or not path.is_file() or path in (target, part):
                    continue
                named.add(name)
                size = path.stat().st_size
                kept = min(size, MOST_LOG) if path.suffix == ".log" else size
                if kept > left:
                    left_out.append(f"{name}: {size:,} bytes")
                    continue
                with path.open("rb") as file:
                    file.seek(size - kept)
                    _add(tar, name, file.read(kept))
                left -= kept
        _add(tar, "CONTENTS", "\n".join([*sorted(named), "", "too large:", *left_out, ""]).encode())
    part.replace(target)
    return left_out


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
