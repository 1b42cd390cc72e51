"""Every bound of the gateway, in one place; and the bucket behind the request rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and times of a gateway. Seconds, characters and bytes as the names say."""

    max_connections: int = 4096
    """Open sockets; more handshakes are answered with 503."""
    max_active: int = 16
    """Responses of one connection that run at once; those of further lanes wait."""
    max_lanes: int = 32
    """Lanes of one connection with work in them."""
    max_requests: int = 48
    """Requests of one connection that were accepted and have not ended."""
    max_events_per_second: float = 50.0
    """Client events of one connection, on average; 0 is no bound."""
    max_events_burst: int = 200
    """Events that may come at once after a pause."""
    max_message_bytes: int = 1024 * 1024
    max_pending_chars: int = 64 * 1024
    """Text of one response that no viewer has taken; then the engine is held back."""
    max_conversations: int = 1024
    """Ended responses that `previous_response_id` finds."""
    max_conversation_chars: int = 64 * 1024 * 1024
    """Text in all of them together."""
    resume_seconds: float = 60.0
    """A response outlives its last viewer, and its events their end, this long."""
    stall_seconds: float = 30.0
    """A socket that takes nothing at all this long is cut."""
    behind_seconds: float = 60.0
    """A socket that never catches up this long is closed with 1013."""
    idle_seconds: float = 3600.0
    """A socket without events and without work this long is closed with 1000."""
    handshake_seconds: float = 10.0
    ping_seconds: float = 15.0
    """After this much silence: a tinyvllm.ping for browsers and proxies, and a ping frame."""
    pong_seconds: float = 20.0
    """A peer that does not answer a ping frame this long is gone."""
    close_seconds: float = 2.0
    """Clients' time for their side of the closing handshake, at the end."""


class TokenBucket:
    """Allows `rate` a second on average and `burst` at once. `rate` 0 allows everything."""

    __slots__ = ("_burst", "_level", "_rate", "_then")

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = float(burst)
        self._then = now

    def take(self, now: float) -> bool:
        """Whether one more is allowed at time `now`, in seconds of any clock."""
        if self._rate == 0:
            return True
        self._level = min(self._burst, self._level + (now - self._then) * self._rate)
        self._then = now
        if self._level < 1:
            return False
        self._level -= 1
        return True
