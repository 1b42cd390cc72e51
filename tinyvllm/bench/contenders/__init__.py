"""The engines that are measured, behind one interface: requests in, a time stamp per token out.

All get the same token ids, threads and BF16 weights, ignore EOS, and warm up before the first
round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tinyvllm.bench.workloads import Work

NAMES = ("tinyvllm", "transformers", "llama.cpp")


class UnavailableError(Exception):
    """The engine cannot run here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every contender is built with."""

    model_dir: Path
    device: str
    """"cpu" or "cuda"."""
    num_threads: int
    max_num_seqs: int
    """Requests that must run at once."""
    max_model_len: int


@dataclass(slots=True)
class Run:
    """One request's outcome. Times are `time.perf_counter()` seconds."""

    submitted: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token was in the caller's hands."""


class Contender(Protocol):
    """An engine with a model loaded."""

    name: str
    version: str

    def run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        """Submit everything at once and wait for it; the runs are in the order of `work`."""
        ...

    def close(self) -> None: ...


def create(name: str, settings: Settings) -> Contender:
    """Load the model into the engine of that name. Raises `UnavailableError`."""
    if name == "tinyvllm":
        from tinyvllm.bench.contenders.tinyvllm_engine import TinyvllmContender

        return TinyvllmContender(settings)
    if name == "transformers":
        from tinyvllm.bench.contenders.transformers_engine import TransformersContender

        return TransformersContender(settings)
    if name == "llama.cpp":
        from tinyvllm.bench.contenders.llama_cpp_engine import LlamaCppContender

        return LlamaCppContender(settings)
    raise ValueError(f"no engine is called {name!r}; engines: {', '.join(NAMES)}")
