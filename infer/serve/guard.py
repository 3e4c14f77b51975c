"""Access control before every route: the key, and the host names that the server accepts."""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.pages import is_page

KEY = "laneformer.key"  # in a request's scope: a name of its key
OPEN = ("/health",)  # routes without a key, for process supervisors


def is_loopback(host: str) -> bool:
    """Whether a server on this address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware that refuses requests without the key or for another host name."""

    def __init__(self, app: ASGIApp, keys: Collection[str], hosts: Collection[str]):
        """keys: all routes require one of them, except OPEN routes and the files of the playground, whose page asks for
        it; without any, no route requires a key. hosts: host names to accept besides localhost and IP addresses.
        """
        self._app, self._hosts = app, {"localhost", *(host.lower() for host in hosts)}
        self._keys = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[KEY] = self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> str:
        """A name of the request's key, which does not reveal it; "" without a key. Raises ApiError."""
        if "transfer-encoding" in headers and "content-length" in headers:
            # Servers and proxies that each believe another one of the two see different requests.
            raise ApiError(
                400,
                "Transfer-Encoding and Content-Length contradict each other: send only one of them",
                headers={"Connection": "close"},
            )
        name = host_name(headers.get("host", ""))
        if name not in self._hosts and not _is_address(name):
            # A web page can point its own host name at this machine and then read the answers (DNS rebinding). This is
            # impossible with an address.
            raise ApiError(
                403,
                f"host {name!r} is not allowed: start the server with --allowed-host {name}",
                code="host_not_allowed",
            )
        if not self._keys or path in OPEN or is_page(path, headers):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        right = [hmac.compare_digest(given, each) for each in self._keys]  # all, so that the time reveals none
        if scheme.lower() != "bearer" or not any(right):
            raise ApiError(
                401,
                "the key is missing or wrong: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.hex()


def error_response(error: ApiError, kind: type[Response] = Response) -> Response:
    """An error as a response. It is ASCII, so that no text of a request can make it fail."""
    return kind(json.dumps(error.body), error.status, error.headers, media_type="application/json")


def host_name(header: str) -> str:
    """The host name in a Host header, without port."""
    name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdigit() and not header.endswith("]") else header
    return name.strip("[]").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    """A hash of a key. The time for comparing hashes reveals nothing about the key, not even its length."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
