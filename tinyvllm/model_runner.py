"""ModelRunner: weights, KV cache, activations and step graphs of one model; runs batches.

    launch(batch):  (advance_decode) ─► forward ─► sample ─► token ids
                    replayed as one graph: on a GPU every step, on a CPU pure decode

A step with special rows, which ask for more than a draw from their logits, is launched in two:

    launch(batch):  (advance_decode) ─► forward     a graph of its own
    draw():         adjust_logits ─► sample ─► count_tokens ─► top_logprobs (slot_logits.py)

The draw follows at once, unless a mask in it depends on a token (structured output) that the step
before, still in flight, draws: then the forward pass runs while the host waits for that token, and
the draw when it has made the mask. On a CPU a step with prompts, and every step without graphs, is
run op by op to its end.

Weights, KV pool and activations are allocated once, here; a step allocates nothing, but for the
state of slots at the first request that has any, and prompt_logprobs.

Threads: `num_threads` sizes the pool of the native ops, which the engines of a process share. The
thread count of torch, which ops="reference" runs on, is the process's and is left alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from tinyvllm.batch import Buckets
from tinyvllm.errors import ConfigError, NotSupportedError
from tinyvllm.gpu_memory import release_unused
from tinyvllm.loader import load_config, load_model
from tinyvllm.models import BufferPlan, ForwardBuffers, KVCache
from tinyvllm.ops import get_ops
from tinyvllm.slot_logits import SlotLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from collections.abc import Sequence as Seq
    from os import PathLike

    from tinyvllm.batch import Batch, BatchSize, PromptChunk, SamplingBatch, StepRows
    from tinyvllm.config import EngineConfig, ModelConfig
    from tinyvllm.cuda_steps import CudaStep, CudaSteps
    from tinyvllm.ops import Graph, Launch, Stream
    from tinyvllm.sequence import Sequence
    from tinyvllm.slot_logits import Logprobs, Plan

logger = logging.getLogger(__name__)

# One graph per number of decoding sequences; the least recently replayed goes first. A graph is a
# few hundred kilobytes and a capture costs about as much as two eager steps' op calls.
_MAX_GRAPHS = 64

# What captured graphs, the kernels' workspaces and the driver take of a GPU beside the arena.
_GRAPH_BYTES = 384 << 20

# What the attention kernels for a GPU are compiled for.
_GPU_HEAD_DIMS = (64, 128)

# max_num_seqs and max_num_batched_tokens where the user names none: a step that takes a CPU a tenth
# of a second, and one that fills a GPU.
DEFAULT_SIZES = {"cpu": (64, 256), "cuda": (256, 8192)}


PromptLogprobs = tuple["Sequence", int, list["Logprobs"]]
"""(sequence, position of the first token, what was asked about it and those behind it)"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step."""

    token_ids: list[int]
    """One per row of logits."""
    logprobs: dict[int, Logprobs]
    """seq_id -> (log-probability of its token, {id: log-probability} of the k most likely)."""
    ops_seconds: float
    """Time inside ops; see `ModelRunner.time_steps`."""
    idle_seconds: float
    """Time before it, since the end of the last step's ops, in which no ops ran."""
    prompt_logprobs: Seq[PromptLogprobs] = ()


class Step(Protocol):
    """A launched step."""

    def draw(self) -> None:
        """Launch the draw, where `launch` could not: to be called when the result of the step
        before has been taken and followed, before the next launch. Else does nothing."""
        ...

    def result(self) -> StepOutput:
        """Waits for its end; the GIL is free meanwhile."""
        ...

    def cancel(self) -> None:
        """Nobody wants the result: it may come sooner then, and be anything."""
        ...


class _GraphStep:
    """One graph on the CPU's stream."""

    __slots__ = ("_launch",)

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def draw(self) -> None:
        pass

    def result(self) -> StepOutput:
        launch = self._launch
        return StepOutput(launch.result(), {}, launch.seconds, launch.idle_seconds)

    def cancel(self) -> None:
        self._launch.cancel()


