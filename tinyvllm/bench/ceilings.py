"""What this machine can do at most: a share of a ceiling needs a ceiling of the same minute."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def read_bytes(device: str) -> int:
    """How much a measurement reads: far beyond any cache, and not too short for a GPU's clock."""
    if device == "cpu":
        return 512 << 20
    return min(4 << 30, torch.cuda.get_device_properties(device).total_memory // 16)


def best_seconds(
    call: Callable[[], object],
    device: str,
    repeats: int = 5,
    before: Callable[[], object] | None = None,
) -> float:
    """The fastest of `repeats` calls, one more before them for warm-up; `before` is not timed.

    On a GPU by events on its current stream. What `before` has left it to do then hides the time in
    which the call is only on its way there.
    """
    clock = _host_seconds if device == "cpu" else _gpu_seconds
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        times.append(clock(call))
    return min(times[1:])


def _host_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], object]) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


class Ceilings:
    """Buffers for the two measurements, kept so that a round costs only the measuring itself."""

    def __init__(self, device: str, num_threads: int, num_bytes: int) -> None:
        self._device, self._num_threads = device, num_threads
        # Written once: pages never touched would all be the kernel's one page of zeros.
        self._buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        size = 1024 if device == "cpu" else 8192
        self._square = torch.randn(size, size, device=device).to(torch.bfloat16)
        self._before = None if device == "cpu" else self._buffer.sum

    def read_bandwidth(self) -> float:
        """Bytes per second that all threads together, or the GPU, read from memory (a sum over a
        buffer)."""
        torch.set_num_threads(self._num_threads)
        seconds = best_seconds(self._buffer.sum, self._device, before=self._before)
        return 4 * len(self._buffer) / seconds

    def flush_caches(self) -> None:
        """Leave nothing of what was computed last in a cache. One thread is enough, and leaves no
        others spinning. A GPU may still be at it on return."""
        torch.set_num_threads(1)
        self._buffer.sum()

    def matrix_flops(self) -> float:
        """FLOP/s of torch's BF16 matrix product of two squares."""
        torch.set_num_threads(self._num_threads)
        size = len(self._square)
        out = torch.empty_like(self._square)
        seconds = best_seconds(
            lambda: torch.mm(self._square, self._square, out=out),
            self._device,
            repeats=10,
            before=self._before,
        )
        return 2 * size**3 / seconds
