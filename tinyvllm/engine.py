"""Engine: one model, one thread that runs it, and the mailbox between that thread and its callers.

    callers ──("add" | "abort" | "resume" | ..., state)──►  SimpleQueue  ──►  engine thread
       └──── text ────►  tokenizing thread  ──("add" | "reject", state)──►──┘

    engine thread:  receive ─► schedule ─► build ─► launch N+1 ─► deliver N-1 ─► result N ─► update
                       ▲  blocked here, at no cost, while nothing can run                     │ N
                       └────────────────────────────────────────────────── (draw N+1) ◄───────┘

Of a step whose draw depends on the token before (structured output) only the forward pass is
launched ahead; the draw follows when the host has that token and made the mask for the next.

A step is launched before the last one's result is known (scheduler.py says what that takes), and a
step's tokens are delivered when the next is on its way: the device always has work, while this
thread detokenizes, fills buffers and wakes loops. Waking gives up the GIL, which a loop then keeps
for as long as its readers run; it costs no step anything here. What cannot run ahead (on a CPU a
step with prompts, whose arrays are those of the step before) waits for the result, and its tokens
to be delivered, first.

A SimpleQueue's put is reentrant and never waits, so a finalizer may abort from inside of anything.
Bounds: at most `max_num_seqs + max_queued_requests` requests wait or run; commands beside "add" are
one per stream and state change. Nobody waits for a reader: a lagging stream is paused in the
scheduler. Deadlines need no thread: this one looks at the next between steps, and waits no longer.

No exception leaves the engine thread: a request's own error ends that request, any other ends the
engine, and every live and later request gets `EngineDeadError` with its cause.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm import hub
from tinyvllm.allowed_tokens import AllowedTokens, bad_word_ids
from tinyvllm.batch import BatchBuilder
from tinyvllm.block_manager import BlockManager
from tinyvllm.detokenizer import Detokenizer
from tinyvllm.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidParameterError,
    ModelNotFoundError,
    RequestTimeoutError,
)
from tinyvllm.metrics import Family, Recorder, families
from tinyvllm.model_runner import ModelRunner
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence, SequenceStatus, stop_ids_of
from tinyvllm.stream import Signal, StreamState, wake
from tinyvllm.structured import GrammarCompiler
from tinyvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinyvllm.config import EngineConfig, ModelConfig
    from tinyvllm.model_runner import Step
    from tinyvllm.sampling_params import SamplingParams
    from tinyvllm.scheduler import Update
    from tinyvllm.sequence import FinishReason, Schedule
    from tinyvllm.slot_logits import Logprobs
    from tinyvllm.stream import Item

logger = logging.getLogger(__name__)

MAX_WAITING_STATS = 256

Command = tuple[
    # Of one request, whose state comes along:
    Literal["add", "reject", "abort", "resume", "priority", "deadline"]
    # Of the engine:
    | Literal["pause", "unpause", "drain", "tokenized", "close"],
    StreamState | None,
]


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One sequence that runs or waits: a snapshot."""

    request_id: str
    """The caller's label."""
    state: Literal["waiting", "prefill", "decode", "paused"]
    slot: int | None
    """None while it waits."""
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds and has done: a snapshot."""

    num_running: int
    """Sequences that hold a slot, paused ones included."""
    num_waiting: int
    num_paused: int
    """Sequences whose reader lags."""
    num_free_blocks: int
    """KV blocks that can be handed out; those that only the prefix cache keeps count as free."""
    num_blocks: int
    num_prompt_tokens: int
    """Of all requests so far, like every count below."""
    num_output_tokens: int
    num_requests: int
    num_preemptions: int
    num_steps: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache, and of those the tokens found."""
    prefix_cache_hits: int
    max_num_seqs: int
    """Slots, and the token budget of a step: the configured ones, or what the device suggested."""
    max_num_batched_tokens: int
    num_shared_blocks: int
    """KV blocks that more than one sequence has."""
    num_cached_blocks: int
    """Of the free blocks those that are kept for their prefix."""
    sequences: tuple[SequenceStats, ...]
    """The running ones by slot, then the first 256 of those that wait, by place in the queue."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the engine works: a snapshot."""

    alive: bool
    """Started, and neither closed nor dead."""
    last_step_age: float | None
    """Seconds since the last step ended (or work came); None while there is nothing to do."""
    error: BaseException | None
    """Why the engine thread failed."""
    paused: bool = False
    """By `AsyncEngine.pause`."""
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    """0 when not alive, like the counts above."""


