"""From the engine thread to a reader: Token, TokenStream, and the wake-up of parked readers.

      engine thread                                   reader's loop: asyncio, uvloop, trio
  StreamState.buffer.append(item)  ───────────────►  TokenStream.__anext__ pops it
  state.waiter set?  ── wake(waiters of the step) ─►  one callback per loop: resumes its readers

The buffer is a deque: append and popleft are atomic, so a reader that is never late is never woken
and the engine never takes a lock. The engine holds StreamStates only. A TokenStream that nobody
holds is collected at once, and its finalizer aborts the request.

Consumer slow: the engine stops scheduling it (`paused`) until half of its buffer is read. Consumer
gone: abort. Engine dead or closed: `error` is set and raised to the reader after what was buffered.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tinyvllm.errors import EngineClosedError, InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from tinyvllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

_MAX_PARTS = 256
"""Strings that the text which `feed_text` has read is kept in."""


class Token(str):
    """One generated token: a `str`, its text delta, which may be empty.

    Text is empty where it is held back (half of a character, a possible stop string) or where the
    token is special; `"".join(tokens)` is the text of the whole answer.
    """

    id: int
    index: int  # type: ignore[assignment]  # hides str.index, which nobody calls on a token
    """0 for the first generated token of the request, or of its choice."""
    logprob: float | None
    """Natural log of the probability that the raw model gave this token, where asked for."""
    top_logprobs: dict[int, float] | None
    """Token id -> log-probability of the k most likely, most likely first, where asked for."""
    finish_reason: FinishReason | None
    """Set on the last token (of its choice) only."""
    choice: int
    """Which of the request's `n` outputs it belongs to, from 0."""

    def __new__(
        cls,
        text: str = "",
        id: int = -1,
        index: int = -1,
        logprob: float | None = None,
        top_logprobs: dict[int, float] | None = None,
        finish_reason: FinishReason | None = None,
        choice: int = 0,
    ) -> Token:
        token = str.__new__(cls, text)
        token.id = id
        token.index = index
        token.logprob = logprob
        token.top_logprobs = top_logprobs
        token.finish_reason = finish_reason
        token.choice = choice
        return token


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request so far."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""
    completion_tokens: int
    """Of all choices together."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was made; None for what has not happened yet."""

    queued: float | None
    """Until its first prompt token was scheduled (tokenizing included)."""
    time_to_first_token: float | None
    total: float | None
    """Until its end."""
    time_per_output_token: float | None
    """Mean gap between its tokens so far."""


# --- Waking readers -----------------------------------------------------------------------------


class Waiter(Protocol):
    """One reader that is parked, or about to park."""

    notified: bool
    """A wake-up is on its way; set by whoever sends it, so that it is sent once."""
    portal: Any
    """The reader's loop: waiters with the same portal are woken by one callback."""
    on_ready: Callable[[], bool] | None
    """Called in the loop at each wake-up, if set; the reader goes on when it returns True."""

    async def wait(self) -> None: ...
    def post(self, group: Sequence[Any]) -> bool:
        """Wake `group`, all of this portal, from any thread. False when its loop has closed."""
        ...


class _AsyncioWaiter:
    __slots__ = ("future", "notified", "on_ready", "portal")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.portal = loop
        self.notified = False
        self.on_ready: Callable[[], bool] | None = None
        self.future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        # No callback of the loop can run between __init__ and here, so no wake-up is missed.
        self.future = self.portal.create_future()
        await self.future

    def post(self, group: Sequence[_AsyncioWaiter]) -> bool:
        try:
            self.portal.call_soon_threadsafe(self._resume, group)
        except RuntimeError:
            if self.portal.is_closed():
                return False
            raise
        return True

    @staticmethod
    def _resume(group: Sequence[_AsyncioWaiter]) -> None:
        for waiter in group:
            if waiter.on_ready is not None and not waiter.on_ready():
                continue
            if waiter.future is not None and not waiter.future.done():
                waiter.future.set_result(None)


