"""python -m infer roofline: project the speed of a model on hardware that you do not have."""

from infer.roofline.hf_config import read_config_file
from infer.roofline.options import Options, check

__all__ = ["Options", "run"]


def run(options: Options) -> int:
    described = read_config_file(options.config) if options.config else None
    check(options, described)
    from infer.roofline.run import run as report  # imports JAX, which --help and a mistake do not need

    return report(options, described)
