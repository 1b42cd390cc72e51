"""Progress of long preparations on stderr: a bar on a terminal, a line per phase elsewhere."""

from __future__ import annotations

import sys

_BAR_WIDTH = 30


class ProgressPrinter:
    """Callable as `progress(phase, fraction)`; prints to stderr."""

    def __init__(self) -> None:
        self._phase = ""
        self._percent = -1

    def __call__(self, phase: str, fraction: float) -> None:
        percent = int(100 * min(max(fraction, 0.0), 1.0))
        if (phase, percent) == (self._phase, self._percent):
            return
        is_new_phase = phase != self._phase
        self._phase, self._percent = phase, percent
        if sys.stderr.isatty():
            filled = percent * _BAR_WIDTH // 100
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            end = "\n" if percent == 100 else ""
            print(f"\r{phase:<28} [{bar}] {percent:3d}%", end=end, file=sys.stderr, flush=True)
        elif is_new_phase:
            print(f"{phase} ...", file=sys.stderr, flush=True)
