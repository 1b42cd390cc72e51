"""Tensors of a checkpoint -> a device: while some are copied, the next are being read.

    threads           pread ─► buffer 1    pread ─► buffer 2    pread ─► buffer 3
    device's stream   buffer 0 ══ copy ══► weights, then whatever the caller does with them

The buffers are pinned, so that the device copies by itself while the caller and the threads go on.
Their number and size bound the memory; all of it is given back at the end. Tensors are asked for in
an order that is known before: several small ones share a buffer, a large one goes through several.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Self

    from tinyvllm.checkpoint import TensorEntry

# 16 MiB take a bus longer than a copy's start does by far; four of them are pinned in about the
# time in which one is read.
_BUFFER_BYTES, _NUM_BUFFERS = 16 << 20, 4
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a tensor, at `offset` of a buffer."""

    entry: TensorEntry
    begin: int
    end: int
    offset: int


def plan_loads(entries: Iterable[TensorEntry], buffer_bytes: int) -> list[list[Piece]]:
    """What each filling of a buffer holds: the tensors' bytes in their order, without gaps but for
    the alignment of a tensor's beginning. `buffer_bytes` is a multiple of 256."""
    assert buffer_bytes > 0 and buffer_bytes % _ALIGNMENT == 0
    loads: list[list[Piece]] = []
    used = buffer_bytes
    for entry in entries:
        begin, size = 0, entry.end - entry.begin
        while begin < size:
            if used == buffer_bytes:
                loads.append([])
                used = 0
            end = min(size, begin + buffer_bytes - used)
            loads[-1].append(Piece(entry, begin, end, used))
            used = -(-(used + end - begin) // _ALIGNMENT) * _ALIGNMENT
            begin = end
    return loads


class Staging:
    """A context manager; used by one thread, on its current stream of `device`.

    `entries` are the tensors in the order in which `copy_to` will ask for them, each once.
    """

    def __init__(
        self,
        entries: Iterable[TensorEntry],
        device: torch.device,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
        num_buffers: int = _NUM_BUFFERS,
    ) -> None:
        loads = plan_loads(entries, buffer_bytes)
        self._device = device
        self._buffer_bytes = buffer_bytes
        num_buffers = min(num_buffers, max(1, len(loads)))
        # Of its own, not torch's: torch keeps pinned memory for later.
        self._memory = mmap.mmap(-1, num_buffers * buffer_bytes)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._is_pinned = device.type == "cuda" and _pin(self._tensor, device)
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        """The end of the copies out of each buffer."""
        self._to_read = deque(enumerate(loads))
        self._reading: deque[Future[tuple[int, list[Piece]]]] = deque()
        self._buffer_idx: int | None = None
        self._pieces: deque[Piece] = deque()
        """What is left in the buffer of that index."""
        if device.type == "cuda":  # else a thread that waits for an event wakes the first device
            self._threads = ThreadPoolExecutor(num_buffers, "tinyvllm-read", _set_device, (device,))
        else:
            self._threads = ThreadPoolExecutor(num_buffers, "tinyvllm-read")
        for _ in range(num_buffers):
            self._start_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the copies: afterwards every stream may use what they wrote."""
        self._threads.shutdown(cancel_futures=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._is_pinned:
            _unpin(self._tensor)
        del self._tensor, self._memory

    def copy_to(self, out: torch.Tensor, entry: TensorEntry) -> None:
        """Copy the next tensor to `out`, contiguous and on the device, in the dtype of `out`.

        The device may still be copying when this returns. Raises `CheckpointError` if the file
        has become shorter.
        """
        dtype, flat = entry.check_dtype(), out.view(-1)
        size, done = entry.end - entry.begin, 0
        while done < size:
            piece = self._next_piece()
            assert piece.entry is entry and piece.begin == done, "not the order that was told"
            assert self._buffer_idx is not None
            begin = self._buffer_idx * self._buffer_bytes + piece.offset
            part = self._tensor[begin : begin + piece.end - piece.begin].view(dtype)
            if dtype != out.dtype:  # converted there
                part = part.to(self._device, non_blocking=True)
            target = flat[done // dtype.itemsize : piece.end // dtype.itemsize]
            target.copy_(part, non_blocking=True)
            done = piece.end

    def _next_piece(self) -> Piece:
        if not self._pieces:
            if self._buffer_idx is not None:
                if self._device.type == "cuda":
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                    self._copied[self._buffer_idx] = event
                self._start_reading()
            self._buffer_idx, pieces = self._reading.popleft().result()
            self._pieces.extend(pieces)
        return self._pieces.popleft()

    def _start_reading(self) -> None:
        """The next load, into the buffer whose turn it is: the one used longest ago."""
        if self._to_read:
            load_idx, pieces = self._to_read.popleft()
            buffer_idx = load_idx % len(self._copied)
            self._reading.append(self._threads.submit(self._read, buffer_idx, pieces))

    def _read(self, buffer_idx: int, pieces: list[Piece]) -> tuple[int, list[Piece]]:
        if (copied := self._copied[buffer_idx]) is not None:
            copied.synchronize()
        begin = buffer_idx * self._buffer_bytes
        with memoryview(self._memory)[begin : begin + self._buffer_bytes] as buffer:
            for piece in pieces:
                end = piece.offset + piece.end - piece.begin
                piece.entry.read_into(buffer[piece.offset : end], piece.begin)
        return buffer_idx, pieces


def _set_device(device: torch.device) -> None:
    torch.cuda.set_device(device)


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Whether it could be: copies from other memory are right too, only slower."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # the error is answered: nothing else must find it
        torch.zeros(1, device=device)
    return False


def _unpin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostUnregister(memory.data_ptr())))