class _SpecialGraphStep:
    """Two graphs on the CPU's stream: that of the forward pass, then that of the draw."""

    __slots__ = ("_batch", "_cancelled", "_drawing", "_forward", "_plan", "_runner")

    def __init__(self, runner: ModelRunner, batch: Batch, forward: Launch) -> None:
        self._runner, self._batch, self._forward = runner, batch, forward
        self._drawing: Launch | None = None
        self._plan: Plan
        self._cancelled = False

    def draw(self) -> None:
        if self._drawing is None and not self._cancelled:
            self._plan, self._drawing = self._runner.launch_draw(self._batch)

    def result(self) -> StepOutput:
        forward, drawing = self._forward, self._drawing
        if drawing is None:
            assert self._cancelled, "draw() was left out"
            forward.result()
            token_ids = [0] * self._batch.num_logits
            return StepOutput(token_ids, {}, forward.seconds, forward.idle_seconds)
        try:
            token_ids = drawing.result()
        finally:
            forward.result()  # an error of it caused what comes later
        return StepOutput(
            token_ids,
            self._runner.slot_logits.logprobs(self._plan),
            forward.seconds + drawing.seconds,
            forward.idle_seconds + drawing.idle_seconds,
        )

    def cancel(self) -> None:
        self._cancelled = True
        if self._drawing is not None:  # first: nothing is to be drawn from half a forward pass
            self._drawing.cancel()
        self._forward.cancel()


class _CudaStep:
    """A graph on a GPU's stream."""

    __slots__ = ("_step",)

    def __init__(self, step: CudaStep) -> None:
        self._step = step

    def draw(self) -> None:
        pass

    def result(self) -> StepOutput:
        return StepOutput(self._step.wait(), {}, *self._step.seconds())

    def cancel(self) -> None:
        """A step takes less time than to stop it would."""


class _SpecialCudaStep:
    """A graph on a GPU's stream, then the ops of the draw."""

    __slots__ = ("_batch", "_plan", "_prompt_logprobs", "_runner", "_step")

    def __init__(self, runner: ModelRunner, batch: Batch, step: CudaStep) -> None:
        self._runner, self._batch, self._step = runner, batch, step
        self._plan: Plan | None = None
        self._prompt_logprobs: list[PromptLogprobs] = []

    def draw(self) -> None:
        if self._plan is None:
            self._plan = self._runner.draw_behind(self._step, self._batch)
            # The step that comes next overwrites what they are made of.
            self._prompt_logprobs = self._runner.prompt_logprobs(self._batch)

    def result(self) -> StepOutput:
        assert self._plan is not None, "draw() was left out"
        return StepOutput(
            self._step.wait(),
            self._runner.slot_logits.logprobs(self._plan),
            *self._step.seconds(),
            self._prompt_logprobs,
        )

    def cancel(self) -> None:
        pass


class _EagerStep:
    """Ops that `launch` has run itself."""

    __slots__ = ("_output",)

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def draw(self) -> None:
        pass

    def result(self) -> StepOutput:
        return self._output

    def cancel(self) -> None:
        pass


