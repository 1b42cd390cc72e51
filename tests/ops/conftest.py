"""Every instruction set that this processor has, and every number of threads that matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tinyvllm import _C

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors here are tiny: torch's threads would cost more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=_C.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for each instruction set, with the kernels switched to it."""
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs the test with pools of so many threads."""
    before = _C.num_threads()
    _C.set_num_threads(request.param)
    yield request.param
    _C.set_num_threads(before)
