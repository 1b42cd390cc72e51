"""The op API. Two implementations with the same functions:

`ops.native`     handwritten kernels of the extension `_C` (CPU here, CUDA twins beside them)
`ops.reference`  plain torch, fp32 inside: the specification every kernel is compared with

Ops write into their first argument(s), take tensors by position and allocate nothing, so a sequence
of them can be recorded once as a graph and replayed. csrc/ops.h documents every shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class Graph(Protocol):
    """A recorded sequence of ops; `replay` runs it on the current contents of its tensors."""

    def replay(self) -> None: ...


class Launch(Protocol):
    """One run of a graph on a stream."""

    def result(self) -> list[int]: ...
    def cancel(self) -> None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def idle_seconds(self) -> float: ...


class Stream(Protocol):
    """Runs graphs one after the other, beside the thread that launches them."""

    def launch(self, graph: Any, result: Tensor) -> Launch:
        """`graph` is one that the same op set captured; `result` [n] int32 holds what it draws."""
        ...


class Ops(Protocol):
    """What a model may call. T tokens, S sequences, R rows of logits."""

    name: str
    supports_graphs: bool

    def advance_decode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        step_idx: Tensor,
        slot_mapping: Tensor,
        token_ids: Tensor,
        block_tables: Tensor,
        block_size: int,
    ) -> None: ...
    def take_drawn(self, input_ids: Tensor, token_ids: Tensor, source_rows: Tensor) -> None: ...
    def embedding(self, out: Tensor, input_ids: Tensor, weight: Tensor) -> None: ...
    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None: ...
    def rotary_embedding_store_kv(
        self,
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
        self,
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
    def pack_linear(self, weight: Tensor) -> Tensor:
        """weight [N, K] row-major -> the layout that this op set's linears read."""
        ...

    def pack_gated_linear(self, weight: Tensor) -> Tensor:
        """weight [2I, K], gate above up -> the layout that `norm_gated_linear` reads."""
        ...

    def linear(
        self, out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None = None
    ) -> None: ...

    def linear_add(
        self,
        residual: Tensor,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None = None,
    ) -> None: ...
    def norm_linear(
        self,
        out: Tensor,
        normed: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> None: ...
    def norm_linear_rope_store_kv(
        self,
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
    ) -> None:
        """norm_linear into qkv [T, (num_heads + 2 num_kv_heads) D], then rotary_embedding_store_kv
        of its heads. Afterwards q is there, rotated; k and v are in the cache."""
        ...

    def norm_gated_linear(
        self,
        out: Tensor,
        normed: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> None: ...
    def gather_rows(self, out: Tensor, x: Tensor, row_idx: Tensor) -> None: ...
    def sample(
        self,
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
        self,
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
    def count_tokens(self, output_counts: Tensor, token_ids: Tensor, slot_idx: Tensor) -> None: ...
    def top_logprobs(
        self,
        values: Tensor,
        ids: Tensor,
        drawn: Tensor,
        logits: Tensor,
        token_ids: Tensor,
        num_logprobs: Tensor,
    ) -> None: ...
    def new_stream(self) -> Stream: ...
    def capture(self) -> AbstractContextManager[Graph]:
        """Record the ops called inside (they do not run) into a graph."""
        ...


def get_ops(name: Literal["native", "reference"]) -> Ops:
    """The op set of that name. `native` raises ImportError when `_C` is not built."""
    if name == "reference":
        from tinyvllm.ops import reference

        return reference
    from tinyvllm.ops import native

    return native
