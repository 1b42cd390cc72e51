from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.vocabularies import HOLDING, STREAMING, make_tokenizer

from tinyvllm import hub
from tinyvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return hub.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(smollm2_dir)


@pytest.fixture(scope="session")
def vocabularies(smollm2: Tokenizer) -> dict[str, Tokenizer]:
    """Every kind of tokenizer, by name."""
    return {"smollm2": smollm2, **{name: make_tokenizer(name) for name in STREAMING | HOLDING}}
