"""One connection: its lanes, what it watches, what it is told. All of it runs on one loop.

A lane (`stream_id`, or none) does its work in order, lanes side by side. Work is a response.create,
which makes a response and watches it, or a response.resume, which watches one that exists. Closing
the socket ends the watching and drops the work that has not begun; responses live on.

Bounds: `max_requests` (then an error event), answers to bad events (`_MAX_OUTBOX`, then the socket
is not read), events a second (then an error event).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed

from tinyvllm.gateway.limits import TokenBucket
from tinyvllm.gateway.protocol import (
    CancelEvent,
    CreateEvent,
    ProtocolError,
    ResumeEvent,
    StatsEvent,
    parse_event,
    shutting_down,
)
from tinyvllm.gateway.response import Response, Viewer, not_found

if TYPE_CHECKING:
    from tinyvllm.gateway.connection import Connection
    from tinyvllm.gateway.limits import Limits
    from tinyvllm.gateway.metrics import Metrics
    from tinyvllm.gateway.response import Responses
    from tinyvllm.gateway.stats import Stats

logger = logging.getLogger("tinyvllm.gateway")

_MAX_OUTBOX = 64
"""Events owed to a socket that is behind; more, and its events are not read."""


class _Work:
    """One thing to do in a lane: `event` to answer, or a response to watch from a number on."""

    def __init__(self, event: CreateEvent | ResumeEvent) -> None:
        self.event = event
        self.cancelled = False
        self.response: Response | None = None
        self.viewer: Viewer | None = None

    def watch(self, response: Response, connection: Connection, next_number: int) -> Viewer:
        self.response = response
        self.viewer = Viewer(connection, self.event.stream_id, next_number)
        response.attach(self.viewer)
        return self.viewer

    def cancel(self) -> None:
        self.cancelled = True
        if self.response is not None:
            self.response.cancel()

    def leave(self) -> None:
        if self.response is not None and self.viewer is not None:
            self.response.detach(self.viewer)


class Session:
    """Serves one open connection."""

    def __init__(
        self,
        connection: Connection,
        responses: Responses,
        stats: Stats,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._connection = connection
        self._responses = responses
        self._stats = stats
        self._limits = limits
        self._metrics = metrics
        self._lanes: dict[str | None, deque[_Work]] = {}
        self._lane_tasks: set[asyncio.Task[None]] = set()
        self._running: list[_Work] = []  # at the head of their lanes; least recently written first
        self._active = asyncio.Semaphore(limits.max_active)
        self._num_requests = 0
        self._outbox: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._bucket = TokenBucket(
            limits.max_events_per_second, limits.max_events_burst, self._loop.time()
        )
        self._stats_interval = 0.0
        self._stats_timer: asyncio.TimerHandle | None = None

    @property
    def is_working(self) -> bool:
        return bool(self._lanes) or self._stats_timer is not None

    @property
    def is_answering(self) -> bool:
        """Some response has not been told to its end."""
        return bool(self._lanes)

    async def run(self) -> None:
        """Serve until the socket closes; returns when nothing of the session is left."""
        connection = self._connection
        connection.on_writable = self._catch_up
        connection.is_working = lambda: self.is_working
        try:
            while True:
                self._receive(await connection.recv())
                connection.last_event = self._loop.time()
                while len(self._outbox) >= _MAX_OUTBOX and connection.behind:
                    await connection.drain()
        except ConnectionClosed:
            pass
        finally:
            connection.on_writable = None
            self._watch_stats(0)
            for lane in self._lanes.values():
                for work in lane:
                    work.leave()
            for task in self._lane_tasks:
                task.cancel()
            if self._lane_tasks:
                await asyncio.wait(self._lane_tasks)

    # --- Events in ------------------------------------------------------------------------------

    def _receive(self, message: str | bytes) -> None:
        """Obey one message. Nothing in here waits, so no close can come between its parts."""
        try:
            if not self._bucket.take(self._loop.time()):
                raise ProtocolError(
                    f"more than {self._limits.max_events_per_second:g} events a second",
                    code="rate_limit_exceeded",
                    status=429,
                )
            event = parse_event(message, model=self._responses.engine.model_name)
            if isinstance(event, CreateEvent):
                if self._responses.draining:
                    raise shutting_down(event.stream_id)
                self._enqueue(_Work(event))
            elif isinstance(event, ResumeEvent):
                self._resume(event)
            elif isinstance(event, CancelEvent):
                self._cancel(event)
            elif isinstance(event, StatsEvent):
                self._watch_stats(event.interval)
        except ProtocolError as error:
            self.tell_error(error)

    def _resume(self, event: ResumeEvent) -> None:
        work = _Work(event)
        try:
            response = self._responses.view(event.response_id, event.starting_after)
            self._enqueue(work)
        except ProtocolError as error:
            error.stream_id = event.stream_id
            raise
        # From now on, not from its turn in the lane: the response must not be given up meanwhile.
        work.watch(response, self._connection, event.starting_after + 1)
        self._metrics.count("resumes_total")

    def _cancel(self, event: CancelEvent) -> None:
        if event.response_id is not None:
            response = self._responses.find(event.response_id)
            if response is None:
                raise not_found(event.response_id, event.stream_id)
            response.cancel()
            return
        # All of the lane: what waits, and what runs.
        for work in self._lanes.get(event.stream_id, ()):
            work.cancel()

    # --- Lanes ----------------------------------------------------------------------------------

    def _enqueue(self, work: _Work) -> None:
        limits, stream_id = self._limits, work.event.stream_id
        lane = self._lanes.get(stream_id)
        if lane is None and len(self._lanes) >= limits.max_lanes:
            raise ProtocolError(
                f"this connection already has {limits.max_lanes} lanes with work in them",
                code="websocket_stream_limit_reached",
                status=429,
                param="stream_id",
                stream_id=stream_id,
            )
        if self._num_requests >= limits.max_requests:
            raise ProtocolError(
                f"this connection already has {limits.max_requests} requests running or waiting",
                code="rate_limit_exceeded",
                status=429,
                stream_id=stream_id,
            )
        self._num_requests += 1
        if lane is not None:
            lane.append(work)
            return
        lane = self._lanes[stream_id] = deque([work])
        task = asyncio.create_task(self._run_lane(stream_id, lane))
        self._lane_tasks.add(task)
        task.add_done_callback(self._lane_tasks.discard)

    async def _run_lane(self, stream_id: str | None, lane: deque[_Work]) -> None:
        while lane:
            work = lane[0]
            try:
                if isinstance(work.event, CreateEvent):
                    async with self._active:
                        await self._create(work, work.event)
                else:
                    await self._watch(work)
            except ProtocolError as error:
                self.tell_error(error)
            finally:
                work.leave()
                lane.popleft()
                self._num_requests -= 1
        del self._lanes[stream_id]
        if self._responses.draining and not self._lanes:
            await self.close_for_restart()

    async def _create(self, work: _Work, event: CreateEvent) -> None:
        response = self._responses.create(event, cancelled=work.cancelled)
        work.watch(response, self._connection, 0)
        await self._watch(work)

    async def _watch(self, work: _Work) -> None:
        assert work.response is not None and work.viewer is not None
        self._running.append(work)
        try:
            work.response.start_viewer(work.viewer)
            await work.viewer.done.wait()
        finally:
            self._running.remove(work)

    # --- Events out -----------------------------------------------------------------------------

    def tell_error(self, error: ProtocolError) -> None:
        """Send an error event, as soon as the socket takes it."""
        self._metrics.count("errors_total", error.code)
        self.tell(error.event())

    def tell(self, event: bytes) -> None:
        if self._connection.behind:
            self._outbox.append(event)
        else:
            self._connection.write([event])

    def _catch_up(self) -> None:
        """The socket takes data again: send what gathered, those that waited longest first."""
        connection = self._connection
        while self._outbox and not connection.behind:
            connection.write([self._outbox.popleft()])
        for work in self._running.copy():
            if connection.behind:
                return
            if work.response is not None and work.viewer is not None:
                self._running.remove(work)
                self._running.append(work)
                work.response.catch_up(work.viewer)

    def _watch_stats(self, interval: float) -> None:
        """Send a stats event every `interval` seconds, the first at once; 0 ends it."""
        if self._stats_timer is not None:
            self._stats_timer.cancel()
            self._stats_timer = None
        self._stats_interval = interval
        if interval:
            self._send_stats()

    def _send_stats(self) -> None:
        self._stats_timer = self._loop.call_later(self._stats_interval, self._send_stats)
        event = self._stats.event()
        # To a socket that is behind, an old picture is of no use.
        if event is not None and not self._connection.behind:
            self._connection.write([event])

    async def close_for_restart(self) -> None:
        await self._connection.close(1012, "the server is restarting")
