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
def take_drawn(input_ids: Tensor, token_ids: Tensor, source_rows: Tensor) -> None: ...
def embedding(out: Tensor, input_ids: Tensor, weight: Tensor) -> None: ...
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None: ...
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
def pack_linear(packed: Tensor, weight: Tensor) -> None: ...
def pack_gated_linear(packed: Tensor, weight: Tensor) -> None: ...
def linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None: ...
def linear_add(
    residual: Tensor,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
) -> None: ...
def norm_linear(
    out: Tensor,
    normed: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    eps: float,
) -> None: ...
def norm_linear_rope_store_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    normed: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
) -> None: ...
def norm_gated_linear(
    out: Tensor,
    normed: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    eps: float,
) -> None: ...
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
def adjust_logits(
    out: Tensor,
    logits: Tensor,
    slot_idx: Tensor,
    penalties: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    allowed_mask: Tensor,
) -> None: ...
def count_tokens(output_counts: Tensor, token_ids: Tensor, slot_idx: Tensor) -> None: ...
def top_logprobs(
    values: Tensor,
    ids: Tensor,
    drawn: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: Tensor,
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

class Launch:
    """One run of a graph on a `Stream`. Dropping it cancels and waits."""

    def result(self) -> list[int]:
        """Wait for its end; the values that `result` then held. Raises what an op raised."""

    def cancel(self) -> None:
        """Leave out what has not run yet: the result is undefined."""

    @property
    def seconds(self) -> float:
        """Time its ops took; after `result`."""

    @property
    def idle_seconds(self) -> float:
        """Time for which the stream had nothing to run before it; after `result`."""

class Stream:
    """Runs graphs one after the other on a thread of its own."""

    def __init__(self) -> None: ...
    def launch(self, graph: Graph, result: Tensor) -> Launch:
        """Queue `graph`; `result` [n] int32 is copied when its last op has ended."""

def publish_tokens(words: Tensor, num_steps: Tensor, token_ids: Tensor, after_copies: bool) -> None:
    """End a step on the current stream, or in a graph: stores its tokens into the host's memory and
    counts it. Only in a build with CUDA.

    `words` [rows, max_tokens] int64, pinned, rows a power of two; `num_steps` [1] int32 and
    `token_ids` [R] int32 on the GPU, R <= max_tokens. `after_copies`: copies to the host that are
    ahead on the stream can be read once the tokens can.
    """

def wait_for_tokens(words: Tensor, step: int, count: int, stream: int) -> list[int]:
    """The first `count` tokens of a step, once they are there; steps are counted modulo 2^32. The
    step that uses its row next must not have been launched yet. RuntimeError if what was launched
    on `stream` has failed. Only in a build with CUDA.
    """

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

def release_workspace(device_id: int) -> int:
    """Free what paged_attention and sample hold for the calling thread on a CUDA device.

    Waits for the kernels that use it; graphs that this thread captured must not be replayed any
    more. Returns the bytes that were held, 0 if none; the next call of an op allocates it again.
    """
