"""generation_config.json: the tokens that end an answer, and the sampling settings that a model's authors recommend."""

from pathlib import Path
from typing import Any

from laneformer.errors import CheckpointError, ConfigError
from laneformer.files import parse_json, read_file

FILE = "generation_config.json"


def read_generation(folder: Path) -> dict[str, Any]:
    """The values of a folder's generation_config.json, without nulls; {} without the file. Raises CheckpointError for a
    damaged file.
    """
    file = folder / FILE
    try:
        values = parse_json(read_file(file))
        if not isinstance(values, dict):
            raise ValueError(f"it is a JSON {type(values).__name__}, not an object")
    except FileNotFoundError:
        return {}
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file} as JSON ({error}): copy it again") from None
    return {name: value for name, value in values.items() if value is not None}


def end_tokens(values: Any) -> tuple[int, ...]:
    """Tokens that end a text, from the value of `eos_token_id`: a token, a list of tokens, or None. Negative ones mean
    that there is none. Raises ConfigError for other values.
    """
    tokens = values if isinstance(values, list) else [] if values is None else [values]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ConfigError(f"eos_token_id = {values!r}: write a token id or a list of token ids")
    return tuple(token for token in tokens if token >= 0)
