"""What this machine can do at most: a share of a ceiling needs a ceiling of the same minute."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 512 << 20
"""Far beyond any last-level cache."""


def best_seconds(
    call: Callable[[], object],
    device: str,
    repeats: int = 5,
    before: Callable[[], object] | None = None,
) -> float:
    """The fastest of `repeats` calls, one more before them for warm-up; `before` is not timed."""
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
            _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Ceilings:
    """Buffers for the two measurements, kept so that a round costs only the measuring itself."""

    def __init__(self, device: str, num_threads: int, read_bytes: int = READ_BYTES) -> None:
        self._device, self._num_threads = device, num_threads
        # Written once: pages never touched would all be the kernel's one page of zeros.
        self._buffer = torch.ones(read_bytes // 4, dtype=torch.float32, device=device)
        size = 1024 if device == "cpu" else 8192
        self._square = torch.randn(size, size).to(device, torch.bfloat16)

    def read_bandwidth(self) -> float:
        """Bytes per second that all threads together read from memory (a sum over a buffer)."""
        torch.set_num_threads(self._num_threads)
        return 4 * len(self._buffer) / best_seconds(self._buffer.sum, self._device)

    def flush_caches(self) -> None:
        """Leave nothing of what was computed last in a cache. One thread is enough, and leaves no
        others spinning."""
        torch.set_num_threads(1)
        self._buffer.sum()

    def matrix_flops(self) -> float:
        """FLOP/s of torch's BF16 matrix product of two squares."""
        torch.set_num_threads(self._num_threads)
        size = len(self._square)
        out = torch.empty_like(self._square)
        seconds = best_seconds(
            lambda: torch.mm(self._square, self._square, out=out), self._device, repeats=10
        )
        return 2 * size**3 / seconds
