"""What the engine's tests share beyond fixtures."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from tinyvllm import AsyncEngine, SamplingParams, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)


async def settled(engine: AsyncEngine) -> None:
    """Every command given to the engine so far has been carried out."""
    # Commands are taken in order, and between steps only.
    await engine.generate([3], temperature=0.0, max_tokens=1).text()


async def drain(stream: TokenStream) -> None:
    """Read what is buffered, no more."""
    while stream._state.buffer:
        await anext(stream)


@contextlib.contextmanager
def held_engine(engine: AsyncEngine) -> Iterator[None]:
    """The engine thread waits between two steps for as long as the block runs."""
    assert engine._engine is not None
    core = engine._engine
    held, go = threading.Event(), threading.Event()
    step = core._step

    def wait_and_step() -> None:
        held.set()
        go.wait()
        step()

    core._step = wait_and_step  # type: ignore[method-assign]
    try:
        assert held.wait(10), "nothing runs that could be held"
        yield
    finally:
        core._step = step  # type: ignore[method-assign]
        go.set()
