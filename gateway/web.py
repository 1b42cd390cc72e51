"""Plain HTTP beside the WebSocket: replies, the page's files, and which site may connect.

No I/O after `load_assets`: a request line and headers in, a `Reply` out.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinyvllm.gateway import json_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tinyvllm.gateway.protocol import ProtocolError

RESPONSES_PATH = "/v1/responses"

_JSON = "application/json"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": _JSON,
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Trusted Types make the browser itself refuse innerHTML: a model's text can only become DOM nodes.
_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_SAFETY_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REVALIDATE = {"Cache-Control": "no-cache"}
_NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response. Connections close after each: websockets has no keep-alive."""

    status: HTTPStatus
    headers: dict[str, str]
    body: bytes


def load_assets() -> dict[str, Reply]:
    """URL path -> reply, every file of static/ that has a known suffix, read once.

    Nothing else of the package can be asked for, so no path leads out of it.
    """
    root = resources.files("tinyvllm.gateway").joinpath("static")
    found: dict[str, Reply] = {}
    for entry in root.iterdir():
        kind = _KINDS.get(PurePosixPath(entry.name).suffix)
        if kind is not None and entry.is_file():
            path = "/" if entry.name == "index.html" else f"/{entry.name}"
            found[path] = reply(HTTPStatus.OK, entry.read_bytes(), kind, _REVALIDATE)
    return found


def json_reply(
    status: HTTPStatus, value: object, headers: Mapping[str, str] | None = None
) -> Reply:
    return reply(status, json_text.dumps(value), _JSON, {**_NO_STORE, **(headers or {})})


def text_reply(text: str, kind: str) -> Reply:
    return reply(HTTPStatus.OK, text.encode(), kind, _NO_STORE)


def empty_reply(headers: Mapping[str, str]) -> Reply:
    return reply(HTTPStatus.NO_CONTENT, b"", _JSON, {**_NO_STORE, **headers})


def error_reply(
    status: HTTPStatus,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    code: str | None = None,
) -> Reply:
    """An error in the shape of OpenAI's HTTP API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"type": kind, "code": code, "message": message, "param": None}
    return json_reply(status, {"error": error}, headers)


def protocol_error_reply(error: ProtocolError) -> Reply:
    return json_reply(HTTPStatus(error.status), {"error": error.body()})


def unauthorized() -> Reply:
    return error_reply(
        HTTPStatus.UNAUTHORIZED,
        "this server wants its token: Authorization: Bearer TOKEN",
        {"WWW-Authenticate": "Bearer"},
        code="unauthorized",
    )


def upgrade_required() -> Reply:
    return error_reply(
        HTTPStatus.UPGRADE_REQUIRED,
        f"{RESPONSES_PATH} speaks WebSocket only: connect to ws://.../v1/responses",
        {"Upgrade": "websocket"},
    )


def body_refused() -> Reply:
    """The reply to any request with a body, like a POST of OpenAI's HTTP API."""
    return error_reply(
        HTTPStatus.METHOD_NOT_ALLOWED,
        f"WebSocket only: ws://HOST{RESPONSES_PATH}; requests with a body are not served",
        {"Allow": "GET, HEAD, POST"},
    )


def models_reply(model: str, created: int, details: Mapping[str, Any]) -> Reply:
    """OpenAI's model list, with `details` of ours under `tinyvllm`."""
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "tinyvllm",
        "tinyvllm": dict(details),
    }
    return json_reply(HTTPStatus.OK, {"object": "list", "data": [entry]})


def origin_error(
    origin: str | None, host: str | None, *, allowed: Collection[str], loopback: bool
) -> str | None:
    """Why a WebSocket handshake with these headers must be refused, or None.

    Browsers let any site open a WebSocket to any host, and always name the site in Origin: it must
    be the page's own host, or one of `allowed` ("https://chat.example"). Programs send none. A
    server that listens on `loopback` also wants a loopback name in Host, or a site whose name is
    made to resolve to this machine (DNS rebinding) would pass as the same host.
    """
    if origin is not None and origin in allowed:
        return None
    host_name = _host_name(host)
    allowed_hosts = {_host_name(entry.partition("://")[2]) for entry in allowed}
    if loopback and host_name not in allowed_hosts and not is_loopback(host_name):
        return f"Host {host!r} is not a name of this machine; see --allow-origin"
    if origin is None:
        return None
    site = origin.partition("://")[2].lower()
    if not site or site != (host or "").lower():
        return f"Origin {origin!r} is not this server ({host}); see --allow-origin"
    return None


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address can only be this machine."""
    if host is None:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_name(host: str | None) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return None


def reply(
    status: HTTPStatus, body: bytes, kind: str, headers: Mapping[str, str] | None = None
) -> Reply:
    return Reply(
        status,
        {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Connection": "close",
            **_SAFETY_HEADERS,
            **(headers or {}),
        },
        body,
    )
