"""Engines on the tiny model, and what its tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engine_helpers import GREEDY

from tinyvllm import LLM, AsyncEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeEngine = Callable[..., AsyncEngine]

TINY = {"num_blocks": 128, "max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> MakeEngine:
    """An AsyncEngine on the tiny model, not started."""

    def make(**overrides: Any) -> AsyncEngine:
        return AsyncEngine(tiny_model_dir, **{**TINY, **overrides})

    return make


@pytest.fixture
def make_llm(tiny_model_dir: Path) -> Callable[..., LLM]:
    """An LLM on the tiny model."""

    def make(**overrides: Any) -> LLM:
        return LLM(tiny_model_dir, **{**TINY, **overrides})

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """40 prompts of 1 to 118 ids, for the tiny model."""
    return [[(7 * i + 13 * j) % 308 + 3 for j in range(3 * i + 1)] for i in range(40)]


@pytest.fixture(scope="session")
def expected(tiny_model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy ids of each prompt, run one at a time."""
    with LLM(tiny_model_dir, **TINY) as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
