"""Each op's time in a real step of the model, beside what the machine could do at best.

The model's own forward pass is run once with an op set that only notes the calls. All calls of one
kind (every layer's down_proj, say) then become one graph, and caches are flushed before each of its
replays, so that an op meets its weights as a step does: one layer after the other, in memory. On a
GPU the time is between two events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from tinyvllm.bench.ceilings import best_seconds
from tinyvllm.bench.report import number, text_table
from tinyvllm.models import ForwardBatch, ForwardBuffers, KVCache, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinyvllm.bench.ceilings import Ceilings
    from tinyvllm.bench.report import Report
    from tinyvllm.bench.workloads import Size
    from tinyvllm.ops import Graph, Ops

_BLOCK_SIZE = 16
_REPEATS = 7

Call = tuple[str, tuple[Any, ...]]

# The ops that read a weight: (position of x, position of the packed weight) in their arguments.
_LINEARS = {
    "linear_add": (1, 2),
    "norm_linear": (2, 4),
    "norm_linear_rope_store_kv": (4, 6),
    "norm_gated_linear": (2, 4),
}


@dataclass(frozen=True, slots=True)
class Step:
    """`num_seqs` sequences of `query_len` new tokens; `context` KV entries each after the step."""

    name: str
    num_seqs: int
    query_len: int
    context: int


STEPS: dict[Size, tuple[Step, ...]] = {
    "cpu": (
        Step("decode 1", 1, 1, 192),
        Step("decode 16", 16, 1, 192),
        Step("decode 64", 64, 1, 192),
        Step("prefill 256", 1, 256, 256),
    ),
    "full": (
        Step("decode 1", 1, 1, 320),
        Step("decode 64", 64, 1, 320),
        Step("decode 256", 256, 1, 320),
        Step("prefill 8192", 1, 8192, 8192),
    ),
    "tiny": (Step("decode 2", 2, 1, 5), Step("prefill 7", 1, 7, 7)),
}


class _Recorder:
    """An op set whose ops only note that they were called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, args))


