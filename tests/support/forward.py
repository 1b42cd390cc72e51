"""Runs a Transformer without an engine: paged, with everything that may not be read poisoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinyvllm.models import ForwardBatch, ForwardBuffers, KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyvllm.models import Transformer

_ABSURD_BLOCK = 2**31 - 1


class PagedRunner:
    """Feeds chunks of up to `num_seqs` sequences through one KV cache.

    Block tables are a random permutation of the pool, their unread entries are absurd, and the pool
    starts as NaN: a wrong read cannot go unnoticed.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_len: int,
        num_seqs: int = 1,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        self.num_blocks = -(-max_len // block_size)
        self.kv_cache = KVCache.allocate(
            config, num_seqs * self.num_blocks + 1, block_size, dtype, "cpu"
        )
        for pool in (*self.kv_cache.k, *self.kv_cache.v):
            pool.fill_(float("nan"))
        order = torch.randperm(
            num_seqs * self.num_blocks, generator=torch.Generator().manual_seed(5)
        )
        self.tables = order.to(torch.int32).view(num_seqs, self.num_blocks)
        self.lengths = [0] * num_seqs
        self.buffers = ForwardBuffers.allocate(
            config, num_seqs * max_len, num_seqs * max_len, dtype, "cpu"
        )

    def run(self, chunks: dict[int, Sequence[int]]) -> list[torch.Tensor]:
        """Appends each chunk to its sequence; the logits [len(chunk), V] of every token of each."""
        num_tokens = sum(len(ids) for ids in chunks.values())
        logits = self.run_rows(chunks, list(range(num_tokens)))
        return list(logits.split([len(ids) for ids in chunks.values()]))

    def run_rows(self, chunks: dict[int, Sequence[int]], rows: list[int]) -> torch.Tensor:
        """As `run`, with the logits [len(rows), V] of these tokens of the step alone."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens_q, seq_lens = [0], []
        block_tables = torch.full((len(chunks), self.num_blocks + 2), _ABSURD_BLOCK).int()
        for row, (seq, ids) in enumerate(chunks.items()):
            begin, end = self.lengths[seq], self.lengths[seq] + len(ids)
            self.lengths[seq] = end
            used = -(-end // self.block_size)
            block_tables[row, :used] = self.tables[seq, :used]
            for position in range(begin, end):
                block = int(self.tables[seq, position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            input_ids += ids
            cu_seqlens_q.append(len(input_ids))
            seq_lens.append(end)

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        buffers = self.buffers.narrow(len(input_ids), len(rows))
        batch = ForwardBatch(
            input_ids=int32(input_ids),
            positions=int32(positions),
            slot_mapping=int32(slots),
            cu_seqlens_q=int32(cu_seqlens_q),
            seq_lens=int32(seq_lens),
            block_tables=block_tables,
            logits_indices=int32(rows),
        )
        self.model.forward(buffers, batch, self.kv_cache)
        return buffers.logits.clone()