class _TrioWaiter:
    __slots__ = ("_trio", "notified", "on_ready", "portal", "task")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self.portal = trio.lowlevel.current_trio_token()
        self.notified = False
        self.on_ready: Callable[[], bool] | None = None
        self.task: Any = None

    async def wait(self) -> None:
        self.task = self._trio.lowlevel.current_task()
        await self._trio.lowlevel.wait_task_rescheduled(self._cancelled)

    def _cancelled(self, _: Any) -> Any:
        self.task = None
        return self._trio.lowlevel.Abort.SUCCEEDED

    def post(self, group: Sequence[_TrioWaiter]) -> bool:
        try:
            self.portal.run_sync_soon(self._resume, group)
        except self._trio.RunFinishedError:
            return False
        return True

    def _resume(self, group: Sequence[_TrioWaiter]) -> None:
        for waiter in group:
            if waiter.on_ready is not None and not waiter.on_ready():
                continue
            if waiter.task is not None:
                task, waiter.task = waiter.task, None
                self._trio.lowlevel.reschedule(task)


class _BlockingWaiter:
    """A stream that a thread reads, beside others, in `read_blocking`."""

    __slots__ = ("idx", "notified", "on_ready", "portal", "state")

    def __init__(self, portal: SimpleQueue[Any], idx: int, state: StreamState) -> None:
        self.portal = portal
        self.notified = False
        self.on_ready: Callable[[], bool] | None = None
        self.idx = idx
        self.state = state

    async def wait(self) -> None:
        raise AssertionError("parks a thread, not a task")

    def post(self, group: Sequence[_BlockingWaiter]) -> bool:
        self.portal.put(group)
        return True


def new_waiter() -> Waiter:
    """A waiter for the running task, under trio or asyncio. Raises RuntimeError under neither."""
    # trio first: in its guest mode an asyncio (or other) loop runs underneath.
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return _TrioWaiter(trio)
    return _AsyncioWaiter(asyncio.get_running_loop())


def wake(waiters: Iterable[Waiter]) -> list[Waiter]:
    """Resume parked readers, from any thread: one call per loop. Returns those whose loop has
    closed, which can never run again."""
    groups: dict[Any, list[Waiter]] = {}
    for waiter in waiters:
        groups.setdefault(waiter.portal, []).append(waiter)
    closed: list[Waiter] = []
    for group in groups.values():
        if not group[0].post(group):
            closed += group
    return closed


class Signal:
    """A one-shot event: set once from any thread, awaited from any loop or thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._waiters: deque[Waiter] = deque()

    def set(self) -> None:
        self._event.set()
        wake(self._waiters.copy())

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait_blocking(self, timeout: float | None = None) -> bool:
        return self._event.wait(timeout)

    async def wait(self) -> None:
        waiter = new_waiter()
        self._waiters.append(waiter)
        try:
            # Looked at after the waiter is in the list: `set` sees one or we see the other.
            if not self._event.is_set():
                await waiter.wait()
        finally:
            self._waiters.remove(waiter)


# --- One request --------------------------------------------------------------------------------


def check_priority(priority: object) -> int:
    """Raises `InvalidParameterError` unless it is an integer."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidParameterError(
            f"priority must be an integer; got {priority!r}", param="priority"
        )
    return priority


# What the engine appends per token: text, token id, finish reason, (logprob, top logprobs) or None,
# choice.
Item = tuple[str, int, FinishReason | None, tuple[float, dict[int, float]] | None, int]


