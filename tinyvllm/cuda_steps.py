"""CudaSteps: every step of one model as a captured graph, launched and not waited for.

    host, pinned, in turns ──copy──► rows on the device ──► graph of the step's size ──► token ids
                                          ▲      advance_decode │ take_drawn            │
                                          └─────────────────────────────────────────────┤
    result(): looks until they are there ◄───── pinned, in turns ◄────── publish ───────┘

All of it is in the order of one stream. That is the fence: what a launched step reads or writes,
rows, tables and KV blocks, a later one changes only after it.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from tinyvllm import _C
from tinyvllm.batch import NUM_STAGES, BatchSize, StepRows
from tinyvllm.gpu_memory import capture_lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm.batch import Batch, Buckets, SamplingBatch

    Run = Callable[[StepRows, BatchSize, bool], None]
    Graphs = dict[tuple[BatchSize, bool], torch.cuda.CUDAGraph]

# Rows of words for the ids of steps, used in turn: a power of two, and no fewer than NUM_STAGES.
_NUM_ROWS = 4


class CudaStep:
    """A launched step."""

    __slots__ = ("_steps", "begin", "drawn", "end", "forward_end", "last_end", "number", "resumed")

    def __init__(self, steps: CudaSteps, drawn: torch.Tensor) -> None:
        """`drawn` [R] is what the device draws."""
        self._steps, self.drawn = steps, drawn
        self.number = 0
        # Of a timed step. One whose draw is launched by itself may wait for that between its
        # forward pass's end and `resumed`.
        self.begin: torch.cuda.Event | None = None
        self.forward_end: torch.cuda.Event | None = None
        self.resumed: torch.cuda.Event | None = None
        self.end: torch.cuda.Event | None = None
        self.last_end: torch.cuda.Event | None = None

    def wait(self) -> list[int]:
        """Block, without the GIL, until the ids are there."""
        return self._steps.wait(self)

    def seconds(self) -> tuple[float, float]:
        """After `wait`: the device's time in the step, and idle before it and in it. Zeros unless
        the step was timed."""
        if self.begin is None or self.end is None:
            return 0.0, 0.0
        self.end.synchronize()
        busy = self.begin.elapsed_time(self.end) / 1e3
        idle = 0.0 if self.last_end is None else self.last_end.elapsed_time(self.begin) / 1e3
        if self.forward_end is not None and self.resumed is not None:
            waited = self.forward_end.elapsed_time(self.resumed) / 1e3
            return busy - waited, idle + waited
        return busy, idle


class DeviceRows:
    """A device's copy of the arrays of a step, kept up to date by small copies."""

    def __init__(
        self,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        buckets: Buckets,
    ) -> None:
        self._buckets = buckets
        self._is_cuda = device.type == "cuda"
        self._rows = StepRows.allocate(max_num_batched_tokens, max_num_seqs, max_blocks, device)
        self._tables = self._rows.forward.block_tables
        # Tables as they come, side by side.
        self._new_tables = torch.zeros(max_num_seqs * max_blocks, dtype=torch.int32, device=device)
        self._places = self.staging(max_num_seqs, torch.int64)
        self._block_ids = self.staging(max_num_seqs, torch.int32)
        self._new_places = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._new_block_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.stage = 0
        """Which of the host's buffers this step uses."""

    def staging(self, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Buffers on the host, to be used in turns."""
        return [
            torch.zeros(count, dtype=dtype, pin_memory=self._is_cuda) for _ in range(NUM_STAGES)
        ]

    def narrow(self, size: BatchSize) -> StepRows:
        return self._rows.narrow(size)

    @property
    def sampling(self) -> SamplingBatch:
        """Of the largest step."""
        return self._rows.sampling

    @property
    def drawn(self) -> torch.Tensor:
        """What the last step drew: [max_num_seqs] i32."""
        return self._rows.sampling.token_ids

    def upload(self, batch: Batch) -> None:
        """Bring the device's rows up to date, behind the steps launched before."""
        self.stage = (self.stage + 1) % NUM_STAGES
        if not batch.is_pure_decode:
            self._rows.packed.copy_(batch.rows.packed, non_blocking=True)
            num_seqs, width = batch.num_seqs, batch.table_width
            host = batch.rows.forward.block_tables.view(-1)
            tables = self._new_tables[: num_seqs * width]
            tables.copy_(host[: num_seqs * width], non_blocking=True)
            self._tables[:num_seqs, :width] = tables.view(num_seqs, width)
            # advance_decode takes the rows that only pad a decode along: no block, no store.
            self._tables[num_seqs : self._buckets.decode(num_seqs)] = -1
        elif batch.new_entries:
            count = len(batch.new_entries)
            places, block_ids = self._places[self.stage], self._block_ids[self.stage]
            places.numpy()[:count], block_ids.numpy()[:count] = zip(*batch.new_entries, strict=True)
            self._new_places[:count].copy_(places[:count], non_blocking=True)
            self._new_block_ids[:count].copy_(block_ids[:count], non_blocking=True)
            self._tables.view(-1).index_copy_(
                0, self._new_places[:count], self._new_block_ids[:count]
            )


class CudaSteps:
    """Used by one thread, whose current stream it sets."""

    def __init__(
        self,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        buckets: Buckets,
        run: Run,
        run_forward: Run,
    ) -> None:
        """`run(rows, size, is_pure_decode)` calls the ops of one step, from ids to ids, and
        `run_forward` those up to the logits."""
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Weights and activations were written on the stream that was current until now.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._device = device
        self._buckets = buckets
        self._run, self._run_forward = run, run_forward
        self.rows = DeviceRows(
            device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_blocks=max_blocks,
            buckets=buckets,
        )
        # csrc/cuda/token_mailbox.h
        self._words = torch.zeros((_NUM_ROWS, max_num_seqs), dtype=torch.int64, pin_memory=True)
        self._num_published = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_steps = 0  # modulo 2**32
        self.is_timed = False
        """Steps are launched between events, which cost a few microseconds each."""
        self._last_end: torch.cuda.Event | None = None
        self._graphs: Graphs = {}
        self._forward_graphs: Graphs = {}

    def capture_all(self, report: Callable[[float], None]) -> None:
        """A graph for every size, and one of its forward pass alone: at a request's first step that
        needs one it would cost everybody's. `report` is told the fraction done."""
        keys = [(BatchSize(n, n, n), True) for n in self._buckets.every_decode()]
        keys += [(size, False) for size in self._buckets.every_mixed()]
        # Once without: modules are loaded and workspaces allocated at a first call. The largest
        # last, so that nothing grows later.
        for first in (keys[0], keys[-1]):
            self._run(self.rows.narrow(first[0]), *first)
        self._stream.synchronize()
        pool = torch.cuda.graph_pool_handle()
        gc.collect()  # a finalizer that frees device memory would spoil a capture
        with capture_lock:
            for i, key in enumerate(keys):
                report(i / len(keys))
                self._graphs[key] = self._capture(self._run, key, pool, ends_step=True)
                self._forward_graphs[key] = self._capture(self._run_forward, key, pool)

    def _capture(
        self, run: Run, key: tuple[BatchSize, bool], pool: Any, ends_step: bool = False
    ) -> torch.cuda.CUDAGraph:
        size, is_pure_decode = key
        rows = self.rows.narrow(size)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run(rows, size, is_pure_decode)
            if ends_step:
                self._publish(self.rows.drawn[: size.num_logits])
        finally:
            graph.capture_end()
        return graph

    def launch(self, batch: Batch) -> CudaStep:
        """Start one step behind those that run already."""
        step = self._start(batch, self._graphs, self._run)
        if not self._graphs:
            self._publish(step.drawn)
        self._end(step)
        return step

    def launch_forward(self, batch: Batch) -> CudaStep:
        """The same up to the logits. Before the next is launched comes, after whatever wait,
        `resume`, then the draw, then `finish`."""
        step = self._start(batch, self._forward_graphs, self._run_forward)
        step.forward_end = self._event()
        return step

    def resume(self, step: CudaStep) -> None:
        """Before its draw is launched."""
        step.resumed = self._event()

    def finish(self, step: CudaStep) -> None:
        """Behind its draw."""
        self._publish(step.drawn, after_copies=True)  # of log-probabilities
        self._end(step)

    def wait(self, step: CudaStep) -> list[int]:
        """For the ids of a step. Those of the last steps are kept, of as many as there are rows."""
        stream: int = self._stream.cuda_stream
        return _C.wait_for_tokens(self._words, step.number, len(step.drawn), stream)

    def _publish(self, token_ids: torch.Tensor, after_copies: bool = False) -> None:
        _C.publish_tokens(self._words, self._num_published, token_ids, after_copies)

    def _start(self, batch: Batch, graphs: Graphs, run: Run) -> CudaStep:
        step = CudaStep(self, self.rows.drawn[: batch.num_logits])
        step.begin, step.last_end = self._event(), self._last_end
        self.rows.upload(batch)
        key = batch.size, batch.is_pure_decode
        if graphs:
            graphs[key].replay()
        else:
            run(self.rows.narrow(batch.size), *key)
        return step

    def _end(self, step: CudaStep) -> None:
        self._num_steps = (self._num_steps + 1) % 2**32
        step.number = self._num_steps
        step.end = self._last_end = self._event()

    def _event(self) -> torch.cuda.Event | None:
        if not self.is_timed:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def close(self) -> None:
        """Wait for what was launched and give every byte back."""
        try:
            self._stream.synchronize()
        finally:  # also of a device that has failed
            self._graphs.clear()
            self._forward_graphs.clear()
            torch.cuda.set_stream(torch.cuda.default_stream(self._device))
            _C.release_workspace(self._device.index)
