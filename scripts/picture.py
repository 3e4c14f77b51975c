"""Pictures with matplotlib, which is an extra: drawn without a display, the same bytes each time."""

from pathlib import Path

from laneformer.errors import InputError


def pyplot():
    """matplotlib.pyplot. Raises InputError, saying how to get it, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("pictures need matplotlib: pip install -e '.[plots]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "laneformer"}  # small files, the same each time
    import matplotlib.pyplot as plt

    return plt


def save(figure, path: Path) -> Path:
    """Writes the figure as .png or .svg and returns the path. Raises InputError for another kind of file."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"cannot draw {path}: name it .png or .svg")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
