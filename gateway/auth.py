"""Who may use the gateway: a bearer token, in one of three places. No I/O.

    Authorization: Bearer TOKEN                                      programs
    Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.TOKEN  pages of other sites
    Cookie: tinyvllm_session=...                                     our own page, after POST /login

Never a URL: those land in logs. The cookie holds a value derived from the token, not the token.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COOKIE = "tinyvllm_session"
_COOKIE_SECONDS = 30 * 24 * 3600
_SUBPROTOCOL = "realtime"
_SECRET_SUBPROTOCOL = "openai-insecure-api-key."


class Auth:
    """Checks requests against `token`; without one everybody may."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else _digest(token)
        self._cookie = "" if token is None else _digest(f"cookie of {token}").hex()

    @property
    def is_open(self) -> bool:
        return self._digest is None

    def allows(
        self, *, authorization: str | None, subprotocols: str | None, cookie: str | None
    ) -> bool:
        """Whether these headers carry the token. Takes the same time for every wrong one."""
        return (
            self._digest is None
            or self.allows_bearer(authorization)
            or any(self._is_token(offered) for offered in _offered_secrets(subprotocols))
            or hmac.compare_digest(_cookie_value(cookie).encode(), self._cookie.encode())
        )

    def allows_bearer(self, authorization: str | None) -> bool:
        scheme, _, value = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(value.strip())

    def _is_token(self, offered: str) -> bool:
        return self._digest is None or hmac.compare_digest(_digest(offered), self._digest)

    def cookie_header(self, *, secure: bool) -> str:
        """Set-Cookie for a page that has shown the token."""
        return (
            f"{COOKIE}={self._cookie}; Max-Age={_COOKIE_SECONDS}; Path=/; HttpOnly; "
            f"SameSite=Strict{'; Secure' if secure else ''}"
        )

    @staticmethod
    def clear_cookie_header() -> str:
        return f"{COOKIE}=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict"


def choose_subprotocol(offered: Sequence[str]) -> str | None:
    """What the handshake selects of what a client offers: never the one with the token in it."""
    if _SUBPROTOCOL in offered:
        return _SUBPROTOCOL
    return next((name for name in offered if not name.startswith(_SECRET_SUBPROTOCOL)), None)


def _digest(text: str) -> bytes:
    # Hashed first, so that not even the length of the token shows in the time of a comparison.
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _offered_secrets(subprotocols: str | None) -> list[str]:
    names = [name.strip() for name in (subprotocols or "").split(",")]
    prefix = _SECRET_SUBPROTOCOL
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _cookie_value(header: str | None) -> str:
    try:
        morsel = SimpleCookie(header or "").get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value
