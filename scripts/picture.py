"""Pictures with matplotlib, an optional dependency: drawn without a display, reproducible byte for byte."""

from pathlib import Path

from laneformer.errors import InputError


def pyplot():
    """Imports matplotlib.pyplot. Raises InputError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("pictures need matplotlib; install it with pip install -e '.[plots]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "laneformer"}  # small, reproducible files
    import matplotlib.pyplot as plt

    return plt


def save(figure, path: Path) -> Path:
    """Writes the figure as .png or .svg and returns the path. Raises InputError for another kind of file."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"cannot draw {path}; choose a name that ends in .png or .svg")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