def step_calls(model: Transformer, step: Step, device: str) -> list[Call]:
    """Every op call of `step`, greedy sampling included, on memory of its own."""
    num_tokens, num_seqs = step.num_seqs * step.query_len, step.num_seqs
    blocks = -(-step.context // _BLOCK_SIZE)
    cache = KVCache.allocate(
        model.config, num_seqs * blocks, _BLOCK_SIZE, torch.bfloat16, torch.device(device)
    )
    for pool in (*cache.k, *cache.v):
        pool.normal_()
    buffers = ForwardBuffers.allocate(
        model.config, num_tokens, num_seqs, torch.bfloat16, torch.device(device)
    )

    # Zeros would be multiplied faster. Last the bf16 ones: buffers share memory, and two of their
    # numbers are one of the logits.
    for buffer in (
        *(buffers.logits, buffers.residual, buffers.normed, buffers.qkv, buffers.attn_out_flat),
        *(buffers.act, buffers.last_residual, buffers.last_normed),
    ):
        buffer.normal_()

    def ints(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(device)

    # Blocks of one sequence lie apart, as they do in a pool that has been in use.
    tables = torch.arange(num_seqs * blocks).reshape(blocks, num_seqs).T.contiguous()
    one = torch.arange(step.context - step.query_len, step.context)
    slots = tables[:, one // _BLOCK_SIZE] * _BLOCK_SIZE + one % _BLOCK_SIZE
    starts = torch.arange(num_seqs + 1) * step.query_len
    batch = ForwardBatch(
        input_ids=ints(torch.randint(model.config.vocab_size, (num_tokens,))),
        positions=ints(one.repeat(num_seqs)),
        slot_mapping=ints(slots.reshape(-1)),
        cu_seqlens_q=ints(starts),
        seq_lens=ints(torch.full((num_seqs,), step.context)),
        block_tables=ints(tables),
        logits_indices=ints(starts[1:] - 1),
    )
    recorder = _Recorder()
    Transformer(model.config, cast("Ops", recorder), model.weights).forward(buffers, batch, cache)

    def per_row(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_seqs,), value, dtype=dtype, device=device)

    recorder.calls.append(
        (
            "sample",
            (
                per_row(0, torch.int32),
                buffers.logits,
                per_row(0, torch.float32),
                per_row(0, torch.int32),
                per_row(1, torch.float32),
                per_row(0, torch.float32),
                per_row(0, torch.int64),
                per_row(0, torch.int32),
            ),
        )
    )
    return recorder.calls


def by_kind(model: Transformer, calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Calls grouped by op, a linear by its weight: what one line of the table is about."""
    names = {id(model.weights.lm_head): "lm_head"}
    for layer in model.weights.layers:
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            names[id(getattr(layer, name))] = name
    kinds: dict[str, list[Call]] = {}
    for call in calls:
        op, args = call
        kind = f"{op} {names[id(args[_LINEARS[op][1]])]}" if op in _LINEARS else op
        kinds.setdefault(kind, []).append(call)
    return kinds


def cost(call: Call, step: Step) -> tuple[int, int]:
    """(bytes that must come from memory, FLOPs) of a linear or an attention; zeros for others.

    The rest work on activations that are in a cache: bandwidth says nothing about them.
    """
    op, args = call
    if op in _LINEARS:
        out, x, packed = args[0], *(args[position] for position in _LINEARS[op])
        nbytes = sum(t.numel() * t.element_size() for t in (out, x, packed))
        gated = 2 if op == "norm_gated_linear" else 1
        return nbytes, 2 * x.shape[0] * x.shape[1] * out.shape[1] * gated
    if op == "paged_attention":
        _, q, k_cache = args[:3]
        row = k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
        seen = step.num_seqs * sum(range(step.context - step.query_len + 1, step.context + 1))
        return 2 * step.num_seqs * step.context * row, 4 * q.shape[1] * q.shape[2] * seen
    return 0, 0


def seconds_of(ops: Ops, calls: Sequence[Call], ceilings: Ceilings, device: str) -> float:
    """The best time of `calls` in a row, as one graph where the op set has graphs."""
    flush = ceilings.flush_caches

    def run() -> None:
        for op, args in calls:
            getattr(ops, op)(*args)

    if not ops.supports_graphs:
        return best_seconds(run, device, _REPEATS, flush)
    graph = _captured(ops, run, device)
    return best_seconds(graph.replay, device, _REPEATS, flush)


def _captured(ops: Ops, run: Callable[[], None], device: str) -> Graph | torch.cuda.CUDAGraph:
    if device == "cpu":
        with ops.capture() as graph:
            run()
        return graph
    run()  # loads modules and allocates workspaces
    torch.cuda.synchronize()
    gpu_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(gpu_graph, capture_error_mode="thread_local"):
        run()
    return gpu_graph


def op_table(
    report: Report, model: Transformer, steps: Sequence[Step], ceilings: Ceilings, device: str
) -> None:
    """Measure and print every step's table."""
    for step in steps:
        bandwidth, flops = ceilings.read_bandwidth(), ceilings.matrix_flops()
        calls = step_calls(model, step, device)
        kinds = by_kind(model, calls)
        lines = []
        whole = seconds_of(model.ops, calls, ceilings, device)
        for kind, group in [*kinds.items(), ("whole step", calls)]:
            seconds = whole if group is calls else seconds_of(model.ops, group, ceilings, device)
            costs = [cost(call, step) for call in group]
            nbytes, num_flops = sum(c[0] for c in costs), sum(c[1] for c in costs)
            floor = max(nbytes / bandwidth, num_flops / flops)
            share = floor / seconds if floor else None
            report.write(
                {
                    "record": "op",
                    "step": step.name,
                    "op": kind,
                    "calls": len(group),
                    "us": seconds * 1e6,
                    "bytes": nbytes,
                    "flops": num_flops,
                    "share": share,
                    "bound": "read" if nbytes / bandwidth >= num_flops / flops else "compute",
                }
            )
            lines.append(
                [
                    kind,
                    str(len(group)),
                    number(seconds * 1e6),
                    f"{seconds / whole:.0%}",
                    number(nbytes / seconds / 1e9) if nbytes else "-",
                    number(num_flops / seconds / 1e9) if num_flops else "-",
                    "-" if share is None else f"{share:.0%}",
                ]
            )
        report.print(
            f"{step.name}: {step.num_seqs} x {step.query_len} tokens, {step.context} in the KV "
            f"cache; ceilings {bandwidth / 1e9:.1f} GB/s read, {flops / 1e9:,.0f} GFLOP/s"
        )
        header = ["op", "calls", "us", "of step", "GB/s", "GFLOP/s", "of ceiling"]
        report.print(text_table(header, lines))
        report.print()