class StreamState:
    """What the engine and a reader share about one request. Knows no TokenStream.

    Written by the engine thread: `finished`, `finish_reason`, `error`, counts, times. Written by
    the reader: `waiter`, `aborted`. `paused` is set by the engine and cleared by the reader.
    """

    __slots__ = (
        "aborted",
        "allowed",
        "arrival",
        "buffer",
        "cache_salt",
        "cached_tokens",
        "chat_options",
        "completion_tokens",
        "deadline",
        "enable_prefix_caching",
        "error",
        "finish_reason",
        "finish_reasons",
        "finished",
        "mailbox",
        "params",
        "paused",
        "priority",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "resume_below",
        "seq_id",
        "sequences",
        "time_created",
        "time_ended",
        "time_first_token",
        "time_last_token",
        "time_scheduled",
        "timeout",
        "waiter",
    )

    def __init__(
        self,
        *,
        seq_id: int,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        priority: int,
        mailbox: SimpleQueue[Any],
        resume_below: int,
        chat_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        cache_salt: bytes = b"",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.prompt = prompt  # text; chat messages when there are chat_options; or token ids
        self.chat_options = chat_options
        self.params = params
        self.priority = priority
        self.mailbox = mailbox
        self.resume_below = resume_below
        self.buffer: deque[Item] = deque()
        self.waiter: Waiter | None = None
        self.sequences: Sequence[Any] = ()  # the engine's, one per choice; none once it has ended
        self.cache_salt = cache_salt
        self.enable_prefix_caching = enable_prefix_caching
        self.aborted = False
        self.paused = False
        self.finished = False
        self.finish_reason: FinishReason | None = None
        self.finish_reasons: list[FinishReason | None] = [None] * params.n
        self.error: BaseException | None = None
        self.prompt_token_ids: list[int] | None = None
        self.prompt_logprobs: list[tuple[float, dict[int, float]] | None] | None = None
        self.allowed: Any = None  # the engine's, of choice 0: what tokens may be drawn
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.time_created = time.perf_counter()
        self.timeout = timeout
        self.deadline = None if timeout is None else self.time_created + timeout
        self.time_scheduled: float | None = None
        self.time_first_token: float | None = None
        self.time_last_token: float | None = None
        self.time_ended: float | None = None

    def abort(self) -> None:
        """Ask the engine to drop the request: from any thread, also from a finalizer (putting on
        a SimpleQueue is reentrant). Does nothing when it has finished or was aborted before."""
        if self.finished or self.aborted:
            return
        self.aborted = True
        self.time_ended = time.perf_counter()
        self.mailbox.put(("abort", self))
        self.wake_reader()

    def resume(self) -> None:
        """Reader side: enough was read for a paused stream to go on."""
        self.paused = False
        self.mailbox.put(("resume", self))

    def wake_reader(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.notified:
            waiter.notified = True
            wake((waiter,))

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Engine side: no further token will come. The caller wakes the waiter."""
        if self.time_ended is None:  # else it was when the request was aborted
            self.time_ended = time.perf_counter()
        self.error = error
        self.finish_reason = reason
        self.sequences = ()  # they know this object: a cycle
        # Last: a reader that sees it has all that was appended before.
        self.finished = True


class TokenStream:
    """The tokens of one request: an async iterator and an async context manager.

        async for token in engine.generate("Once upon a time"):
            print(token, end="")

    The request runs from the moment `generate` returns, at most `max_buffered_tokens` ahead of the
    reader. Leaving the loop early (`break`, an exception, cancellation), `abort()`, `aclose()`,
    leaving an `async with`, and dropping the last reference each abort it within one step. To read
    in parts, use `await anext(stream)`.

    Errors raise from the iteration, after the tokens that came before them: `ContextLengthError`
    and other `InvalidParameterError`s that need the tokenizer, `RequestTimeoutError`,
    `EngineDeadError`, and `EngineClosedError` when the engine was closed under a running request.

    With `n` above 1 the tokens of all choices come as they are made; `token.choice` says whose.

    Any loop may read, one task at a time. A read suspends only when no token is ready.
    """

    def __init__(self, state: StreamState, owner: object) -> None:
        self._state = state
        self._owner = owner  # a stream keeps its engine alive
        # Of each choice: what was read, and how many tokens that is.
        self._parts: list[list[str]] = [[] for _ in state.finish_reasons]
        self._num_read = [0 for _ in state.finish_reasons]
        self._left = False
        self._home = os.getpid()

    @property
    def request_id(self) -> str:
        """The label given to `generate`, or one made up."""
        return self._state.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs. "stop": EOS, a stop string or a stop id; "length": max_tokens;
        "abort": the reader left, its timeout is over or the engine was closed; "error": it failed.
        Of several choices (`n`), the first one's once all have ended.
        """
        if self._state.finished:
            return self._state.finish_reason
        return "abort" if self._state.aborted else None

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """One for each of the request's `n` choices."""
        whole = self.finish_reason
        return tuple(reason or whole for reason in self._state.finish_reasons)

    @property
    def usage(self) -> Usage:
        """Counts so far; final once `finish_reason` is set."""
        state = self._state
        return Usage(
            prompt_tokens=len(state.prompt_token_ids or ()),
            cached_tokens=state.cached_tokens,
            completion_tokens=state.completion_tokens,
        )

    @property
    def timings(self) -> Timings:
        """Seconds, by the engine's clock, so a slow reader does not change them."""
        state, start = self._state, self._state.time_created
        first, ended, gaps = state.time_first_token, state.time_ended, state.completion_tokens - 1
        last = state.time_last_token
        return Timings(
            queued=None if state.time_scheduled is None else state.time_scheduled - start,
            time_to_first_token=None if first is None else first - start,
            total=None if ended is None else ended - start,
            time_per_output_token=(
                None if first is None or last is None or gaps < 1 else (last - first) / gaps
            ),
        )

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt as the model reads it; None until it is tokenized."""
        return self._state.prompt_token_ids

    @property
    def prompt_logprobs(self) -> list[tuple[float, dict[int, float]] | None] | None:
        """For each token of the prompt its log-probability and the k most likely in its place, of
        the raw model; None for the first token, which nothing comes before. Complete with the first
        token of the output; None unless `prompt_logprobs` asks for it."""
        return self._state.prompt_logprobs

    def set_priority(self, priority: int) -> None:
        """Give the request another priority (lower goes first), whether it waits or runs. Among
        equals its place is still that of its arrival. Nothing when it has ended; any thread."""
        state = self._state
        state.priority = check_priority(priority)
        if not state.finished and not state.aborted:
            state.mailbox.put(("priority", state))

    def abort(self) -> None:
        """Stop the request now; reading ends. Idempotent, callable from any thread."""
        self._state.abort()

    async def aclose(self) -> None:
        """Same as `abort()`. Never waits."""
        self._state.abort()

    async def text(self) -> str:
        """Read to the end; the text of all tokens read, those read earlier included. Of an aborted
        stream: what was read before. Of several choices (`n`): the first one's."""
        return (await self.texts())[0]

    async def texts(self) -> list[str]:
        """As `text()`, one for each of the request's `n` choices."""
        try:
            while True:
                await self.__anext__()
        except StopAsyncIteration:
            return ["".join(parts) for parts in self._parts]

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._state.abort()

    def __aiter__(self) -> _Loop:
        if self._left:
            raise RuntimeError(
                f"request {self.request_id!r} ended when an earlier `async for` over it was left; "
                "to read a stream in parts, use `await anext(stream)`"
            )
        return _Loop(self)

    async def __anext__(self) -> Token:
        state = self._state
        if state.aborted:
            raise StopAsyncIteration
        try:
            item = state.buffer.popleft()
        except IndexError:
            item = await self._next_item()
        if state.paused and len(state.buffer) < state.resume_below:
            state.resume()
        return self._token(item)

    async def feed(self, sink: Callable[[list[Token]], bool | None]) -> bool:
        """Call `sink(tokens)` in this loop with whatever is ready, as it comes: what `async for`
        does without a task switch for each token, for servers of many streams.

        Returns True at the end of the stream. When `sink` returns True it returns False at once,
        and a later `feed`, or iterating, goes on with the next token. Raises what iterating would,
        and what `sink` raises; cancelled, it aborts the request.
        """
        token = self._token
        return await self._feed(lambda items: sink([token(item) for item in items]))

    async def feed_text(self, sink: Callable[[str, FinishReason | None], bool | None]) -> bool:
        """As `feed`, with `sink(text, finish_reason)`: the text of all that is ready in one `str`,
        and the last token's reason. No object is made for a token. For one choice, not for `n`."""
        if len(self._parts) > 1:
            raise ValueError(f"feed_text() is for one choice; the request has {len(self._parts)}")
        parts = self._parts[0]

        def take(items: list[Item]) -> bool | None:
            text = "".join([item[0] for item in items])
            self._num_read[0] += len(items)
            parts.append(text)
            if len(parts) >= _MAX_PARTS:
                # Or a full garbage collection walks over every token of every stream.
                parts[:] = ["".join(parts)]
            return sink(text, items[-1][2])

        return await self._feed(take)

    async def _feed(self, take: Callable[[list[Item]], bool | None]) -> bool:
        state, buffer = self._state, self._state.buffer
        next_item = buffer.popleft
        waiter = self._new_waiter()
        ended: bool | None = None
        error: BaseException | None = None

        def pump() -> bool:
            nonlocal ended, error
            waiter.notified = False  # before looking: what comes from here on is announced again
            finished = state.finished
            items = [next_item() for _ in range(len(buffer))]
            if state.paused and len(buffer) < state.resume_below:
                state.resume()
            try:
                if items and not state.aborted and take(items):
                    ended = False
                elif state.aborted or (finished and not buffer):
                    ended = True
            except BaseException as exc:  # the reader's, not the loop's
                error = exc
            return ended is not None or error is not None

        state.waiter = waiter
        try:
            if not pump():
                waiter.on_ready = pump
                await waiter.wait()
        except BaseException:
            state.abort()
            raise
        finally:
            waiter.on_ready = state.waiter = None
        if error is not None:
            raise error
        if ended and state.error is not None and not state.aborted:
            raise state.error.with_traceback(None)
        return bool(ended)

    def _token(self, item: Item) -> Token:
        text, token_id, reason, logprobs, choice = item
        index = self._num_read[choice]
        self._num_read[choice] = index + 1
        self._parts[choice].append(text)
        if logprobs is None:
            return Token(text, token_id, index, None, None, reason, choice)
        return Token(text, token_id, index, *logprobs, reason, choice)

    def _new_waiter(self) -> Waiter:
        if self._state.waiter is not None:
            raise RuntimeError(f"two tasks iterate the stream of request {self.request_id!r}")
        if os.getpid() != self._home:
            raise EngineClosedError("this stream's engine was created in another process")
        return new_waiter()

    async def _next_item(self) -> Item:
        """The next item, parking until the engine has one. Ends the iteration after the last."""
        state = self._state
        while True:
            waiter = self._new_waiter()
            state.waiter = waiter
            try:
                # After the waiter is set, or the engine and we could miss each other; `finished`
                # before the buffer, or its last token could be.
                finished = state.finished
                if state.buffer:
                    return state.buffer.popleft()
                if finished and state.error is not None:
                    raise state.error.with_traceback(None)
                if finished or state.aborted:
                    raise StopAsyncIteration
                try:
                    await waiter.wait()
                except BaseException:  # cancelled, or its coroutine was dropped
                    state.abort()
                    raise
            finally:
                state.waiter = None
            if state.aborted:
                raise StopAsyncIteration

    def _leave(self) -> None:
        """An `async for` let go of its iterator before the end: break, exception, cancellation."""
        state = self._state
        if not state.finished and not state.aborted:
            self._left = True
            state.abort()

    def __del__(self) -> None:
        self._state.abort()

    def __repr__(self) -> str:
        return (
            f"<TokenStream {self.request_id!r} {self.finish_reason or 'running'}, "
            f"{self._state.completion_tokens} tokens>"
        )


class _Loop:
    """The iterator of one `async for`: the loop holds its only reference, so that `break` is seen
    even while the TokenStream itself stays referenced."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _Loop:
        return self

    def __anext__(self) -> Any:
        return self._stream.__anext__()

    def __del__(self) -> None:
        self._stream._leave()


def read_blocking(streams: Sequence[TokenStream]) -> Iterator[tuple[int, Item]]:
    """(index of its stream, item) of many streams as they come; blocks the calling thread.

    A stream's error is raised when it is met, with the index noted; the others go on.
    """
    ready: SimpleQueue[Sequence[_BlockingWaiter]] = SimpleQueue()
    waiters = [_BlockingWaiter(ready, i, stream._state) for i, stream in enumerate(streams)]
    for waiter in waiters:
        waiter.state.waiter = waiter
    num_live = len(waiters)
    group: Sequence[_BlockingWaiter] = waiters  # what came before the waiters were set
    while num_live:
        for waiter in group:
            state = waiter.state
            waiter.notified = False  # before looking: what comes from here on is announced again
            finished = state.finished
            while state.buffer:
                item = state.buffer.popleft()
                if state.paused and len(state.buffer) < state.resume_below:
                    state.resume()
                yield waiter.idx, item
            if finished and state.waiter is waiter:
                state.waiter = None
                num_live -= 1
                if state.error is not None:
                    state.error.add_note(f"in request {waiter.idx} ({state.request_id})")
                    raise state.error
        if num_live:
            group = ready.get()
