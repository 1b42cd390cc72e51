"""What the engine's tests share beyond fixtures."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from tinyvllm import _C, AsyncEngine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)

# A CPU's ops compute a row alike in every step; a GPU's in steps of at most 16 tokens, while larger
# ones take kernels that sum in another order (test_cuda_engine.py counts what comes of that).
ONE_ORDER: dict[str, Any] = {}
if _C.has_cuda and torch.cuda.is_available():
    ONE_ORDER = {"max_num_batched_tokens": 16, "max_num_seqs": 16}


async def settled(engine: AsyncEngine) -> None:
    """Every command given to the engine so far has been carried out."""
    # Commands are taken in order, and between steps only.
    await engine.generate([3], temperature=0.0, max_tokens=1).text()


class Gate:
    """The engine thread passes it once per step, by permission."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._reached = threading.Event()

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def wait_reached(self) -> None:
        """Until a step waits here: all commands given before it have been carried out."""
        assert self._reached.wait(10), "no step was wanted"

    def pass_one(self) -> None:
        self._reached.set()
        self._permits.acquire()


@contextlib.contextmanager
def stepped(engine: AsyncEngine) -> Iterator[Gate]:
    """In the block the engine takes only the steps that the gate allows."""
    core = engine._engine
    assert core is not None
    gate = Gate()
    step = core._step

    def gated() -> None:
        core._finish_launched()  # a step's tokens are there before the next one is allowed
        gate.pass_one()
        if core._scheduler.has_work:  # else all that was left was in flight
            step()

    core._step = gated  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        del core._step
        gate.allow(1)
