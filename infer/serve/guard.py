"""Who may use the server: the key, and the names it answers to. Before anything else, for every route."""

import hashlib
import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.serve.pages import is_page
from infer.serve.protocol import ApiError

OPEN = ("/health",)  # for whatever watches over the process


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on that address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, key: str | None, hosts: Collection[str]):
        """key: without which only OPEN routes and the playground answer, whose page asks for it; None for no key.

        hosts: names besides localhost and IP addresses.
        """
        self._app, self._hosts = app, {"localhost", *(host.lower() for host in hosts)}
        self._key = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        name = host_name(headers.get("host", ""))
        if name not in self._hosts and not _is_address(name):
            # A page on the web can make its own name lead to this machine, and would then read our answers; an address
            # cannot be made so.
            raise ApiError(
                403,
                f"the request is for host {name!r}, which this server does not go by: start it with --allowed-host",
                code="host_not_allowed",
            )
        if self._key is None or path in OPEN or is_page(path, headers):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(key.strip()), self._key):
            raise ApiError(
                401,
                "a valid key is needed: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def host_name(header: str) -> str:
    """Of a Host header, without port."""
    name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdigit() and not header.endswith("]") else header
    return name.strip("[]").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    """Of the same length for every key: comparing tells nothing about it."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