class ModelRunner:
    """Loads a model and runs steps of it. Used by one thread.

    Raises `ModelError`s for the directory, `ConfigError` for settings that do not fit it,
    `NotSupportedError` for a device that this version cannot run on.
    """

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self.model_config: ModelConfig = load_config(model_dir)
        self.device = _resolve_device(config.device)
        if self.device.type == "cuda":
            head_dim = self.model_config.head_dim
            if config.ops == "native" and head_dim not in _GPU_HEAD_DIMS:
                raise NotSupportedError(
                    f"{model_dir}: head_dim {head_dim} has no kernels for a GPU, which know "
                    f'{" and ".join(map(str, _GPU_HEAD_DIMS))}; use device="cpu" or '
                    'ops="reference"',
                    param="device",
                )
            torch.cuda.set_device(self.device)  # of this thread
        defaults = DEFAULT_SIZES[self.device.type]
        self.max_num_seqs = config.max_num_seqs or min(
            defaults[0], config.max_num_batched_tokens or defaults[0]
        )
        self.max_num_batched_tokens = config.max_num_batched_tokens or max(
            defaults[1], self.max_num_seqs
        )
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self.max_model_len = _resolve_max_model_len(config, self.model_config)
        self.block_size = config.block_size
        self.ops = get_ops(config.ops)
        if config.num_threads is not None and config.ops == "native":
            from tinyvllm import _C

            _C.set_num_threads(config.num_threads)
        self.model = load_model(
            model_dir,
            self.model_config,
            self.ops,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            progress=progress,
        )
        with self._named_out_of_memory():
            self._buffers = self._allocate_buffers()
            self.num_blocks = self._size_pool(config)
            self.kv_cache = KVCache.allocate(
                self.model_config, self.num_blocks, config.block_size, self.dtype, self.device
            )
        use_graphs = self.ops.supports_graphs and not config.enforce_eager
        self.buckets: Buckets | None = None
        """The sizes that steps are padded to: on a GPU."""
        self._stream: Stream | None = None
        self._cuda: CudaSteps | None = None
        if self.device.type == "cuda":
            with self._named_out_of_memory():
                self._cuda = self._new_cuda_steps(use_graphs, progress)
        elif use_graphs:
            self._stream = self.ops.new_stream()
        self.runs_ahead = use_graphs and config.async_scheduling
        """A step may be launched before the result of the last one is asked for."""
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._draw_graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._slot_logits: SlotLogits | None = None
        self._ops_ended = perf_counter()  # of eager steps

    def time_steps(self, wanted: bool) -> None:
        """Whether `StepOutput` says how long steps take on a GPU, else 0; on a CPU it always does.
        Any thread may call it."""
        if self._cuda is not None:
            self._cuda.is_timed = wanted

    def launch(self, batch: Batch) -> Step:
        """Start one step, behind those that run already. What is not run as graphs is run to its
        end here, alone, with the GIL free during native ops."""
        step: _SpecialGraphStep | _SpecialCudaStep
        is_plain = not batch.special and not batch.prompt_chunks
        if self._cuda is not None:
            if is_plain:
                return _CudaStep(self._cuda.launch(batch))
            step = _SpecialCudaStep(self, batch, self._cuda.launch_forward(batch))
        elif self._stream is None or not batch.is_pure_decode:
            return _EagerStep(self._run_eagerly(batch))
        elif is_plain:
            graph = self._decode_graph(batch, draws=True)
            return _GraphStep(self._stream.launch(graph, batch.rows.sampling.token_ids))
        else:
            graph = self._decode_graph(batch, draws=False)
            nothing = batch.rows.sampling.token_ids[:0]
            step = _SpecialGraphStep(self, batch, self._stream.launch(graph, nothing))
        if not any(_awaits_token(seq) for _, seq in batch.special):
            step.draw()
        return step

    @property
    def slot_logits(self) -> SlotLogits:
        """Made at the first step with special rows."""
        if self._slot_logits is None:
            num_rows, vocab_size = self._buffers.logits.shape
            self._slot_logits = SlotLogits(
                self.ops,
                num_slots=self.max_num_seqs,
                num_rows=num_rows,
                vocab_size=vocab_size,
                device=self.device,
                is_copied=self._cuda is not None,
                on_new_memory=self._draw_graphs.clear,
            )
        return self._slot_logits

    def launch_draw(self, batch: Batch) -> tuple[Plan, Launch]:
        """Of a step with special rows, on the CPU's stream."""
        assert self._stream is not None
        plan = self.slot_logits.plan(batch.special, batch.num_logits)
        graph = self._captured(
            self._draw_graphs, plan.ops_key, lambda: self._draw(plan, batch.rows.sampling)
        )
        return plan, self._stream.launch(graph, batch.rows.sampling.token_ids)

    def draw_behind(self, step: CudaStep, batch: Batch) -> Plan:
        """The draw of a step with special rows, behind its forward pass on the GPU's stream."""
        assert self._cuda is not None
        plan = self.slot_logits.plan(batch.special, batch.num_logits)
        self._cuda.resume(step)
        if batch.num_logits:
            self._draw(plan, self._cuda.rows.sampling.narrow(batch.num_logits))
            self.slot_logits.download(plan)
        self._cuda.finish(step)
        return plan

    def prompt_logprobs(self, batch: Batch) -> list[PromptLogprobs]:
        """Of the step that was launched last, after its draw; waited for."""
        return [
            (chunk.seq, chunk.start + 1, self._prompt_logprobs(batch, chunk))
            for chunk in batch.prompt_chunks
        ]

    def close(self) -> None:
        """Release weights, KV pool, activations and graphs. The runner is unusable afterwards."""
        self._stream = None  # ends when what was launched has
        try:
            if self._cuda is not None:
                self._cuda.close()
        finally:
            self._graphs.clear()
            self._draw_graphs.clear()
            del self.model, self.kv_cache, self._buffers, self._cuda, self._slot_logits
        if self.device.type == "cuda":
            if not self.ops.supports_graphs:
                # Torch's own: cuBLAS keeps a workspace for each stream, all of the process here.
                torch._C._cuda_clearCublasWorkspaces()
            release_unused()

    def _run_eagerly(self, batch: Batch) -> StepOutput:
        rows = batch.rows
        start = perf_counter()
        idle_seconds = start - self._ops_ended
        self._run_forward(rows, batch.size, batch.is_pure_decode)
        token_ids: list[int] = []
        logprobs: dict[int, Logprobs] = {}
        plan = self.slot_logits.plan(batch.special, batch.num_logits) if batch.special else None
        if batch.num_logits:
            if plan is None:
                self._sample(rows.sampling, self._buffers.logits[: batch.num_logits])
            else:
                self._draw(plan, rows.sampling)
                logprobs = self.slot_logits.logprobs(plan)
            token_ids = rows.sampling.token_ids.tolist()
        self._ops_ended = perf_counter()
        ops_seconds = self._ops_ended - start
        prompt_logprobs = self.prompt_logprobs(batch)
        return StepOutput(token_ids, logprobs, ops_seconds, idle_seconds, prompt_logprobs)

    def _run_step(self, rows: StepRows, size: BatchSize, is_pure_decode: bool) -> None:
        """All ops of a step, from token ids to token ids."""
        self._run_forward(rows, size, is_pure_decode)
        self._sample(rows.sampling, self._buffers.logits[: size.num_logits])

    def _run_forward(self, rows: StepRows, size: BatchSize, is_pure_decode: bool) -> None:
        """The same without the draw."""
        buffers = self._buffers.narrow(size.num_tokens, size.num_logits)
        self._forward(rows, buffers, is_pure_decode)

    def _forward(self, rows: StepRows, buffers: ForwardBuffers, is_pure_decode: bool) -> None:
        forward, draw = rows.forward, rows.sampling
        if is_pure_decode:
            self.ops.advance_decode(
                forward.input_ids,
                forward.positions,
                forward.seq_lens,
                draw.step_idx,
                forward.slot_mapping,
                draw.token_ids,
                forward.block_tables,
                self.block_size,
            )
        elif self._cuda is not None:
            drawn = self._cuda.rows.drawn
            self.ops.take_drawn(forward.input_ids, drawn, rows.source_rows)
        self.model.forward(buffers, forward, self.kv_cache, every_token=is_pure_decode)

    def _draw(self, plan: Plan, draw: SamplingBatch) -> None:
        """`_sample`, with all that the plan says about the rows."""
        self.slot_logits.run(
            plan,
            self._buffers.logits[: plan.num_logits],
            draw.token_ids,
            lambda logits: self._sample(draw, logits),
        )

    def _sample(self, draw: SamplingBatch, logits: torch.Tensor) -> None:
        self.ops.sample(
            draw.token_ids,
            logits,
            draw.temperature,
            draw.top_k,
            draw.top_p,
            draw.min_p,
            draw.seeds,
            draw.step_idx,
        )

    def _decode_graph(self, batch: Batch, draws: bool) -> Graph:
        """On a CPU: the whole step for this number of sequences, or all of it but the draw."""
        run = self._run_step if draws else self._run_forward
        return self._captured(
            self._graphs,
            (batch.num_seqs, draws),
            lambda: run(batch.rows, batch.size, is_pure_decode=True),
        )

    def _captured(
        self, graphs: OrderedDict[Hashable, Graph], key: Hashable, run: Callable[[], None]
    ) -> Graph:
        """The graph of that key, captured at its first use."""
        graph = graphs.get(key)
        if graph is not None:
            graphs.move_to_end(key)
            return graph
        with self.ops.capture() as graph:
            run()
        if len(graphs) >= _MAX_GRAPHS:
            graphs.popitem(last=False)
        graphs[key] = graph
        return graph

    def _prompt_logprobs(self, batch: Batch, chunk: PromptChunk) -> list[Logprobs]:
        """Of the tokens behind those of the chunk, in pieces of as many rows as there are logits;
        the step's own logits are gone afterwards."""
        results: list[Logprobs] = []
        known, most = chunk.seq.token_ids, len(self._buffers.logits)
        for begin in range(0, chunk.num_tokens, most):
            count = min(most, chunk.num_tokens - begin)
            rows = torch.arange(count, dtype=torch.int32) + (chunk.row + begin)
            position = chunk.start + begin + 1
            token_ids = torch.tensor(known[position : position + count], dtype=torch.int32)
            buffers = self._buffers.narrow(batch.size.num_tokens, count)
            self.model.head(buffers, rows.to(self.device))
            wanted = [chunk.seq.params.prompt_logprobs or 0] * count
            results += self._top_logprobs(buffers.logits, token_ids.to(self.device), wanted)
        return results

    def _top_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, wanted: list[int]
    ) -> list[Logprobs]:
        """One for each row; of a row that wants -1 it says nothing."""
        num_rows, vocab_size = logits.shape
        shape = num_rows, min(max(wanted), vocab_size)
        values = torch.zeros(shape, dtype=torch.float32, device=self.device)
        ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        drawn = torch.zeros(num_rows, dtype=torch.float32, device=self.device)
        counts = torch.tensor(wanted, dtype=torch.int32, device=self.device)
        self.ops.top_logprobs(values, ids, drawn, logits, token_ids, counts)
        rows = zip(drawn.tolist(), ids.tolist(), values.tolist(), wanted, strict=True)
        return [
            (logprob, dict(zip(row_ids[:count], row_values[:count], strict=True)))
            for logprob, row_ids, row_values, count in rows
        ]

    def _new_cuda_steps(
        self, use_graphs: bool, progress: Callable[[str, float], None] | None
    ) -> CudaSteps:
        from tinyvllm.cuda_steps import CudaSteps

        self.buckets = Buckets(self.max_num_seqs, self.max_num_batched_tokens)
        self._cuda = steps = CudaSteps(
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_blocks=-(-self.max_model_len // self.block_size),
            buckets=self.buckets,
            run=self._run_step,
            run_forward=self._run_forward,
        )
        if use_graphs:
            try:
                steps.capture_all(
                    lambda done: progress("capturing graphs", done) if progress else None
                )
            except BaseException:
                self._cuda = None  # which holds this runner, and so the weights
                with suppress(RuntimeError):  # what came first says more
                    steps.close()
                raise
        return steps

    def _allocate_buffers(self) -> ForwardBuffers:
        """Raises `ConfigError` where a GPU has no room for them beside the weights."""
        sizes = self.model_config, self.max_num_batched_tokens, self.max_num_seqs, self.dtype
        if self.device.type == "cuda":
            needed = BufferPlan.make(*sizes).num_bytes
            free = torch.cuda.mem_get_info(self.device)[0]
            if needed + self._gpu_reserve() > free:
                raise ConfigError(
                    f"max_num_batched_tokens {self.max_num_batched_tokens} and max_num_seqs "
                    f"{self.max_num_seqs} need {needed / 2**30:.2f} GiB of activations on "
                    f"{self.device}, and {self._gpu_reserve() / 2**30:.2f} GiB are for graphs and "
                    f"sampling; {free / 2**30:.2f} GiB are free beside the weights: lower them",
                    param="max_num_batched_tokens",
                )
        return ForwardBuffers.allocate(*sizes, self.device)

    def _gpu_reserve(self) -> int:
        """Bytes of a GPU that are left for what comes later: graphs, workspaces, and the state of
        slots with penalties and masks, which the first request that asks for them allocates."""
        return _GRAPH_BYTES + 10 * self.max_num_seqs * self.model_config.vocab_size

    @contextmanager
    def _named_out_of_memory(self) -> Iterator[None]:
        """A GPU's own error -> `ConfigError`: somebody else took memory meanwhile, or the reserve
        was too small."""
        try:
            yield
        except RuntimeError as error:  # torch's, the kernels' own, or a graph's
            if self.device.type != "cuda" or "out of memory" not in str(error):
                raise
            free, total = torch.cuda.mem_get_info(self.device)
            raise ConfigError(
                f"{self.device} has no memory left behind the weights ({free / 2**30:.2f} of "
                f"{total / 2**30:.2f} GiB are free): lower num_blocks, max_num_batched_tokens or "
                "max_num_seqs, or stop other programs there",
                param="num_blocks",
            ) from error

    def _size_pool(self, config: EngineConfig) -> int:
        """KV blocks: as configured, else what the configured load needs within half of the free
        memory. Raises `ConfigError` when not even one block fits."""
        block_bytes = KVCache.num_bytes_per_block(self.model_config, config.block_size, self.dtype)
        free = free_memory()
        if self.device.type == "cuda":
            free = max(0, torch.cuda.mem_get_info(self.device)[0] - self._gpu_reserve())
        if config.num_blocks is not None:
            if config.num_blocks * block_bytes > free:
                raise ConfigError(
                    f"num_blocks {config.num_blocks} needs "
                    f"{config.num_blocks * block_bytes / 2**30:.1f} GiB of KV cache "
                    f"({block_bytes} bytes a block); {free / 2**30:.1f} GiB are free",
                    param="num_blocks",
                )
            return config.num_blocks
        per_seq = min(config.expected_seq_len * 3 / 2, self.max_model_len)
        wanted = self.max_num_seqs * -(-int(per_seq) // config.block_size)
        # One sequence of full length always fits, if memory allows.
        wanted = max(wanted, -(-self.max_model_len // config.block_size))
        num_blocks = min(wanted, free // 2 // block_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"no memory for a KV cache: a block takes {block_bytes} bytes and {free} are free; "
                "stop other programs or set num_blocks",
                param="num_blocks",
            )
        if num_blocks < wanted:
            logger.warning(
                "KV cache cut to %d blocks of the %d wanted: half of the free memory (%.1f GiB)",
                num_blocks,
                wanted,
                free / 2**30,
            )
        return num_blocks


def _awaits_token(seq: Sequence) -> bool:
    """At its launch: which token it may draw depends on one that is not known yet."""
    allowed = seq.allowed
    if allowed is None or not allowed.depends_on_output or seq.finish_reason is not None:
        return False
    return bool(allowed.num_taken != seq.num_scheduled_tokens - seq.num_prompt_tokens)


def _resolve_device(device: str) -> torch.device:
    """Raises `NotSupportedError` for a GPU that is not there, or that `_C` has no kernels for."""
    if device == "auto" and not _num_cuda_devices():
        if torch.cuda.is_available() or Path("/dev/nvidiactl").exists():
            logger.warning("there is a GPU, but %s: running on the CPU", _no_cuda_reason())
        device = "cpu"
    if device == "cpu":
        return torch.device("cpu")
    resolved = torch.device("cuda" if device == "auto" else device)
    index = resolved.index or 0
    if index >= (count := _num_cuda_devices()):
        found = f"{count} usable GPUs are here" if count else _no_cuda_reason()
        raise NotSupportedError(f'device {device!r}: {found}; use "cpu" or "auto"', param="device")
    return torch.device("cuda", index)


def _num_cuda_devices() -> int:
    """GPUs that torch and the kernels of `_C` can both use."""
    try:
        from tinyvllm import _C
    except ImportError:
        return 0
    if not _C.has_cuda or not torch.cuda.is_available():
        return 0
    return min(_C.num_cuda_devices(), torch.cuda.device_count())


def _no_cuda_reason() -> str:
    try:
        from tinyvllm import _C
    except ImportError:
        return "the compiled extension is missing"
    if not _C.has_cuda:
        return (
            "this tinyvllm was built without CUDA (build it again with TINYVLLM_CUDA=ON and nvcc)"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    return "no GPU, or no driver, was found"


def _resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model was made for "
            f"(max_position_embeddings {limit})",
            param="max_model_len",
        )
    return config.max_model_len


def free_memory(proc: str | PathLike[str] = "/proc", sys: str | PathLike[str] = "/sys") -> int:
    """Bytes of memory this process may still take: the machine's, within its cgroup's limit.

    Page cache counts as free, for the machine and for the cgroup alike. 4 GiB where nobody says
    (not Linux).
    """
    candidates = [
        int(line.split()[1]) * 1024
        for line in _lines(Path(proc) / "meminfo")
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(Path(proc) / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = "fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = "fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Every ancestor's limit holds too. In a container the path may lie outside of the mount,
        # whose root is then the group itself.
        relative = path.strip("/")
        groups = [Path(sys) / root]
        for part in filter(None, relative.split("/")):
            groups.append(groups[-1] / part)
        candidates += [left for left in (_left_in_group(group, *names) for group in groups) if left]
    return min(candidates, default=4 << 30)


def _left_in_group(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _lines(group / limit_name), _lines(group / usage_name)
    if not limit or not usage or not limit[0].isdigit():  # no such group, or "max"
        return None
    cache = [
        int(line.split()[1])
        for line in _lines(group / "memory.stat")
        if line.startswith(cache_name + " ")
    ]
    return max(1, int(limit[0]) - int(usage[0]) + sum(cache))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