@dataclass(slots=True)
class StepTimings:
    """Where steps spend their time, in seconds summed over steps; for the bench."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens drawn."""
    schedule: float = 0.0
    build: float = 0.0
    launch: float = 0.0
    update: float = 0.0
    detokenize: float = 0.0
    publish: float = 0.0
    """Filling buffers and waking readers."""
    ops: float = 0.0
    idle: float = 0.0
    """In which no ops ran: all that the host costs a step."""


@dataclass(slots=True, eq=False)
class _Delivery:
    """One step's tokens, not yet with their readers."""

    update: Update
    logprobs: dict[int, Logprobs]
    time: float
    """When they were there."""


class _StartCancelled(Exception):
    """close() came while the model was loading."""


class Engine:
    """One model and its engine thread. `AsyncEngine` and `LLM` are its faces.

    `start` and `close` only signal; `started` and `stopped` are set when they have been done.
    """

    def __init__(self, model: str | os.PathLike[str], config: EngineConfig) -> None:
        self.config = config
        self.started = Signal()
        """The model is loaded, or loading failed (`start_error`)."""
        self.stopped = Signal()
        """The thread is at its end: nothing runs and everything is released."""
        self.start_error: BaseException | None = None
        self._step_timings: StepTimings | None = None
        self.model_config: ModelConfig
        self.max_model_len: int
        self.max_num_seqs: int
        self.tokenizer: Tokenizer
        self._model = model
        self._pid = os.getpid()
        self._mailbox: SimpleQueue[Command] = SimpleQueue()
        self._texts: SimpleQueue[StreamState | None] = SimpleQueue()
        self._states: dict[int, StreamState] = {}  # those the scheduler knows
        self._seq_ids = itertools.count()
        self._closing = False
        self._draining = False
        self._drain_deadline: float | None = None
        self._has_tokenized_all = False  # after a drain
        self._is_drain_over = False
        self._is_paused = False
        # (time, tie break, request; None: the drain), a heap.
        self._deadlines: list[tuple[float, int, StreamState | None]] = []
        self._num_finished: dict[FinishReason, int] = dict.fromkeys(
            ("stop", "length", "abort", "error"), 0
        )
        self._end_times: deque[float] = deque(maxlen=32)  # of the last requests
        self._recorder: Recorder | None = None
        self._reported = ("", 0)
        self._end: EngineError | None = None  # closed or dead: no request is taken any more
        self._idle_since: float | None = 0.0
        self._last_step = 0.0
        self._num_steps = self._num_requests = 0
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._final_stats: EngineStats | None = None
        self._runner: ModelRunner
        self._scheduler: Scheduler
        self._builder: BatchBuilder
        self._grammars: GrammarCompiler
        self._thread = threading.Thread(target=self._main, name="tinyvllm-engine", daemon=True)
        self._tokenizing = threading.Thread(
            target=self._tokenize_texts, name="tinyvllm-tokenizer", daemon=True
        )
        self._in_flight: deque[tuple[Schedule, Step]] = deque()
        self._followed: dict[int, Sequence] = {}  # whose next token depends on those before it
        self._undelivered: _Delivery | None = None

    # --- Any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading, in the engine thread."""
        self._thread.start()

    def close(self) -> None:
        """Tell the engine thread to end every request and release everything. Idempotent."""
        self._closing = True
        self._mailbox.put(("close", None))

    def drain(self, timeout: float | None) -> None:
        """Tell it to take no new requests and to end with the last, or after `timeout` seconds."""
        if timeout is not None:
            self._drain_deadline = perf_counter() + timeout
        self._draining = True
        self._mailbox.put(("drain", None))

    def set_paused(self, paused: bool) -> None:
        """Tell it to hold after the steps that are launched, or to go on."""
        self._mailbox.put(("pause" if paused else "unpause", None))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the engine thread; from a child process, where it does not run, return."""
        if self._thread.ident is not None and os.getpid() == self._pid:
            self._thread.join(timeout)

    @property
    def is_closing(self) -> bool:
        return (self._closing or self._draining) and not self.stopped.is_set()

    @property
    def is_running(self) -> bool:
        """The thread exists and has not ended. False in a forked child."""
        return self._thread.is_alive() and os.getpid() == self._pid

    def check_open(self) -> None:
        """Raises `EngineClosedError` or `EngineDeadError` unless requests can be taken."""
        if self._end is not None:
            raise self._copy_of_end()
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine was created in another process ({self._pid}); threads do not survive "
                "a fork: create an engine in the process that uses it"
            )
        if not self.started.is_set():
            raise EngineClosedError("the engine is not started yet: await start() first")
        if self._draining:
            raise EngineClosedError("the engine is being closed: it takes no new requests")

    def new_state(
        self,
        prompt: str | list[int] | list[Mapping[str, Any]],
        params: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        cache_salt: bytes = b"",
        enable_prefix_caching: bool = True,
    ) -> StreamState:
        """A request that is not submitted yet. `prompt`: text, token ids, or chat messages with
        `chat_options`. Raises as `check_open`, `EngineOverloadedError`, for token ids in `params`
        that are none `InvalidParameterError`, and for those of a prompt `ContextLengthError`."""
        self.check_open()
        params.check_vocab(self.model_config.vocab_size)
        num_live = len(self._states) + self._mailbox.qsize() + self._texts.qsize()
        limit = self.max_num_seqs + self.config.max_queued_requests
        if num_live >= limit:
            retry_after = self._time_until_free(num_live - limit + 1)
            raise EngineOverloadedError(
                f"{num_live} requests wait or run already, and max_queued_requests "
                f"({self.config.max_queued_requests}) beyond {self.max_num_seqs} slots are taken; "
                f"retry in {retry_after:.1f} s",
                retry_after=retry_after,
            )
        seq_id = next(self._seq_ids)
        state = StreamState(
            seq_id=seq_id,
            request_id=f"req-{seq_id}" if request_id is None else request_id,
            prompt=prompt,
            params=params,
            priority=priority,
            mailbox=self._mailbox,
            resume_below=max(1, self.config.max_buffered_tokens // 2),
            chat_options=chat_options,
            timeout=timeout,
            cache_salt=cache_salt,
            enable_prefix_caching=enable_prefix_caching,
        )
        if chat_options is None and not isinstance(prompt, str):
            state.prompt_token_ids = prompt  # type: ignore[assignment]  # not messages: ids
            try:
                self._scheduler.check_prompt_len(len(prompt))
            except AttributeError:  # released just now
                raise self._copy_of_end() from None
        return state

    def submit(self, state: StreamState) -> None:
        """Hand the request over. From here on it always ends: with tokens or with an error."""
        if state.deadline is not None:
            self._mailbox.put(("deadline", state))
        if state.prompt_token_ids is None or state.params.needs_tokenizer:
            self._texts.put(state)
        else:
            self._mailbox.put(("add", state))
        if self._end is not None:  # since check_open: perhaps nobody reads the queues any more
            self._fail(state)

    def stats(self) -> EngineStats:
        """Raises `EngineClosedError` before the start; after the end, the last numbers."""
        if self._final_stats is not None:
            return self._final_stats
        if not self.started.is_set() or self.start_error is not None:
            raise EngineClosedError("the engine is not started: no statistics yet")
        try:
            return self._snapshot()
        except AttributeError:  # released just now
            if self._final_stats is None:
                raise self._copy_of_end() from None
            return self._final_stats

    def health(self) -> EngineHealth:
        alive = self.started.is_set() and self._end is None and self.is_running
        busy_since = self._last_step if alive and self._idle_since is None else None
        error = self._end.__cause__ if self._end is not None else None
        scheduler = getattr(self, "_scheduler", None) if alive else None
        counts = {}
        if scheduler is not None:
            counts = {
                "num_running": scheduler.num_running,
                "num_waiting": scheduler.num_waiting,
                "num_free_blocks": scheduler.block_manager.num_free_blocks,
                "num_blocks": scheduler.block_manager.num_blocks,
            }
        return EngineHealth(
            alive=alive,
            last_step_age=None if busy_since is None else perf_counter() - busy_since,
            error=error if error is not None else self.start_error,
            paused=alive and self._is_paused,
            **counts,
        )

    @property
    def step_timings(self) -> StepTimings | None:
        """Set to a StepTimings to have it filled."""
        return self._step_timings

    @step_timings.setter
    def step_timings(self, timings: StepTimings | None) -> None:
        self._step_timings = timings
        runner = getattr(self, "_runner", None)  # None: stopped meanwhile
        if runner is not None:
            runner.time_steps(timings is not None)

    def enable_metrics(self) -> Recorder:
        """Record from now on, if not yet."""
        if self._recorder is None:
            self._recorder = Recorder()
        return self._recorder

    def metrics_families(self) -> list[Family]:
        """Raises as `stats`."""
        return families(self.stats(), self._num_finished, self.enable_metrics())

    def _time_until_free(self, num_places: int) -> float:
        """Seconds until about so many requests have ended, by the pace of the last ones."""
        ends = self._end_times.copy()
        pace = (perf_counter() - ends[0]) / len(ends) if ends else 1.0
        return min(60.0, max(0.1, pace * num_places))

    def _copy_of_end(self) -> EngineError:
        """Why no request is taken, as a new exception: each raiser gets its own traceback."""
        assert self._end is not None
        error = type(self._end)(*self._end.args)
        error.__cause__ = self._end.__cause__
        return error

    def _fail(self, state: StreamState) -> None:
        """After the end: the request gets no further token. Two threads may do it at once."""
        if state.finished:
            return
        error = self._copy_of_end()
        state.end("error" if isinstance(error, EngineDeadError) else "abort", error)
        state.wake_reader()

    # --- Tokenizing thread ----------------------------------------------------------------------

    def _tokenize_texts(self) -> None:
        """Text and chat messages become token ids here: neither a loop nor a step waits."""
        state: StreamState | None = None
        while (state := self._texts.get()) is not None:
            if not state.aborted:  # else its "abort" command ends it
                self._tokenize(state)
            state = None  # a blocked thread must not keep streams, and so engines, alive
        self._mailbox.put(("tokenized", None))

    def _tokenize(self, state: StreamState) -> None:
        try:
            if state.prompt_token_ids is not None:
                ids = state.prompt_token_ids
            elif state.chat_options is None:
                ids = self.tokenizer.encode(state.prompt)
            else:
                ids = self.tokenizer.encode_chat(state.prompt, **state.chat_options)
            self._scheduler.check_prompt_len(len(ids))
            state.allowed = self._allowed_tokens(state.params)
        except BaseException as error:  # the thread has to live: others' texts wait
            state.error = error
            self._mailbox.put(("reject", state))
        else:
            state.prompt_token_ids = ids
            self._mailbox.put(("add", state))
        if self._end is not None:
            self._fail(state)

    def _allowed_tokens(self, params: SamplingParams) -> AllowedTokens | None:
        """None when the request draws from the model's own logits. A grammar takes its time: not
        for the engine thread."""
        if not params.adjusts_logits:
            return None
        return AllowedTokens(
            params,
            self.model_config.vocab_size,
            stop_ids_of(params, self.model_config.eos_token_ids),
            bad_word_ids(self.tokenizer, params.bad_words),
            self._grammars.compile(params),
        )

    # --- Engine thread --------------------------------------------------------------------------

    def _main(self) -> None:
        cause: BaseException | None = None
        try:
            self._load()
        except BaseException as error:
            if not isinstance(error, _StartCancelled):
                self.start_error = error
            cause = error
        else:
            self._tokenizing.start()
            self.started.set()
            logger.info("ready: %s", self._model)
            try:
                while self._receive():
                    self._step()
                self._deliver()
            except BaseException as error:
                logger.exception("the engine thread failed")
                cause = error
        self._stop(cause)

    def _load(self) -> None:
        config = self.config
        model_dir = hub.resolve(self._model, progress=self._report)
        if not (model_dir / "config.json").exists():  # before any other file is missed
            raise ModelNotFoundError(
                f"{model_dir} is not a model directory: it has no config.json; it needs "
                "config.json, *.safetensors and tokenizer.json",
                path=model_dir,
            )
        self._report("loading tokenizer", 0.0)
        self.tokenizer = Tokenizer.from_dir(model_dir)
        runner = ModelRunner(Path(model_dir), config, progress=self._report)
        self._runner = runner
        self.model_config = runner.model_config
        self._grammars = GrammarCompiler(
            self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        self.max_model_len = runner.max_model_len
        self.max_num_seqs = runner.max_num_seqs
        self._scheduler = Scheduler(
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            block_manager=BlockManager(
                runner.num_blocks, config.block_size, config.enable_prefix_caching
            ),
            scheduling=config.scheduling,
        )
        self._builder = BatchBuilder(
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            block_size=config.block_size,
            buckets=runner.buckets,
        )
        self._report("ready", 1.0)

    def _report(self, phase: str, fraction: float) -> None:
        """Progress of loading; also where a close() during the start takes effect."""
        if self._closing:
            raise _StartCancelled
        quarter = phase, int(4 * fraction)
        if quarter != self._reported:
            self._reported = quarter
            logger.info("%s: %.0f %%", phase, 100 * fraction)

    def _receive(self) -> bool:
        """Carry out all commands; block while nothing can run. False when it is time to close."""
        mailbox, scheduler = self._mailbox, self._scheduler
        while True:
            if self._deadlines:
                self._end_overdue()
            if mailbox.empty():
                if self._in_flight or (scheduler.has_work and not self._is_paused):
                    return not self._is_drain_over
                self._deliver()
                if not scheduler.num_unfinished:
                    self._builder.forget_all()
                if self._is_drain_over or (self._has_tokenized_all and not self._states):
                    return False
                self._idle_since = perf_counter()
            state = None  # a blocked thread must not keep streams, and so engines, alive
            try:
                command, state = mailbox.get(timeout=self._time_to_deadline())
            except Empty:
                continue
            if self._idle_since is not None:
                self._idle_since = None
                self._last_step = perf_counter()
            if command == "close":
                return False
            if state is None:
                self._control(command)
            elif command == "add":
                self._add(state)
            elif command == "resume":
                for seq in state.sequences:
                    scheduler.set_paused(seq.seq_id, False)
            elif command == "priority":
                for seq in state.sequences:
                    scheduler.set_priority(seq.seq_id, state.priority)
            elif command == "deadline":
                self._note_deadline(state)
            elif command == "reject":
                self._finish(state, "error", state.error)
            else:
                self._drop(state)

    def _control(self, command: str) -> None:
        """What is told to the engine as a whole."""
        if command == "pause":
            self._finish_launched()
            self._is_paused = True
        elif command == "unpause":
            self._is_paused = False
        elif command == "tokenized":
            self._has_tokenized_all = True
        else:
            assert command == "drain", command
            self._is_paused = False
            self._texts.put(None)  # behind the last text: "tokenized" answers
            if self._drain_deadline is not None:
                heappush(self._deadlines, (self._drain_deadline, -1, None))

    def _note_deadline(self, state: StreamState) -> None:
        deadlines = self._deadlines
        if len(deadlines) > 64 + 2 * len(self._states):  # else long ones of ended requests pile up
            deadlines[:] = [d for d in deadlines if d[2] is None or not d[2].finished]
            heapify(deadlines)
        assert state.deadline is not None
        heappush(deadlines, (state.deadline, state.seq_id, state))

    def _time_to_deadline(self) -> float | None:
        """Seconds to wait at most."""
        if not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - perf_counter())

    def _end_overdue(self) -> None:
        """Ends the requests whose time is over, and a drain whose time is."""
        now = perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            state = heappop(self._deadlines)[2]
            if state is None:
                self._is_drain_over = True
            elif not state.finished:
                assert state.timeout is not None
                message = f"request {state.request_id!r} did not end in {state.timeout:g} s"
                self._drop(state, RequestTimeoutError(message, timeout=state.timeout))

    def _add(self, state: StreamState) -> None:
        if state.finished:
            return
        if state.aborted:
            self._finish(state, "abort")
            return
        assert state.prompt_token_ids is not None
        params = state.params
        self._states[state.seq_id] = state  # from here on it ends when the engine does
        try:
            seq = Sequence(
                state.seq_id,
                state.prompt_token_ids,
                params,
                request_id=state.request_id,
                priority=state.priority,
                eos_token_ids=self.model_config.eos_token_ids,
                owner=state,
            )
            seq.cache_salt = state.cache_salt
            seq.reads_prefix_cache = seq.writes_prefix_cache = state.enable_prefix_caching
            if params.prompt_logprobs is not None:
                seq.reads_prefix_cache = False  # every token of the prompt has to be computed
                state.prompt_logprobs = [None]
            if state.allowed is None:
                state.allowed = self._allowed_tokens(params)
            seq.allowed = state.allowed
            for choice in range(1, params.n):
                seed = (seq.seed + choice + 2**63) % 2**64 - 2**63
                seq.fork(next(self._seq_ids), choice, seed)
            state.sequences = (seq, *seq.forks)
            for fork in seq.forks:
                fork.allowed = seq.allowed and seq.allowed.fork()
            if seq.allowed is not None and seq.allowed.depends_on_output:
                self._followed |= {each.seq_id: each for each in state.sequences}
            for each in state.sequences:
                each.detokenizer = Detokenizer(
                    self.tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=params.stop,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                )
            self._scheduler.add(seq)
        except Exception as error:
            self._finish(state, "error", error)
            return
        self._num_requests += 1
        self._num_prompt_tokens += seq.num_prompt_tokens

    def _drop(self, state: StreamState, error: BaseException | None = None) -> None:
        """Stop a request that waits or runs, all its choices."""
        for seq in state.sequences:
            self._scheduler.finish(seq, "abort")
        self._cancel_useless()
        self._finish(state, "abort", error)

    def _finish(
        self,
        state: StreamState,
        reason: Literal["abort", "error"],
        error: BaseException | None = None,
    ) -> None:
        """End a stream before its last token."""
        if state.finished:
            return
        self._states.pop(state.seq_id, None)
        state.end(reason, error)
        self._note_end(state)
        state.wake_reader()

    def _note_end(self, state: StreamState) -> None:
        """Of every request, however it ends: counts, histograms and its line in the log."""
        reason, ended = state.finish_reason, state.time_ended
        assert reason is not None and ended is not None
        self._num_finished[reason] += 1
        self._end_times.append(ended)
        start, scheduled, first = state.time_created, state.time_scheduled, state.time_first_token
        if self._recorder is not None:
            self._recorder.e2e_request_latency.observe(ended - start)
            if scheduled is not None:
                self._recorder.request_queue_time.observe(scheduled - start)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "%s: %s; %d prompt tokens (%d cached), %d output tokens; "
                "queued %s, first token %s, total %.3f s",
                state.request_id,
                reason if state.error is None else f"{reason} ({type(state.error).__name__})",
                len(state.prompt_token_ids or ()),
                state.cached_tokens,
                state.completion_tokens,
                "-" if scheduled is None else f"{scheduled - start:.3f} s",
                "-" if first is None else f"{first - start:.3f} s",
                ended - start,
            )

    def _step(self) -> None:
        """Launch a step, then deliver an earlier one's tokens and take the oldest result."""
        start = perf_counter()
        schedule = self._scheduler.schedule()
        scheduled = built = launched = perf_counter()
        runs_ahead = self._runner.runs_ahead and self._builder.runs_ahead(schedule)
        if schedule:
            if not schedule.is_pure_decode:
                self._note_admissions(schedule)
            if not runs_ahead:
                self._finish_launched()
                scheduled = perf_counter()
            batch = self._builder.build(schedule)
            built = perf_counter()
            self._in_flight.append((schedule, self._runner.launch(batch)))
            launched = perf_counter()
        else:
            assert self._in_flight, "the scheduler has work but schedules nothing"
        self._deliver()
        if not schedule or not runs_ahead or len(self._in_flight) > 1:
            self._take_result()
        timings = self._step_timings
        if timings is not None:
            timings.schedule += scheduled - start
            timings.build += built - scheduled
            timings.launch += launched - built

    def _finish_launched(self) -> None:
        """Before a step that cannot run ahead: nobody's token waits until after it."""
        self._deliver()
        while self._in_flight:
            self._take_result()
            self._deliver()

    def _take_result(self) -> None:
        """Of the oldest step in flight."""
        schedule, step = self._in_flight.popleft()
        output = step.result()
        self._last_step = drawn = perf_counter()
        self._num_steps += 1
        update = self._scheduler.update(schedule, output.token_ids)
        for seq, position, logprobs in output.prompt_logprobs:
            if not seq.owner.finished:
                seq.owner.prompt_logprobs[position : position + len(logprobs)] = logprobs
        if self._followed:
            self._follow()
        if self._in_flight:
            self._in_flight[0][1].draw()
        if update.finished:
            self._cancel_useless()
        if update.entries:
            self._num_output_tokens += len(update.entries)
            self._undelivered = _Delivery(update, output.logprobs, drawn)
        timings = self._step_timings
        if timings is not None:
            timings.num_steps += 1
            timings.num_tokens += len(update.entries)
            timings.ops += output.ops_seconds
            timings.idle += output.idle_seconds
            timings.update += perf_counter() - drawn

    def _follow(self) -> None:
        """Before their next draw: what may come after the tokens that sequences have got."""
        for seq_id, seq in list(self._followed.items()):
            if seq.finish_reason is not None:
                del self._followed[seq_id]
                continue
            if seq.num_output_tokens == seq.allowed.num_taken:
                continue
            try:
                seq.allowed.take(seq.output_token_ids)
            except InvalidParameterError as error:
                for each in seq.owner.sequences:
                    self._scheduler.finish(each, "abort")
                self._finish(seq.owner, "error", error)

    def _cancel_useless(self) -> None:
        """Steps in flight whose sequences have all ended meanwhile."""
        for schedule, step in self._in_flight:
            if all(entry.seq.finish_reason is not None for entry in schedule.sequences):
                step.cancel()

    def _deliver(self) -> None:
        """The last taken result's tokens to their readers."""
        delivery = self._undelivered
        if delivery is None:
            return
        self._undelivered = None
        start = perf_counter()
        items = self._detokenize(delivery)
        detokenized = perf_counter()
        try:
            self._publish(delivery, items)
        except BaseException:  # the engine dies; those marked as woken may not have been
            for entry in delivery.update.entries:
                if (waiter := entry.seq.owner.waiter) is not None:
                    waiter.notified = False
                    entry.seq.owner.wake_reader()
            raise
        timings = self._step_timings
        if timings is not None:
            timings.detokenize += detokenized - start
            timings.publish += perf_counter() - detokenized

    def _note_admissions(self, schedule: Schedule) -> None:
        now = perf_counter()
        for entry in schedule.sequences[schedule.num_decodes :]:
            state: StreamState = entry.seq.owner
            if state.time_scheduled is None:
                state.time_scheduled = now
                state.cached_tokens = entry.seq.num_cached_tokens

    def _detokenize(self, delivery: _Delivery) -> list[Any]:
        """A stream's Item for each sequence that got a token."""
        items = []
        update, logprobs = delivery.update, delivery.logprobs
        finished = update.finished
        for entry, token_id in zip(update.entries, update.token_ids, strict=True):
            seq = entry.seq
            reason = finished.get(seq.seq_id) if finished else None
            detokenizer: Detokenizer = seq.detokenizer
            if reason == "stop" and not self._shows_stop_token(seq, token_id):
                text = detokenizer.finish()
            else:
                text = detokenizer.append(token_id)
                if detokenizer.stopped:
                    self._scheduler.finish(seq, "stop")
                    self._cancel_useless()
                    reason = "stop"
                elif reason is not None:
                    text += detokenizer.finish()
            extra = logprobs.get(seq.seq_id) if logprobs else None
            items.append((text, token_id, reason, extra, seq.choice))
        return items

    def _shows_stop_token(self, seq: Sequence, token_id: int) -> bool:
        """A token that stops shows its text only on request, and an EOS never."""
        return seq.params.include_stop_str_in_output and token_id not in seq.eos_token_ids

    def _publish(self, delivery: _Delivery, items: list[Any]) -> None:
        """Append to the buffers, end what has finished, pause who lags, wake who waits."""
        parked: list[StreamState] = []
        max_buffered = self.config.max_buffered_tokens
        now, recorder = delivery.time, self._recorder
        if recorder is not None:
            recorder.step(delivery.update.entries, now)
        for entry, item in zip(delivery.update.entries, items, strict=True):
            state: StreamState = entry.seq.owner
            if state.finished:  # aborted since
                continue
            buffer = state.buffer
            state.completion_tokens += 1
            state.time_last_token = now
            if state.time_first_token is None:
                state.time_first_token = now
                if recorder is not None:
                    recorder.time_to_first_token.observe(now - state.time_created)
            buffer.append(item)
            if item[2] is not None:
                self._end_choice(state, item)
            elif len(buffer) > max_buffered:
                self._pause(state)
            waiter = state.waiter
            if waiter is not None and not waiter.notified:
                waiter.notified = True
                parked.append(state)
        if parked:
            self._wake_parked(parked)

    def _end_choice(self, state: StreamState, item: Item) -> None:
        """After its last token; of the last choice: the request's end."""
        reasons = state.finish_reasons
        reasons[item[4]] = item[2]
        if None in reasons:
            return
        del self._states[state.seq_id]
        assert reasons[0] is not None
        state.end(reasons[0])
        self._note_end(state)

    def _pause(self, state: StreamState) -> None:
        state.paused = True
        for seq in state.sequences:
            self._scheduler.set_paused(seq.seq_id, True)
        if len(state.buffer) < state.resume_below:  # read meanwhile, before `paused` was seen
            state.paused = False
            for seq in state.sequences:
                self._scheduler.set_paused(seq.seq_id, False)

    def _wake_parked(self, states: list[StreamState]) -> None:
        """Resume the readers for whom a step had a token: one call per loop."""
        waiters = {state.waiter: state for state in states}
        for waiter in wake([waiter for waiter in waiters if waiter is not None]):
            # Its reader can never run again.
            state = waiters[waiter]
            logger.warning("the loop that read %s is closed: aborted", state.request_id)
            state.waiter = None  # it would keep the dead loop's task, stream and engine alive
            state.abort()

    def _snapshot(self) -> EngineStats:
        scheduler = self._scheduler
        manager = scheduler.block_manager
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_paused=scheduler.num_paused,
            num_free_blocks=manager.num_free_blocks,
            num_blocks=manager.num_blocks,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_requests=self._num_requests,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            prefix_cache_queries=manager.prefix_cache_queries,
            prefix_cache_hits=manager.prefix_cache_hits,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_shared_blocks=manager.num_shared_blocks,
            num_cached_blocks=manager.num_cached_blocks,
            sequences=tuple(_stats_of(seq) for seq in scheduler.snapshot(MAX_WAITING_STATS)),
        )

    def _stop(self, cause: BaseException | None) -> None:
        """Close (no cause) or die: end every request, release everything. Never raises."""
        end: EngineError = EngineClosedError("the engine was closed")
        if cause is not None and not isinstance(cause, _StartCancelled):
            end = EngineDeadError(f"the engine thread failed: {type(cause).__name__}: {cause}")
            end.__cause__ = cause
        self._end = end
        if self._tokenizing.ident is not None:
            self._texts.put(None)
            self._tokenizing.join()
        queued = [self._mailbox.get()[1] for _ in range(self._mailbox.qsize())]
        queued += [self._texts.get() for _ in range(self._texts.qsize())]
        for state in (*self._states.values(), *queued):
            if state is not None:
                self._fail(state)
        try:
            self._release(cause)
        finally:
            self.started.set()
            self.stopped.set()

    def _release(self, cause: BaseException | None) -> None:
        """Of a stopping engine: blocks, memory, threads. A device that failed refuses even that."""
        try:
            if self.started.is_set():
                self._scheduler.abort_all()
                self._end_launched()
                self._final_stats = self._snapshot()
        except Exception:
            if cause is None:  # the books of an engine that died may be in disorder
                logger.exception("closing the engine")
        self._states.clear()
        self._deadlines.clear()
        self._in_flight.clear()
        self._followed.clear()
        self._undelivered = None
        try:
            if hasattr(self, "_runner"):
                self._runner.close()
        except Exception:
            logger.exception("releasing the model")
        for name in ("_runner", "_scheduler", "_builder", "_grammars"):
            if hasattr(self, name):  # not when loading failed
                delattr(self, name)
        if cause is not None:
            # Its traceback's frames would keep weights alive for as long as somebody has it.
            traceback.clear_frames(cause.__traceback__)

    def _end_launched(self) -> None:
        """Of a stopping engine: the launched steps' blocks and memory come back."""
        for schedule, step in self._in_flight:
            step.cancel()
            step.draw()
            self._scheduler.update(schedule, step.result().token_ids)


def _stats_of(seq: Sequence) -> SequenceStats:
    return SequenceStats(
        request_id=seq.request_id,
        state="paused" if seq.paused else _STATES[seq.status],
        slot=None if seq.slot < 0 else seq.slot,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output_tokens,
        num_blocks=len(seq.block_table),
    )


_STATES: dict[SequenceStatus, Literal["waiting", "prefill", "decode"]] = {
    SequenceStatus.WAITING: "waiting",
    SequenceStatus.PREFILL: "prefill",
    SequenceStatus.DECODE: "decode",
    SequenceStatus.FINISHED: "decode",  # since it was looked up
}
