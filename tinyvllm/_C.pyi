"""The compiled extension: csrc/bindings.cpp. Shapes are documented in csrc/ops.h."""

from types import TracebackType
from typing import Self

from torch import Tensor

has_cuda: bool
"""CUDA kernels were compiled in."""

def advance_decode(
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    step_idx: Tensor,
    slot_mapping: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> None: ...
def embedding(out: Tensor, input_ids: Tensor, weight: Tensor) -> None: ...
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None: ...
def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None: ...
def rotary_embedding_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None: ...
def paged_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    sliding_window: int,
) -> None: ...
def silu_and_mul(out: Tensor, gate_up: Tensor) -> None: ...
def pack_linear(packed: Tensor, weight: Tensor) -> None: ...
def linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None: ...
def gather_rows(out: Tensor, x: Tensor, row_idx: Tensor) -> None: ...
def sample(
    token_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    step_idx: Tensor,
) -> None: ...

class Graph:
    """CPU ops called inside `with Graph() as graph:` are recorded, not run."""

    def __init__(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    @property
    def num_ops(self) -> int: ...
    def replay(self) -> None:
        """Run the ops in order on what their tensors now hold; the GIL is released."""

    def replay_timed(self) -> list[tuple[str, float]]:
        """Replay; (op, seconds) for each op, in order."""

def isa() -> str:
    """The instruction set in use: "portable", "avx2", "avx512" or "avx512_bf16"."""

def available_isas() -> list[str]:
    """The instruction sets that this processor runs, the plainest first."""

def set_isa(name: str) -> None:
    """Switch the whole process to another instruction set, for tests; not while an op runs."""

def num_threads() -> int:
    """Threads that an op may use, the caller included."""

def set_num_threads(n: int) -> None:
    """Set them for the whole process; waits for a running op."""

def num_cuda_devices() -> int:
    """CUDA devices that can be used: 0 without a GPU, a driver, or CUDA in this build."""
