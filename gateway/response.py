"""Responses: one generation each, any number of viewers, a life of their own.

    Response ── TokenStream (the engine)
        │
    Transcript (the log of its events)
        │
    Viewer ── Connection          one per socket that watches, a place in the log
    Viewer ── Connection

A token goes into the transcript as soon as the engine has it, and from there to every viewer whose
socket keeps up, before the loop does anything else. While no viewer can take text it gathers; with
`max_pending_chars` of it the response stops reading its TokenStream, so that the engine pauses that
request and no other. With no viewer left for `resume_seconds` a response is cancelled. `Responses`
keeps them all by id, and those that ended for as long as its bounds allow.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm import EngineDeadError, TinyvllmError
from tinyvllm.gateway import json_text
from tinyvllm.gateway.events import Outcome, Transcript
from tinyvllm.gateway.protocol import ProtocolError, error_of, shutting_down
from tinyvllm.gateway.tools import CallParser, template_tools

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinyvllm import AsyncEngine, Timings, Token, TokenStream, Usage
    from tinyvllm.gateway.connection import Connection
    from tinyvllm.gateway.limits import Limits
    from tinyvllm.gateway.metrics import Metrics
    from tinyvllm.gateway.protocol import CreateEvent

logger = logging.getLogger("tinyvllm.gateway")

_QUEUED_SECONDS = 1.0
"""A request that the engine has not begun after this long is called queued."""

Messages = tuple[dict[str, Any], ...]


class Viewer:
    """One socket's place in one response's log. `done` is set when it was told of the end."""

    def __init__(self, connection: Connection, stream_id: str | None, next_number: int) -> None:
        self._connection = connection
        self._suffix = b"}"
        if stream_id is not None:
            self._suffix = b',"stream_id":' + json_text.dumps(stream_id) + b"}"
        self.next_number = next_number
        self.done = asyncio.Event()
        self.started = False
        """Its turn in the lane has come."""
        self._merge = False

    @property
    def ready(self) -> bool:
        return self.started and not self._connection.behind

    def pump(self, transcript: Transcript) -> int:
        """Send what the log has, until the socket is behind. Returns the number of frames."""
        connection, end, num_frames = self._connection, transcript.num_events, 0
        while self.next_number < end and self.ready:
            # In pieces: a long history must not fill the transport at once.
            stop = min(end, self.next_number + (4096 if self._merge else 64))
            messages = transcript.read(
                self.next_number, stop, suffix=self._suffix, merge=self._merge
            )
            connection.write(messages)
            self.next_number = stop
            num_frames += len(messages)
        # What gathers from here on, while the socket is behind, will go as one.
        self._merge = connection.behind
        if transcript.ended and self.next_number == end:
            self.done.set()
        return num_frames


class Response:
    """One request, from its turn in the lane until it is forgotten."""

    def __init__(self, owner: Responses, event: CreateEvent, history: Messages) -> None:
        self.id = "resp_" + secrets.token_hex(16)
        self.tag = secrets.token_hex(4)
        """A label that others may see: the id lets its holder watch and cancel."""
        self.messages: Messages = (*history, *event.messages)
        """The conversation: what the model was told, and in the end what it said."""
        self.resume_seconds = owner.limits.resume_seconds
        if event.resume_seconds is not None:
            self.resume_seconds = min(self.resume_seconds, event.resume_seconds)
        self._owner = owner
        self._event = event
        self._prompt = event.prompt(history)
        self.transcript = Transcript(
            response_id=self.id,
            tag=self.tag,
            request=event,
            model=owner.engine.model_name,
            created_at=int(time.time()),
            defaults=owner.sampling_defaults,
        )
        self._viewers: list[Viewer] = []
        self._stream: TokenStream | None = None
        self._stopped: Literal["cancelled", "shutdown"] | None = None
        self._parser = CallParser(tool["name"] for tool in event.tools) if event.tools else None
        self._finish_reason: str | None = None  # of the last token that was read
        self._taken = asyncio.Event()  # pending text was taken, or nobody needs it any more
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._started_at = time.perf_counter()

    # --- Viewers --------------------------------------------------------------------------------

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def usage(self) -> Usage | None:
        return None if self._stream is None else self._stream.usage

    @property
    def timings(self) -> Timings | None:
        return None if self._stream is None else self._stream.timings

    def attach(self, viewer: Viewer) -> None:
        """A viewer joins; it gets nothing before `start_viewer`."""
        self._viewers.append(viewer)
        self._unset_timer()

    def start_viewer(self, viewer: Viewer) -> None:
        viewer.started = True
        self.catch_up(viewer)

    def detach(self, viewer: Viewer) -> None:
        """A viewer leaves: its socket has closed, or it has seen the end. Idempotent."""
        if viewer not in self._viewers:
            return
        self._viewers.remove(viewer)
        if not self._viewers:
            self._set_timer(self.transcript.forget if self.transcript.ended else self.cancel)

    def catch_up(self, viewer: Viewer) -> None:
        """The viewer's socket takes data: send it what gathered."""
        self._seal()
        self._owner.metrics.num_frames += viewer.pump(self.transcript)

    # --- Life -----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Nobody wants more: ends as incomplete, "cancelled". Idempotent."""
        self._stop("cancelled")

    def shut_down(self) -> None:
        """The server ends first: ends as failed, "server_shutting_down". Idempotent."""
        self._stop("shutdown")

    def _stop(self, why: Literal["cancelled", "shutdown"]) -> None:
        if self._stopped is None and not self.transcript.ended:
            self._stopped = why
            self._taken.set()
            if self._stream is not None:
                self._stream.abort()

    def start(self) -> None:
        """Give the request to the engine. Raises what the engine raises, and then it never was."""
        if self._stopped is None:
            self._stream = self._owner.submit(self._event, self._prompt, self.tag)
        self.transcript.created()

    async def run(self) -> None:
        """Read the stream to its end. Never raises but for its own cancellation."""
        queued = self._loop.call_later(_QUEUED_SECONDS, self._say_queued)
        try:
            if self._stream is not None:
                await self._read(self._stream)
            outcome = self._ended()
        except Exception as exc:
            if not isinstance(exc, TinyvllmError) or isinstance(exc, EngineDeadError):
                logger.error("a response failed", exc_info=exc, extra={"tag": self.tag})
            error = error_of(exc)
            outcome = self._outcome("failed", code=error.code, message=error.message)
        except asyncio.CancelledError:
            self.transcript.finish(self._outcome("incomplete", reason="cancelled"))
            raise
        finally:
            queued.cancel()
            self._unset_timer()
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.transcript.finish(outcome)
        self.messages += tuple(self.transcript.messages())
        self._flush()
        logger.info(
            "response %s",
            outcome.status,
            extra={
                "tag": self.tag,
                "reason": outcome.reason or outcome.code,
                "input_tokens": outcome.num_prompt_tokens,
                "output_tokens": outcome.num_output_tokens,
                "seconds": round(time.perf_counter() - self._started_at, 3),
            },
        )
        if not self._viewers:
            # Its events stay for late viewers, for a while.
            self._set_timer(self.transcript.forget)

    def _set_timer(self, then: Any) -> None:
        self._unset_timer()
        self._timer = self._loop.call_later(self.resume_seconds, then)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Forget it: no timer may outlive the gateway."""
        self._unset_timer()

    # --- Text -----------------------------------------------------------------------------------

    async def _read(self, stream: TokenStream) -> None:
        transcript, event = self.transcript, self._event
        max_pending = self._owner.limits.max_pending_chars
        plain = event.generate and event.top_logprobs is None and self._parser is None
        async with stream:
            while not await (
                stream.feed_text(self._take_text) if plain else stream.feed(self._take)
            ):
                while transcript.pending_size >= max_pending and not self._stopped:
                    self._taken.clear()
                    await self._taken.wait()
        if self._parser is not None:
            self._put(self._parser.finish())
        self._owner.metrics.count("tokens_total", amount=stream.usage.completion_tokens)

    def _take_text(self, text: str, finish_reason: str | None) -> bool:
        """Text goes into the log, and to the viewers as one frame. True: no more for now."""
        self._finish_reason = finish_reason
        if text:
            self.transcript.add_text(text)
            self._flush()
        return self._is_full

    def _take(self, tokens: list[Token]) -> bool:
        """As `_take_text`, where more than the text is wanted."""
        transcript, generate = self.transcript, self._event.generate
        want_logprobs = self._event.top_logprobs is not None
        add = transcript.add_text if self._parser is None else self._add_parsed
        for token in tokens:
            if want_logprobs:
                transcript.add_logprob(self._logprob(token))
            if token and generate:
                add(token)
        self._finish_reason = tokens[-1].finish_reason
        self._flush()
        return self._is_full

    @property
    def _is_full(self) -> bool:
        max_pending = self._owner.limits.max_pending_chars
        return self.transcript.pending_size >= max_pending and self._stopped is None

    def _add_parsed(self, text: str) -> None:
        assert self._parser is not None
        self._put(self._parser.feed(text))

    def _put(self, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self.transcript.add_text(piece)
            else:
                unique = secrets.token_hex(12)
                self.transcript.add_call(piece, f"fc_{unique}", f"call_{unique}")

    def _flush(self) -> None:
        """What is pending goes to every viewer that can take it."""
        num_frames = 0
        for viewer in self._viewers:
            if viewer.ready:
                self._seal()
                num_frames += viewer.pump(self.transcript)
        if num_frames:
            self._owner.metrics.num_frames += num_frames

    def _seal(self) -> None:
        self.transcript.seal()
        self._taken.set()

    def _say_queued(self) -> None:
        timings = self.timings
        if timings is not None and timings.queued is None and not self._stopped:
            self.transcript.queued()
            self._flush()

    # --- Outcome --------------------------------------------------------------------------------

    def _ended(self) -> Outcome:
        """What became of a stream that was read to its end."""
        reason = self._finish_reason
        if reason == "stop" or (reason == "length" and not self._event.generate):
            return self._outcome("completed")
        if reason == "length":
            return self._outcome("incomplete", reason="max_output_tokens")
        if self._stopped == "cancelled":
            return self._outcome("incomplete", reason="cancelled")
        if self._stopped == "shutdown":
            error = shutting_down()
            return self._outcome("failed", code=error.code, message=error.message)
        message = "the engine ended this response early"
        return self._outcome("failed", code="server_error", message=message)

    def _outcome(
        self, status: Literal["completed", "incomplete", "failed"], **details: Any
    ) -> Outcome:
        usage = self.usage
        if usage is None:
            return Outcome(status=status, **details)
        return Outcome(
            status=status,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_output_tokens=usage.completion_tokens if self._event.generate else 0,
            **details,
        )

    def _logprob(self, token: Token) -> dict[str, Any]:
        """OpenAI's entry for one token: text, UTF-8 bytes, log-probability; and the likeliest."""
        decode = self._owner.engine.tokenizer.decode
        top = [
            _logprob_entry(decode([token_id], skip_special_tokens=False), p)
            for token_id, p in (token.top_logprobs or {}).items()
        ]
        text = decode([token.id], skip_special_tokens=False)
        return {**_logprob_entry(text, token.logprob or 0.0), "top_logprobs": top}


