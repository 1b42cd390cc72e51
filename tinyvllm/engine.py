"""Engine: one model, one thread that runs it, and the mailbox between that thread and its callers.

    callers ──("add" | "abort" | "resume" | "close", state)──►  SimpleQueue  ──►  engine thread
       └──── text ────►  tokenizing thread  ──("add" | "reject", state)──►──┘

    engine thread:  receive ─► schedule ─► build ─► launch N+1 ─► deliver N-1 ─► result N ─► update
                       ▲  blocked here, at no cost, while nothing can run                     │ N
                       └──────────────────────────────────────────────────────────────────────┘

A step is launched before the last one's result is known (scheduler.py says what that takes), and a
step's tokens are delivered when the next is on its way: the device always has work, while this
thread detokenizes, fills buffers and wakes loops. Waking gives up the GIL, which a loop then keeps
for as long as its readers run; it costs no step anything here. What cannot run ahead (on a CPU a
step with prompts, whose arrays are those of the step before) waits for the result, and its tokens
to be delivered, first.

A SimpleQueue's put is reentrant and never waits, so a finalizer may abort from inside of anything.
Bounds: at most `MAX_LIVE_STREAMS` requests wait or run; commands beside "add" are one per stream
and state change. Nobody waits for a reader: a lagging stream is paused in the scheduler.

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
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm import hub
from tinyvllm.batch import BatchBuilder
from tinyvllm.block_manager import BlockManager
from tinyvllm.detokenizer import Detokenizer
from tinyvllm.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    ModelNotFoundError,
)
from tinyvllm.model_runner import ModelRunner
from tinyvllm.sampling_params import ignored_defaults
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence
from tinyvllm.stream import Signal, StreamState, wake
from tinyvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinyvllm.config import EngineConfig, ModelConfig
    from tinyvllm.model_runner import Logprobs, Step
    from tinyvllm.sampling_params import SamplingParams
    from tinyvllm.scheduler import Update
    from tinyvllm.sequence import Schedule

logger = logging.getLogger(__name__)

MAX_LIVE_STREAMS = 65_536

Command = tuple[Literal["add", "reject", "abort", "resume", "close"], StreamState | None]


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


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the engine works: a snapshot."""

    alive: bool
    """Started, and neither closed nor dead."""
    last_step_age: float | None
    """Seconds since the last step ended (or work came); None while there is nothing to do."""
    error: BaseException | None
    """Why the engine thread failed."""


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
        self.step_timings: StepTimings | None = None
        """Set to a StepTimings to have it filled."""
        self.model_config: ModelConfig
        self.max_model_len: int
        self.tokenizer: Tokenizer
        self._model = model
        self._pid = os.getpid()
        self._mailbox: SimpleQueue[Command] = SimpleQueue()
        self._texts: SimpleQueue[StreamState | None] = SimpleQueue()
        self._states: dict[int, StreamState] = {}  # those the scheduler knows
        self._seq_ids = itertools.count()
        self._closing = False
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
        self._thread = threading.Thread(target=self._main, name="tinyvllm-engine", daemon=True)
        self._tokenizing = threading.Thread(
            target=self._tokenize_texts, name="tinyvllm-tokenizer", daemon=True
        )
        self._in_flight: deque[tuple[Schedule, Step]] = deque()
        self._undelivered: _Delivery | None = None

    # --- Any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading, in the engine thread."""
        self._thread.start()

    def close(self) -> None:
        """Tell the engine thread to end every request and release everything. Idempotent."""
        self._closing = True
        self._mailbox.put(("close", None))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the engine thread; from a child process, where it does not run, return."""
        if self._thread.ident is not None and os.getpid() == self._pid:
            self._thread.join(timeout)

    @property
    def is_closing(self) -> bool:
        return self._closing and not self.stopped.is_set()

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

    def new_state(
        self,
        prompt: str | list[int] | list[Mapping[str, Any]],
        params: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> StreamState:
        """A request that is not submitted yet. `prompt`: text, token ids, or chat messages with
        `chat_options`. Raises as `check_open`, `EngineOverloadedError`, and for ids
        `ContextLengthError`."""
        self.check_open()
        num_live = len(self._states) + self._mailbox.qsize() + self._texts.qsize()
        if num_live >= MAX_LIVE_STREAMS:
            raise EngineOverloadedError(
                f"{num_live} requests wait or run already; retry later", retry_after=1.0
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
        if state.prompt_token_ids is None:
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
        return EngineHealth(
            alive=alive,
            last_step_age=None if busy_since is None else perf_counter() - busy_since,
            error=error if error is not None else self.start_error,
        )

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

    def _tokenize(self, state: StreamState) -> None:
        try:
            if state.chat_options is None:
                ids = self.tokenizer.encode(state.prompt)
            else:
                ids = self.tokenizer.encode_chat(state.prompt, **state.chat_options)
            self._scheduler.check_prompt_len(len(ids))
        except BaseException as error:  # the thread has to live: others' texts wait
            state.error = error
            self._mailbox.put(("reject", state))
        else:
            state.prompt_token_ids = ids
            self._mailbox.put(("add", state))
        if self._end is not None:
            self._fail(state)

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
        for name, value in ignored_defaults(runner.model_config.sampling_defaults).items():
            logger.warning(
                "%s asks for %s=%r, which is not supported yet: requests run without it",
                model_dir / "generation_config.json",
                name,
                value,
            )
        self.max_model_len = runner.max_model_len
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
        """Carry out all commands; block while nothing can run. False when told to close."""
        mailbox, scheduler = self._mailbox, self._scheduler
        while True:
            if mailbox.empty():
                if scheduler.has_work or self._in_flight:
                    return True
                self._deliver()
                self._idle_since = perf_counter()
            state = None  # a blocked thread must not keep streams, and so engines, alive
            command, state = mailbox.get()
            if self._idle_since is not None:
                self._idle_since = None
                self._last_step = perf_counter()
            if command == "close":
                return False
            assert state is not None
            if command == "add":
                self._add(state)
            elif command == "resume":
                scheduler.set_paused(state.seq_id, False)
            elif command == "reject":
                self._finish(state, "error", state.error)
            else:
                self._abort(state)

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
            state.detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
            seq = Sequence(
                state.seq_id,
                state.prompt_token_ids,
                params,
                request_id=state.request_id,
                priority=state.priority,
                eos_token_ids=self.model_config.eos_token_ids,
                owner=state,
            )
            self._scheduler.add(seq)
        except Exception as error:
            self._finish(state, "error", error)
            return
        self._num_requests += 1
        self._num_prompt_tokens += seq.num_prompt_tokens

    def _abort(self, state: StreamState) -> None:
        self._scheduler.abort(state.seq_id)
        self._cancel_useless()
        self._finish(state, "abort")

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
        state.wake_reader()

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
        timings = self.step_timings
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
        if update.finished:
            self._cancel_useless()
        if update.entries:
            self._num_output_tokens += len(update.entries)
            self._undelivered = _Delivery(update, output.logprobs, drawn)
        timings = self.step_timings
        if timings is not None:
            timings.num_steps += 1
            timings.num_tokens += len(update.entries)
            timings.ops += output.ops_seconds
            timings.idle += output.idle_seconds
            timings.update += perf_counter() - drawn

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
        timings = self.step_timings
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
        """(text, token id, finish reason, logprobs) for each sequence that got a token."""
        items = []
        update, logprobs = delivery.update, delivery.logprobs
        finished = update.finished
        for entry, token_id in zip(update.entries, update.token_ids, strict=True):
            seq = entry.seq
            reason = finished.get(seq.seq_id) if finished else None
            detokenizer: Detokenizer = seq.owner.detokenizer
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
            items.append((text, token_id, reason, logprobs.get(seq.seq_id) if logprobs else None))
        return items

    def _shows_stop_token(self, seq: Sequence, token_id: int) -> bool:
        """A token that stops shows its text only on request, and an EOS never."""
        return seq.params.include_stop_str_in_output and token_id not in seq.eos_token_ids

    def _publish(self, delivery: _Delivery, items: list[Any]) -> None:
        """Append to the buffers, end what has finished, pause who lags, wake who waits."""
        parked: list[StreamState] = []
        max_buffered = self.config.max_buffered_tokens
        now = delivery.time
        for entry, item in zip(delivery.update.entries, items, strict=True):
            state: StreamState = entry.seq.owner
            if state.finished:  # aborted since
                continue
            buffer = state.buffer
            state.completion_tokens += 1
            state.time_last_token = now
            if state.time_first_token is None:
                state.time_first_token = now
            buffer.append(item)
            if item[2] is not None:
                del self._states[state.seq_id]
                state.end(item[2])
            elif len(buffer) > max_buffered:
                self._pause(state)
            waiter = state.waiter
            if waiter is not None and not waiter.notified:
                waiter.notified = True
                parked.append(state)
        if parked:
            self._wake_parked(parked)

    def _pause(self, state: StreamState) -> None:
        state.paused = True
        self._scheduler.set_paused(state.seq_id, True)
        if len(state.buffer) < state.resume_below:  # read meanwhile, before `paused` was seen
            state.paused = False
            self._scheduler.set_paused(state.seq_id, False)

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
            if self.started.is_set():
                for seq_id in self._states:
                    self._scheduler.abort(seq_id)
                for schedule, step in self._in_flight:
                    step.cancel()
                    self._scheduler.update(schedule, step.result().token_ids)
                self._final_stats = self._snapshot()
        except Exception:
            if cause is None:  # the books of an engine that died may be in disorder
                logger.exception("closing the engine")
        self._states.clear()
        self._in_flight.clear()
        self._undelivered = None
        if hasattr(self, "_runner"):
            self._runner.close()
        for name in ("_runner", "_scheduler", "_builder"):
            if hasattr(self, name):  # not when loading failed
                delattr(self, name)
        if cause is not None:
            # Its traceback's frames would keep weights alive for as long as somebody has it.
            traceback.clear_frames(cause.__traceback__)
        self.started.set()
        self.stopped.set()
