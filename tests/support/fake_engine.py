"""An engine without a model, with the part of AsyncEngine's surface that the gateway uses.

Tests push tokens by hand: `stream = await engine.next_stream()`, `stream.push("Hi")`,
`stream.finish()`. With `script` set, every request runs by itself. `engine.live` holds the streams
that still cost something; it must be empty when a test is over.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tinyvllm import (
    EngineClosedError,
    EngineConfig,
    EngineHealth,
    EngineStats,
    SamplingParams,
    SequenceStats,
    Timings,
    Token,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@dataclass(frozen=True)
class Script:
    """What an unattended request does: these tokens, one every `interval` seconds."""

    tokens: tuple[str, ...] = ("Hello", ",", " world", "!")
    interval: float = 0.0
    finish_reason: str = "stop"


class FakeTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{i}>" for i in ids)


class FakeStream:
    """One request. Ends by `finish`, `fail` or `abort`."""

    def __init__(self, engine: FakeEngine, messages: list[Any], params: SamplingParams, **kw: Any):
        self.engine = engine
        self.messages = messages
        self.params = params
        self.priority: int = kw["priority"]
        self.request_id: str = kw["request_id"]
        self.tools: list[Any] | None = kw["tools"]
        self.add_generation_prompt: bool = kw["add_generation_prompt"]
        self.waiting = False
        """The engine has no slot for it yet."""
        self.buffer: deque[Token] = deque()
        self.aborted = asyncio.Event()
        self.drained = asyncio.Event()
        self.error: BaseException | None = None
        self.finish_reason: str | None = None
        self.num_pushed = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=self.num_pushed)

    @property
    def timings(self) -> Timings:
        first = 0.2 if self.num_pushed else None
        return Timings(
            queued=None if self.waiting else 0.1,
            time_to_first_token=first,
            total=None,
            time_per_output_token=None,
        )

    def push(self, *texts: str, finish_reason: str | None = None, **fields: Any) -> None:
        """Tokens, as if the engine had drawn them in one step. `fields`: logprob, top_logprobs."""
        for text in texts:
            index = self.num_pushed
            self.num_pushed += 1
            self.buffer.append(
                Token(text, 100 + index, index, finish_reason=finish_reason, **fields)  # type: ignore[arg-type]
            )
        self._wake.set()

    async def push_all(self, texts: list[str]) -> None:
        """Like a real engine: no more than `max_buffered_tokens` ahead of the reader."""
        for text in texts:
            while len(self.buffer) >= self.engine.config.max_buffered_tokens:
                self.drained.clear()
                await self.drained.wait()
            self.push(text)

    def finish(self, reason: str = "stop") -> None:
        """The last token (EOS has no text) and the end."""
        self.push("", finish_reason=reason)
        self._end(reason)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end("error")

    def abort(self) -> None:
        if self.finish_reason is None:
            self._end("abort")
            self.aborted.set()
            if self._task is not None:
                self._task.cancel()

    async def aclose(self) -> None:
        self.abort()

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.engine.live.discard(self)
        self._wake.set()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def feed(self, sink: Any) -> bool:
        while True:
            try:
                token = await self.__anext__()
            except StopAsyncIteration:
                return True
            if sink([token]):
                return False

    async def feed_text(self, sink: Any) -> bool:
        return await self.feed(lambda tokens: sink("".join(tokens), tokens[-1].finish_reason))

    async def __anext__(self) -> Token:
        while True:
            if self.aborted.is_set():
                raise StopAsyncIteration
            if self.buffer:
                token = self.buffer.popleft()
                self.drained.set()
                return token
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    async def run_script(self, script: Script) -> None:
        for text in script.tokens:
            if script.interval:
                await asyncio.sleep(script.interval)
            await self.push_all([text])
        self.finish(script.finish_reason)


class FakeEngine:
    """`script` (or a function of the request's stream) makes requests run unattended."""

    def __init__(
        self,
        model: str = "fake-model",
        config: EngineConfig | None = None,
        *,
        script: Script | Callable[[FakeStream], Script] | None = None,
    ) -> None:
        self.model_name = model
        self.config = config or EngineConfig(max_num_seqs=64)
        self.tokenizer = FakeTokenizer()
        self.script = script
        self.streams: list[FakeStream] = []
        self.live: set[FakeStream] = set()
        self.refuse: Exception | None = None
        """Raised by the next `chat`, then forgotten."""
        self.closed = False
        self._new = asyncio.Condition()
        self._num_taken = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def max_model_len(self) -> int:
        self._check_open()
        return 4096

    @property
    def model_config(self) -> SimpleNamespace:
        self._check_open()
        return SimpleNamespace(sampling_defaults={"temperature": 0.6})

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("closed")

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closed = True
        for stream in list(self.live):
            stream.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def health(self) -> EngineHealth:
        return EngineHealth(alive=not self.closed, last_step_age=None, error=None)

    def stats(self) -> EngineStats:
        """Every stream holds one of 64 blocks."""
        counts = {field.name: 0 for field in dataclasses.fields(EngineStats)}
        waiting = sum(stream.waiting for stream in self.live)
        known = {
            "num_running": len(self.live) - waiting,
            "num_waiting": waiting,
            "max_num_seqs": 64,
            "num_blocks": 64,
            "num_free_blocks": 64 - len(self.live),
            "num_output_tokens": sum(stream.num_pushed for stream in self.streams),
            "num_requests": len(self.streams),
        }
        sequences = tuple(
            SequenceStats(
                request_id=stream.request_id,
                state="waiting" if stream.waiting else "decode" if stream.num_pushed else "prefill",
                slot=None if stream.waiting else 0,
                num_prompt_tokens=7,
                num_computed_tokens=7,
                num_cached_tokens=3,
                num_output_tokens=stream.num_pushed,
                num_blocks=1,
            )
            for stream in self.live
        )
        return EngineStats(**(counts | known | {"sequences": sequences}))  # type: ignore[arg-type]

    def chat(
        self,
        messages: list[Any],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        **sampling: Any,
    ) -> FakeStream:
        self._check_open()
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        resolved = SamplingParams.resolve(params, sampling, self.model_config.sampling_defaults)
        stream = FakeStream(
            self,
            messages,
            resolved,
            priority=priority,
            request_id=request_id,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        self.streams.append(stream)
        self.live.add(stream)
        script = self.script(stream) if callable(self.script) else self.script
        if script is not None:
            stream._task = asyncio.create_task(stream.run_script(script))
            self._tasks.add(stream._task)
            stream._task.add_done_callback(self._tasks.discard)
        notify = asyncio.create_task(self._notify())
        self._tasks.add(notify)
        notify.add_done_callback(self._tasks.discard)
        return stream

    async def _notify(self) -> None:
        async with self._new:
            self._new.notify_all()

    async def next_stream(self) -> FakeStream:
        """The next request that the gateway makes."""
        number = self._num_taken
        self._num_taken += 1
        async with asyncio.timeout(10), self._new:
            await self._new.wait_for(lambda: len(self.streams) > number)
        return self.streams[number]