def _logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


class Responses:
    """Every response of the gateway by its id, running or ended."""

    def __init__(self, engine: AsyncEngine, limits: Limits, metrics: Metrics) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics = metrics
        # Kept, since a dead engine refuses to tell.
        self.sampling_defaults: dict[str, float] = dict(engine.model_config.sampling_defaults)
        self.draining = False
        self.live: dict[str, Response] = {}
        self._ended: OrderedDict[str, Response] = OrderedDict()  # least recently used first
        self._num_chars = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_timeout = "timeout" in inspect.signature(engine.chat).parameters

    def create(self, event: CreateEvent, *, cancelled: bool = False) -> Response:
        """Start a response. Raises `ProtocolError` when there will be none."""
        if self.draining:
            raise shutting_down(event.stream_id)
        response = Response(self, event, self._history(event))
        if cancelled:
            response.cancel()
        try:
            response.start()
        except Exception as exc:
            if not isinstance(exc, TinyvllmError | ProtocolError):
                logger.error("a request failed", exc_info=exc, extra={"tag": response.tag})
            raise error_of(exc, stream_id=event.stream_id) from None
        self.live[response.id] = response
        task = asyncio.create_task(self._run(response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return response

    def submit(self, event: CreateEvent, prompt: list[dict[str, Any]], tag: str) -> TokenStream:
        """The engine's stream for a request. Raises what `engine.chat` raises."""
        options: dict[str, Any] = dict(event.sampling)
        if event.tools and event.tool_choice != "none":
            options["tools"] = template_tools(event.tools)
        if not event.generate:
            # The next turn of the conversation goes on from exactly this prefix.
            options |= {"add_generation_prompt": False, "max_tokens": 1, "min_tokens": 0}
        if event.timeout is not None:
            if not self._has_timeout:
                raise ProtocolError("timeout is not supported yet", param="tinyvllm.timeout")
            options["timeout"] = event.timeout
        return self.engine.chat(prompt, priority=event.priority, request_id=tag, **options)

    def find(self, response_id: str) -> Response | None:
        response = self.live.get(response_id)
        if response is None and response_id in self._ended:
            self._ended.move_to_end(response_id)
            response = self._ended[response_id]
        return response

    def view(self, response_id: str, starting_after: int) -> Response:
        """The response to watch from there on. Raises `ProtocolError`."""
        response = self.find(response_id)
        if response is None:
            raise not_found(response_id)
        transcript = response.transcript
        if transcript.ended and transcript.num_events == 0:
            raise ProtocolError(
                f"the events of {response_id!r} were kept for {response.resume_seconds:g} s after "
                f"its end; GET /v1/responses/{response_id} has what it said",
                code="resume_window_exceeded",
                status=410,
                param="response_id",
            )
        last = transcript.num_events - 1
        if starting_after > last or (transcript.ended and starting_after == last):
            raise ProtocolError(
                f"starting_after is {starting_after}; the last event so far is number {last}",
                param="starting_after",
            )
        return response

    def _history(self, event: CreateEvent) -> Messages:
        if event.previous_response_id is None:
            return ()
        previous = self.find(event.previous_response_id)
        if previous is None or previous.transcript.status == "failed":
            raise ProtocolError(
                f"no response {event.previous_response_id!r} to go on from: it failed, is too old, "
                "or the server was started again; send the whole conversation as input",
                code="previous_response_not_found",
                status=404,
                param="previous_response_id",
                stream_id=event.stream_id,
            )
        if not previous.transcript.ended:
            raise ProtocolError(
                f"response {event.previous_response_id!r} has not ended yet",
                param="previous_response_id",
                stream_id=event.stream_id,
            )
        return previous.messages

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        finally:
            del self.live[response.id]
            self.metrics.count("responses_total", response.transcript.status)
            self._ended[response.id] = response
            self._num_chars += _num_chars(response.messages)
            limits = self.limits
            while len(self._ended) > limits.max_conversations or (
                self._num_chars > limits.max_conversation_chars
            ):
                _, oldest = self._ended.popitem(last=False)
                self._num_chars -= _num_chars(oldest.messages)
                oldest.close()

    async def aclose(self) -> None:
        """Abort what runs and forget everything."""
        tasks = list(self._tasks)
        for response in list(self.live.values()):
            response.shut_down()
        if tasks:
            await asyncio.wait(tasks, timeout=1)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for response in self._ended.values():
            response.close()
        self._ended.clear()
        self._num_chars = 0


def not_found(response_id: str, stream_id: str | None = None) -> ProtocolError:
    return ProtocolError(
        f"there is no response {response_id!r}",
        code="response_not_found",
        status=404,
        param="response_id",
        stream_id=stream_id,
    )


def _num_chars(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages)
