"""What a forward pass reads and writes besides weights; allocated once, then only narrowed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tinyvllm.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's tokens as device tensors, all int32. T tokens, S sequences, R rows of logits."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T]   block_id * block_size + offset; -1 stores nothing
    cu_seqlens_q: torch.Tensor  # [S+1] first token of each sequence
    seq_lens: torch.Tensor  # [S]   KV entries valid after this step
    block_tables: torch.Tensor  # [S, max_blocks]
    logits_indices: torch.Tensor  # [R]   the tokens whose logits are wanted


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One activation's place in the arena. It is needed from op `first` to op `last` of a step."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    first: int
    last: int
    offset: int = 0
    """Bytes from the arena's beginning."""

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


# What each buffer lives through; the layers repeat ops 1 to 5.
OPS = (
    "embedding",
    "qkv_proj",
    "attention",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "gather_rows",
    "lm_head",
    "sample",
)
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """The activations of the largest step in one arena: buffers that are never needed at the same
    time share its memory. `python -m tinyvllm.bench memory` prints it."""

    buffers: tuple[PlannedBuffer, ...]
    num_bytes: int

    @classmethod
    def make(
        cls, config: ModelConfig, num_tokens: int, num_logits: int, dtype: torch.dtype
    ) -> BufferPlan:
        """For steps of up to `num_tokens` tokens and `num_logits` rows of logits."""
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        f32 = torch.float32
        wanted = [
            PlannedBuffer("residual", (num_tokens, hidden), dtype, 0, 7),
            PlannedBuffer("normed", (num_tokens, hidden), dtype, 1, 4),
            PlannedBuffer("qkv", (num_tokens, qkv), dtype, 1, 2),
            PlannedBuffer("attn_out", (num_tokens, heads), dtype, 2, 3),
            PlannedBuffer("act", (num_tokens, config.intermediate_size), dtype, 4, 5),
            PlannedBuffer("last_residual", (num_logits, hidden), dtype, 6, 7),
            PlannedBuffer("last_normed", (num_logits, hidden), dtype, 7, 7),
            PlannedBuffer("logits", (num_logits, config.vocab_size), f32, 7, 8),
        ]
        placed: list[PlannedBuffer] = []
        for buffer in sorted(wanted, key=lambda each: -each.num_bytes):
            placed.append(replace(buffer, offset=_lowest_gap(buffer, placed)))
        end = max(buffer.offset + buffer.num_bytes for buffer in placed)
        return cls(tuple(sorted(placed, key=lambda each: (each.first, each.offset))), end)


def _lowest_gap(buffer: PlannedBuffer, placed: list[PlannedBuffer]) -> int:
    """The first offset at which `buffer` overlaps nobody that lives when it does."""
    offset = 0
    for other in sorted(placed, key=lambda each: each.offset):
        if buffer.first > other.last or other.first > buffer.last:
            continue
        if offset + buffer.num_bytes <= other.offset:
            break
        end = other.offset + other.num_bytes
        offset = max(offset, -(-end // _ALIGNMENT) * _ALIGNMENT)
    return offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBuffers:
    """The activations of one step. q, k, v are views of qkv; D is head_dim.

    `allocate` makes the largest step's buffers; `narrow` gives the same memory cut to a step, so
    that captured graphs and eager steps share it.
    """

    residual: torch.Tensor  # [T, H]
    normed: torch.Tensor  # [T, H]   scratch of the norms
    qkv: torch.Tensor  # [T, (num_heads + 2 num_kv_heads) D]
    q: torch.Tensor  # [T, num_heads, D]
    k: torch.Tensor  # [T, num_kv_heads, D]
    v: torch.Tensor  # [T, num_kv_heads, D]
    attn_out: torch.Tensor  # [T, num_heads, D]
    attn_out_flat: torch.Tensor  # [T, num_heads D]   the same memory
    act: torch.Tensor  # [T, I]
    last_residual: torch.Tensor  # [R, H]
    last_normed: torch.Tensor  # [R, H]   scratch of the last norm
    logits: torch.Tensor  # [R, V] f32

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_tokens: int,
        num_logits: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> ForwardBuffers:
        """One arena for steps of up to `num_tokens` tokens and `num_logits` rows of logits."""
        plan = BufferPlan.make(config, num_tokens, num_logits, dtype)
        # Zeros: rows that only pad a step are computed too.
        arena = torch.zeros(plan.num_bytes, dtype=torch.uint8, device=device)
        flat = {
            buffer.name: arena[buffer.offset : buffer.offset + buffer.num_bytes]
            .view(buffer.dtype)
            .view(buffer.shape)
            for buffer in plan.buffers
        }
        num_q, num_kv, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = flat["qkv"].view(num_tokens, num_q + 2 * num_kv, head_dim)
        attn_out = flat.pop("attn_out")
        return cls(
            **flat,
            q=heads[:, :num_q],
            k=heads[:, num_q : num_q + num_kv],
            v=heads[:, num_q + num_kv :],
            attn_out=attn_out.view(num_tokens, num_q, head_dim),
            attn_out_flat=attn_out,
        )

    def narrow(self, num_tokens: int, num_logits: int) -> ForwardBuffers:
        """Views of the first `num_tokens` and `num_logits` rows; nothing is allocated."""
        assert num_tokens <= len(self.residual) and num_logits <= len(self.logits)
        return ForwardBuffers(
            residual=self.residual[:num_tokens],
            normed=self.normed[:num_tokens],
            qkv=self.qkv[:num_tokens],
            q=self.q[:num_tokens],
            k=self.k[:num_tokens],
            v=self.v[:num_tokens],
            attn_out=self.attn_out[:num_tokens],
            attn_out_flat=self.attn_out_flat[:num_tokens],
            act=self.act[:num_tokens],
            last_residual=self.last_residual[:num_logits],
            last_normed=self.last_normed[:num_logits],
            logits=self.logits[:num_logits],
        )


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values per layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @staticmethod
    def num_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers."""
        per_layer = block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
        return 2 * config.num_layers * per_layer

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """The whole pool in one allocation, left unwritten: ops never read an unwritten slot."""
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        pool = torch.empty((2, config.num_layers, *shape), dtype=dtype, device=device)
        return cls(k=list(pool[0].unbind()), v=list(pool[1].unbind()))
