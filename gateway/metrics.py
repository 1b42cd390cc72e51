"""The gateway's own counters, and Prometheus's text format for them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# name -> (label, help). A counter without a label has the one value "".
_COUNTERS = {
    "connections_total": ("", "WebSocket connections that were opened."),
    "connections_refused_total": ("reason", "Handshakes that were refused."),
    "connections_dropped_total": ("reason", "Sockets that the gateway closed for a reason."),
    "responses_total": ("status", "Responses that ended, by status."),
    "resumes_total": ("", "Viewers that joined by response.resume."),
    "errors_total": ("code", "Error events."),
    "frames_total": ("", "Frames of responses that were sent."),
    "tokens_total": ("", "Tokens that were read from the engine."),
}


class Metrics:
    """Counters since the start. Belongs to the gateway's loop."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTERS}
        self.num_frames = 0
        """Of frames_total; a number of its own, as it is counted at every frame."""

    def count(self, name: str, value: str = "", amount: int = 1) -> None:
        """Add to the counter `name`, under the label's `value` where it has one."""
        self._counts[name][value] += amount

    def value(self, name: str, value: str = "") -> int:
        return self.num_frames if name == "frames_total" else self._counts[name][value]

    def render(self, gauges: Mapping[str, float]) -> str:
        """Prometheus text: the counters, and `gauges` as they are now."""
        lines: list[str] = []
        for name, (label, text) in _COUNTERS.items():
            full = f"tinyvllm_gateway_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} counter"]
            counts = self._counts[name]
            if label:
                lines += [
                    f'{full}{{{label}="{value}"}} {counts[value]}' for value in sorted(counts)
                ]
            else:
                lines.append(f"{full} {self.value(name)}")
        lines += _gauges("tinyvllm_gateway_", gauges)
        return "\n".join(lines) + "\n"


def render_gauges(prefix: str, values: Mapping[str, float]) -> str:
    return "\n".join(_gauges(prefix, values)) + "\n"


def _gauges(prefix: str, values: Mapping[str, float]) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        lines += [f"# TYPE {prefix}{name} gauge", f"{prefix}{name} {value:g}"]
    return lines
