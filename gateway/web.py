"""Plain HTTP beside the WebSocket: the chat page, /healthz, /v1/models; and who may connect.

No I/O after `load_assets`: a request line and headers in, a `Reply` out.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinyvllm.gateway.protocol import dumps

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

RESPONSES_PATH = "/v1/responses"

_JSON = "application/json"
# The whole site: nothing else of the package can be asked for, so no path leads out of it.
_ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/theme.js": ("theme.js", "text/javascript; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/client.js": ("client.js", "text/javascript; charset=utf-8"),
    "/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
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


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response. Connections close after each: websockets has no keep-alive."""

    status: HTTPStatus
    headers: dict[str, str]
    body: bytes


def load_assets() -> dict[str, Reply]:
    """URL path -> reply, every file of the page, read once."""
    root = resources.files("tinyvllm.gateway").joinpath("static")
    return {
        path: _reply(
            HTTPStatus.OK, root.joinpath(name).read_bytes(), kind, {"Cache-Control": "no-cache"}
        )
        for path, (name, kind) in _ASSETS.items()
    }


def json_reply(
    status: HTTPStatus, value: object, headers: Mapping[str, str] | None = None
) -> Reply:
    return _reply(status, dumps(value), _JSON, {"Cache-Control": "no-store", **(headers or {})})


def error_reply(
    status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None
) -> Reply:
    """An error in the shape of OpenAI's HTTP API."""
    error = {"type": "invalid_request_error", "code": None, "message": message, "param": None}
    return json_reply(status, {"error": error}, headers)


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
        {"Allow": "GET, HEAD"},
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


def _reply(
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
