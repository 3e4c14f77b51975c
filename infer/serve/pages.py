"""The playground's files. They contain nothing about the model, so they need no key. The page asks the user for it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = "/playground/"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # forbids innerHTML
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers must revalidate, so that an upgraded server does not show an old page
    "Vary": "Accept",
}


def is_page(path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request is for the playground: one of its files, or "/" from a client that accepts HTML."""
    return path.startswith(FOLDER) or (path == "/" and "text/html" in headers.get("accept", ""))


class Pages:
    """The files of the playground, read once."""

    def __init__(self):
        files = Path(__file__).with_name("playground").iterdir()
        self._files = {file.name: file.read_bytes() for file in files if file.suffix in TYPES}

    def response(self, name: str, headers: Mapping[str, str]) -> Response:
        """The answer to a request for a file. headers: those of the request. Raises HTTPException for an unknown
        file.
        """
        if name not in self._files:
            raise HTTPException(404)
        body = self._files[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        same = tag in headers.get("if-none-match", "")
        return Response(b"" if same else body, 304 if same else 200, {**HEADERS, "ETag": tag}, TYPES[Path(name).suffix])
