"""TokenStream: every way of reading it and every way of leaving it."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support.engine_helpers import GREEDY, settled, stepped

from tinyvllm import AsyncEngine, ContextLengthError, SamplingParams, Token

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeEngine = Callable[..., AsyncEngine]

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)


def test_token_is_its_text() -> None:
    token = Token(" sea", 7, 3, -0.5, {7: -0.5}, "stop")
    assert token == " sea" and isinstance(token, str) and repr(token) == "' sea'"
    assert (token.id, token.index, token.logprob, token.top_logprobs) == (7, 3, -0.5, {7: -0.5})
    assert token.finish_reason == "stop"
    copy = pickle.loads(pickle.dumps(token))
    assert copy == token and copy.__dict__ == token.__dict__


@pytest.mark.anyio
async def test_reading_to_the_end(
    make_engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(prompts[5], GREEDY, request_id="mine")
        assert stream.finish_reason is None and stream.request_id == "mine"
        tokens = [token async for token in stream]
        assert [token.id for token in tokens] == expected[5]
        assert [token.index for token in tokens] == list(range(12))
        assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]
        assert tokens[0].logprob is None and tokens[0].top_logprobs is None
        text = engine.tokenizer.decode(expected[5])
        assert "".join(tokens) == text == await stream.text()
        assert stream.finish_reason == "length"
        assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (16, 12)
        assert stream.usage.total_tokens == 28
        assert stream.prompt_token_ids == prompts[5]
        times = stream.timings
        assert times.queued is not None and times.time_to_first_token is not None
        assert times.total is not None and times.time_per_output_token is not None
        assert 0 <= times.queued <= times.time_to_first_token <= times.total
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert [token async for token in stream] == []


@pytest.mark.anyio
async def test_an_aborted_stream_knows_its_time_at_once(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate([5, 6, 7], temperature=0.0, ignore_eos=True, max_tokens=400)
        await anext(stream)
        assert stream.timings.total is None
        stream.abort()
        total = stream.timings.total
        assert total is not None and total >= (stream.timings.time_to_first_token or 0.0) > 0.0
        await settled(engine)
        assert stream.finish_reason == "abort" and stream.timings.total == total


@pytest.mark.anyio
async def test_runs_before_it_is_read(make_engine: MakeEngine, prompts: list[list[int]]) -> None:
    async with make_engine() as engine:
        early = engine.generate(prompts[3], GREEDY)
        await engine.generate(prompts[3], GREEDY).text()
        await settled(engine)
        assert early.finish_reason == "length"
        assert early.usage.completion_tokens == 12
        assert len([token async for token in early]) == 12


@pytest.mark.anyio
async def test_reading_in_parts(
    make_engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(prompts[4], GREEDY)
        first = await anext(stream)
        rest = [token.id async for token in stream]
        assert [first.id, *rest] == expected[4]


async def _break(engine: AsyncEngine, stream: Any) -> None:
    async for _ in stream:
        break


async def _raise(engine: AsyncEngine, stream: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in stream:
            raise ZeroDivisionError


async def _aclose(engine: AsyncEngine, stream: Any) -> None:
    await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def _abort(engine: AsyncEngine, stream: Any) -> None:
    stream.abort()
    stream.abort()


async def _leave_block(engine: AsyncEngine, stream: Any) -> None:
    async with stream:
        await anext(stream)


async def _cancel(engine: AsyncEngine, stream: Any) -> None:
    async def read() -> None:
        async for _ in stream:
            reading.set()

    reading = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await reading.wait()
        tasks.cancel_scope.cancel()


async def _cancel_parked(engine: AsyncEngine, stream: Any) -> None:
    """While it waits for a token that does not come: three steps were allowed."""
    for _ in range(3):
        await anext(stream)
    with anyio.move_on_after(0.01) as scope:
        await anext(stream)
    assert scope.cancelled_caught


LEAVING = [_break, _raise, _aclose, _abort, _leave_block, _cancel, _cancel_parked]


@pytest.mark.anyio
@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__[1:])
async def test_leaving_aborts_within_one_step(
    make_engine: MakeEngine, prompts: list[list[int]], leave: Any
) -> None:
    async with make_engine() as engine:
        with stepped(engine) as gate:
            stream = engine.generate(prompts[2], ENDLESS)
            gate.allow(3)
            await leave(engine, stream)
            assert stream.finish_reason == "abort"
        await settled(engine)
        assert stream.usage.completion_tokens <= 3 + 1
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert isinstance(await stream.text(), str)


@pytest.mark.anyio
async def test_a_left_loop_cannot_be_resumed_by_accident(
    make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    async with make_engine() as engine:
        with stepped(engine) as gate:
            stream = engine.generate(prompts[2], ENDLESS)
            gate.allow(1)
            async for _ in stream:
                break
        with pytest.raises(RuntimeError, match="anext"):
            async for _ in stream:
                pass


@pytest.mark.anyio
@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "thread"])
async def test_a_dropped_stream_aborts(
    make_engine: MakeEngine, prompts: list[list[int]], in_thread: bool
) -> None:
    async with make_engine() as engine:
        with stepped(engine) as gate:
            streams = [engine.generate(prompts[2], ENDLESS) for _ in range(3)]
            states = [stream._state for stream in streams]
            gate.allow(1)
            await anext(streams[0])
            loop: list[Any] = [streams]
            loop.append(loop)  # only the collector finds it
            del streams, loop
            if in_thread:
                collector = threading.Thread(target=gc.collect)
                collector.start()
                collector.join()
            else:
                gc.collect()
            assert all(state.aborted for state in states)
        await settled(engine)
        assert [state.finish_reason for state in states] == ["abort"] * 3
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.anyio
async def test_a_finished_stream_sends_no_abort(
    make_engine: MakeEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyvllm.engine import Engine

    aborted = []
    monkeypatch.setattr(Engine, "_drop", lambda self, state: aborted.append(state))
    async with make_engine() as engine:
        async with engine.generate(prompts[1], GREEDY) as stream:
            await stream.text()
        await stream.aclose()
        del stream
        async for _ in engine.generate(prompts[1], GREEDY):
            pass
        await settled(engine)
    assert aborted == []


@pytest.mark.anyio
async def test_two_readers_at_once(make_engine: MakeEngine, prompts: list[list[int]]) -> None:
    async with make_engine() as engine:
        errors: list[BaseException] = []

        async def read() -> None:
            try:
                await anext(stream)
            except RuntimeError as error:
                errors.append(error)
                stream.abort()
            except StopAsyncIteration:
                pass

        with stepped(engine):
            stream = engine.generate(prompts[2], ENDLESS)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                tasks.start_soon(read)
        assert [str(error)[:9] for error in errors] == ["two tasks"]


@pytest.mark.anyio
async def test_abort_from_another_thread_wakes_the_reader(
    make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    async with make_engine() as engine:
        with stepped(engine):
            stream = engine.generate(prompts[2], ENDLESS)
            async with anyio.create_task_group() as tasks:

                async def read() -> None:
                    assert [token async for token in stream] == []

                tasks.start_soon(read)
                await anyio.lowlevel.checkpoint()
                thread = threading.Thread(target=stream.abort)
                thread.start()
                thread.join()


@pytest.mark.anyio
async def test_a_lagging_reader_is_paused_and_resumed(
    make_engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with make_engine(max_buffered_tokens=8) as engine:
        slow = engine.generate(prompts[0], ENDLESS)
        others = [engine.generate(prompt, GREEDY) for prompt in prompts[1:4]]
        texts = [[token.id async for token in other] for other in others]
        assert texts == expected[1:4]
        while engine.stats().num_paused == 0:
            await engine.generate(prompts[1], GREEDY).text()
        generated = slow.usage.completion_tokens
        assert 8 < generated <= 11  # two steps were under way when it was paused
        await engine.generate(prompts[1], GREEDY).text()
        assert slow.usage.completion_tokens == generated
        ids = [token.id async for token in slow]
        assert len(ids) == 400
        assert slow.finish_reason == "length"
        assert ids[:12] == expected[0]


@pytest.mark.anyio
async def test_errors_that_need_the_tokenizer_come_with_the_first_read(
    make_engine: MakeEngine,
) -> None:
    async with make_engine() as engine:
        stream = engine.generate("long " * 1000)
        with pytest.raises(ContextLengthError, match="max_model_len"):
            await anext(stream)
        with pytest.raises(ContextLengthError):
            await stream.text()
        assert stream.finish_reason == "error"
        assert stream.usage.completion_tokens == 0
        await engine.generate("short", GREEDY).text()


@pytest.mark.anyio
async def test_aborted_before_it_is_tokenized(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for _ in range(50):
            stream = engine.generate("Once upon a time", ENDLESS)
            stream.abort()
        await settled(engine)
        assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_second_asyncio_run(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    engine = make_engine()
    asyncio.run(engine.start())

    async def ids() -> list[int]:
        return [token.id async for token in engine.generate(prompts[6], GREEDY)]

    assert asyncio.run(ids()) == asyncio.run(ids()) == expected[6]
    assert anyio.run(ids, backend="trio") == expected[6]
    asyncio.run(engine.aclose())


def test_a_stream_may_change_loops(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    async def begin() -> Any:
        await engine.start()
        stream = engine.generate(prompts[6], GREEDY)
        return stream, (await anext(stream)).id

    async def rest(stream: Any) -> list[int]:
        return [token.id async for token in stream]

    engine = make_engine()
    stream, first = asyncio.run(begin())
    assert [first, *anyio.run(rest, stream, backend="trio")] == expected[6]
    asyncio.run(engine.aclose())


def test_several_loops_in_threads(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    engine = make_engine()
    asyncio.run(engine.start())
    results: dict[int, Any] = {}

    async def some(start: int) -> None:
        streams = [engine.generate(prompt, GREEDY) for prompt in prompts[start : start + 10]]
        results[start] = [[token.id async for token in stream] for stream in streams]

    threads = [
        threading.Thread(
            target=anyio.run,
            args=(some, start),
            kwargs={"backend": backend, "backend_options": options},
        )
        for start, backend, options in (
            (0, "asyncio", {}),
            (10, "trio", {}),
            (20, "asyncio", {"use_uvloop": True}),
            (30, "trio", {}),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids for start in sorted(results) for ids in results[start]] == expected
    asyncio.run(engine.aclose())


def test_a_closed_loop_does_not_break_the_engine(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    """A loop that is closed without a word to its tasks: the engine drops their requests."""
    engine = make_engine()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    with stepped(engine):
        stream = engine.generate(prompts[0], ENDLESS)
        # Step the reader until it is parked, by hand, and leave it there.
        reader = stream.__anext__()
        task = loop.create_task(reader)
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert stream._state.waiter is not None
        loop.close()

    async def go_on() -> list[int]:
        ids = [token.id async for token in engine.generate(prompts[3], GREEDY)]
        await settled(engine)
        return ids

    assert asyncio.run(go_on()) == expected[3]
    assert stream.finish_reason == "abort"
    task._log_destroy_pending = False
    del task, reader
    asyncio.run(engine.aclose())


@pytest.mark.anyio
async def test_feed(make_engine: MakeEngine, prompts: Any, expected: list[list[int]]) -> None:
    """Every token once and in order, with other readers beside; it can stop and go on."""
    async with make_engine() as engine:
        got: list[list[int]] = [[] for _ in range(6)]

        async def feed(which: int) -> None:
            stream = engine.generate(prompts[which], GREEDY)
            num_stops = 0

            def sink(tokens: list[Any]) -> bool:
                assert tokens
                got[which] += [token.id for token in tokens]
                return which % 2 == 1 and len(got[which]) % 5 == 0

            while not await stream.feed(sink):
                num_stops += 1
            assert stream.finish_reason == "length"
            assert await stream.feed(sink)  # ended: nothing more comes
            assert await stream.text() == engine.tokenizer.decode(got[which])

        async with anyio.create_task_group() as tasks:
            for which in range(6):
                tasks.start_soon(feed, which)
            mixed = engine.generate(prompts[7], GREEDY)
            first = await anext(mixed)
            rest: list[int] = []
            assert await mixed.feed(lambda tokens: rest.extend(token.id for token in tokens))
        assert got == expected[:6]
        assert [first.id, *rest] == expected[7]


@pytest.mark.anyio
async def test_feed_ends_in_every_way(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine() as engine:

        def fail(tokens: list[Any]) -> bool:
            raise ZeroDivisionError

        stream = engine.generate(prompts[0], ENDLESS)
        with pytest.raises(ZeroDivisionError):
            await stream.feed(fail)
        assert stream.finish_reason is None  # the caller may go on
        stream.abort()
        assert await stream.feed(fail)
        assert stream.finish_reason == "abort"

        stream = engine.generate(prompts[1], ENDLESS)
        with anyio.CancelScope() as scope:
            await stream.feed(lambda tokens: scope.cancel())
        assert stream.finish_reason == "abort"

        too_long = engine.generate("long " * 1000)
        with pytest.raises(ContextLengthError):
            await too_long.feed(fail)

        async with anyio.create_task_group() as tasks:
            stream = engine.generate(prompts[2], ENDLESS)
            tasks.start_soon(stream.feed, lambda tokens: None)
            while stream._state.waiter is None:  # trio starts tasks in any order
                await anyio.lowlevel.checkpoint()
            with pytest.raises(RuntimeError, match="two tasks"):
                await stream.feed(fail)
            stream.abort()
        await settled(engine)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
