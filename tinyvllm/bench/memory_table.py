"""Where a model's memory goes: weights, KV pool, and the plan of the activation arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinyvllm.bench.report import text_table
from tinyvllm.loader import weight_bytes
from tinyvllm.models import BufferPlan, KVCache
from tinyvllm.models.buffers import OPS

if TYPE_CHECKING:
    from tinyvllm.bench.report import Report
    from tinyvllm.config import ModelConfig

_BLOCK_SIZE = 16


def memory_table(
    report: Report, config: ModelConfig, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """Print it for BF16; nothing is loaded."""
    dtype = torch.bfloat16
    weights, _ = weight_bytes(config, dtype)
    block = KVCache.num_bytes_per_block(config, _BLOCK_SIZE, dtype)
    plan = BufferPlan.make(config, max_num_batched_tokens, max_num_seqs, dtype)
    apart = sum(buffer.num_bytes for buffer in plan.buffers)
    report.print(
        f"weights {_mib(weights)} MiB; KV cache {block} bytes a block of {_BLOCK_SIZE} tokens; "
        f"activations {_mib(plan.num_bytes)} MiB for {max_num_batched_tokens} tokens and "
        f"{max_num_seqs} rows of logits, {_mib(apart)} without sharing"
    )
    header = ["buffer", "shape", "MiB", "at MiB", "from", "to"]
    lines = []
    for buffer in plan.buffers:
        first, last = OPS[buffer.first], OPS[buffer.last]
        size, offset = _mib(buffer.num_bytes), _mib(buffer.offset)
        lines.append([buffer.name, str(list(buffer.shape)), size, offset, first, last])
        report.write(
            {
                "record": "buffer",
                "name": buffer.name,
                "bytes": buffer.num_bytes,
                "offset": buffer.offset,
                "first": first,
                "last": last,
            }
        )
    report.print(text_table(header, lines))
    report.print()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
