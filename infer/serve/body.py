"""The body of a request as JSON, and errors in OpenAI's form."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout",
}
NESTED = "the request is nested too deeply"
MOST_DIGITS = 100  # digits of a number
LARGE = 1 << 14  # characters searched or bytes read at once: what takes longer lets other threads run meanwhile
LONGEST_SUSPECT = 1 << 7  # characters of a match of SUSPECT, at most
MOST_PARTS = 50_000  # objects, lists and names of a request: making them keeps the interpreter lock, 0.5 us each
# Matches text that needs the slow check: halves of surrogate pairs, long numbers, large exponents, and words that are
# not JSON.
# It tries each run of digits once, from its start.
SUSPECT = re.compile(rf"\\u[dD][89a-fA-F]|(?<!\d)\d{{{MOST_DIGITS + 1}}}|[eE]\+?\d{{3}}|NaN|Infinity")


class ApiError(Exception):
    """An error as an answer: HTTP status, and a body in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Unusable(str):
    """A number that no parameter accepts, kept as the text of the request."""


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError with the name of the parameter unless the body is UTF-8, every name
    appears once, strings have no halves of surrogate pairs, and numbers are finite and have at most MOST_DIGITS digits;
    also if the body has more than MOST_PARTS objects, lists and names.
    """
    if _parts(body) > MOST_PARTS and (parts := _parts(_without_strings(body))) > MOST_PARTS:
        raise ApiError(400, f"the request has {parts:,} objects, lists and names: give at most {MOST_PARTS:,}")
    try:
        text = body.decode()
        if _suspect(text):
            fields = json.loads(
                text, object_pairs_hook=_object, parse_constant=_Unusable, parse_int=_integer, parse_float=_number
            )
            if found := _problem(fields):
                path, problem = found
                name = path.removeprefix(".")
                raise ApiError(400, f"{name or 'the body'} {problem}", param=name or None)
        else:
            # Functions in Python, because otherwise a long list keeps the interpreter lock until it is read.
            whole, real = (_integer, _number) if len(text) > LARGE else (None, None)
            fields = json.loads(text, object_pairs_hook=_object, parse_int=whole, parse_float=real)
    except RecursionError:
        raise ApiError(400, NESTED) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}: send JSON in UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, 'the body must be a JSON object, as in {"prompt": "..."}')
    return fields


def _suspect(text: str) -> bool:
    """Whether the text matches SUSPECT. The interpreter lock is free between pieces: all of 1 MB take 0.15 s."""
    return any(SUSPECT.search(text, at, at + LARGE + LONGEST_SUSPECT) for at in range(0, len(text), LARGE))


def _parts(body: bytes) -> int:
    return sum(map(body.count, (b"{", b"[", b":")))


def _without_strings(body: bytes) -> bytes:
    return b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                twice = printable(name)
                raise ApiError(400, f"{twice} appears twice in one object: give it once", param=twice)
            names.add(name)
    return made


def _integer(text: str) -> int | _Unusable:
    return int(text) if len(text) <= MOST_DIGITS else _Unusable(text)


def _number(text: str) -> float | _Unusable:
    return value if len(text) <= MOST_DIGITS and math.isfinite(value := float(text)) else _Unusable(text)


def _problem(value: Any) -> tuple[str, str] | None:
    """The path and the fault of the first value in `value` that no parameter accepts; None without one. The path is
    built from its end, so that its cost does not depend on how many values are read.
    """
    if isinstance(value, _Unusable):
        shown = value if len(value) <= 40 else f"{value[:20]}... ({len(value)} characters)"
        return "", f"= {shown}: give a finite number of at most {MOST_DIGITS} digits"
    if isinstance(value, str) and not _is_unicode(value):
        return "", "is not valid Unicode: it has half of a surrogate pair; send whole characters"
    if isinstance(value, dict):
        for key, each in value.items():
            if not _is_unicode(key):
                problem = "is not a name in valid Unicode: it has half of a surrogate pair; send whole characters"
                return f".{printable(key)}", problem
            if found := _problem(each):
                return f".{printable(key)}{found[0]}", found[1]
    elif isinstance(value, list):
        for i, each in enumerate(value):
            if found := _problem(each):
                return f"[{i}]{found[0]}", found[1]
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(name: str) -> str:
    """A name from the request in a form for messages: with escapes, and at most 80 characters of it."""
    text = name if name.isprintable() and _is_unicode(name) else json.dumps(name)[1:-1]
    return text if len(text) <= 80 else text[:80] + "..."


def shown(value: Any) -> str:
    """A value of the request in a form for messages: as JSON, and at most 80 characters of it."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "..."


def wrong(name: str, value: Any, wanted: str) -> ApiError:
    """The error for a value that a parameter does not accept. wanted: description of the accepted values."""
    return ApiError(400, f"{name} = {shown(value)}: give {wanted}", param=name)
