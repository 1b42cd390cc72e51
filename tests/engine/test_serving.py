"""What a server needs of an engine: priorities, admission, timeouts, pause, drain, n, salt."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from support.engine_helpers import GREEDY, settled, stepped

from tinyvllm import (
    LLM,
    EngineClosedError,
    EngineOverloadedError,
    InvalidParameterError,
    RequestTimeoutError,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine

    MakeEngine = Callable[..., AsyncEngine]

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
DRAWN = SamplingParams(temperature=4.0, seed=7, ignore_eos=True, max_tokens=10)


async def ids_of(stream: Any) -> list[int]:
    return [token.id async for token in stream]


def states(engine: AsyncEngine) -> dict[str, str]:
    return {seq.request_id: seq.state for seq in engine.stats().sequences}


# --- priority


@pytest.mark.anyio
async def test_priority_of_a_waiting_and_of_a_running_request(
    make_engine: MakeEngine, prompts: Any
) -> None:
    async with make_engine(max_num_seqs=1) as engine:
        with stepped(engine) as gate:
            streams = [
                engine.generate(prompt, ENDLESS, request_id=name)
                for prompt, name in zip(prompts, "abc", strict=False)
            ]

            async def steps_until(**wanted: str) -> None:
                with anyio.fail_after(10):
                    while any(states(engine).get(name) != state for name, state in wanted.items()):
                        gate.allow(1)
                        await anyio.sleep(0.001)

            await steps_until(a="decode", b="waiting", c="waiting")
            streams[2].set_priority(-1)
            await steps_until(a="waiting", b="waiting", c="decode")
            streams[2].set_priority(5)
            await steps_until(a="decode", b="waiting", c="waiting")
            with pytest.raises(InvalidParameterError, match="priority"):
                streams[0].set_priority("high")  # type: ignore[arg-type]
            for stream in streams:
                stream.abort()
        streams[0].set_priority(1)


# --- admission


@pytest.mark.anyio
async def test_more_than_the_queue_holds_is_refused(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine(max_num_seqs=2, max_queued_requests=1) as engine:
        with stepped(engine) as gate:
            live = [engine.generate(prompts[0], ENDLESS) for _ in range(3)]
            with pytest.raises(EngineOverloadedError, match=r"max_queued_requests \(1\)") as caught:
                engine.generate(prompts[0], ENDLESS)
            assert 0.1 <= caught.value.retry_after <= 60
            live.pop().abort()
            gate.allow(4)
            await anext(live[0])
            live.append(engine.generate(prompts[0], ENDLESS))
            with pytest.raises(EngineOverloadedError):
                engine.generate(prompts[0], ENDLESS)
            del live


# --- timeouts


@pytest.mark.anyio
async def test_a_timeout_ends_a_running_request_behind_its_tokens(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    async with make_engine() as engine:
        with stepped(engine) as gate:
            stream = engine.generate(prompts[5], GREEDY, timeout=0.2, request_id="late")
            gate.allow(3)
            ids: list[int] = []
            with pytest.raises(RequestTimeoutError, match="'late' did not end in") as err:
                async for token in stream:
                    ids.append(token.id)
                    if len(ids) == 3:
                        await anyio.sleep(0.25)
                        gate.allow(1)
        assert err.value.timeout == 0.2
        assert ids == expected[5][: len(ids)]
        assert 3 <= len(ids) <= 4
        assert stream.finish_reason == "abort"
        await settled(engine)
        assert engine.stats().num_running == 0


@pytest.mark.anyio
@pytest.mark.parametrize("held_by", ["slots", "pause"])
async def test_a_timeout_ends_a_waiting_request(
    make_engine: MakeEngine, prompts: Any, held_by: str
) -> None:
    """Also in an engine that takes no steps: nobody else wakes its thread."""
    async with make_engine(max_num_seqs=1) as engine:
        holder = None
        if held_by == "pause":
            engine.pause()
        else:
            holder = engine.generate(prompts[1], ENDLESS, max_tokens=400)
            await anext(holder)
            engine.pause()
        for prompt in (prompts[5], "some text"):
            with anyio.fail_after(10), pytest.raises(RequestTimeoutError):
                await engine.generate(prompt, GREEDY, timeout=0.05).text()
        engine.resume()
        del holder


@pytest.mark.anyio
async def test_a_timeout_that_is_not_reached_changes_nothing(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    async with make_engine() as engine:
        for _ in range(150):
            await engine.generate([3], GREEDY, max_tokens=1, timeout=1e6).text()
        stream = engine.generate(prompts[5], GREEDY, timeout=1e9)
        assert await ids_of(stream) == expected[5]
        core = engine._engine
        assert core is not None
        assert len(core._deadlines) < 100, "those of ended requests do not pile up"


# --- pause and resume


@pytest.mark.anyio
async def test_pause_holds_everything_and_loses_nothing(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    async with make_engine() as engine:
        streams = [engine.generate(prompt, GREEDY) for prompt in prompts[:8]]
        first = [await anext(stream) for stream in streams]
        engine.pause()
        await anyio.sleep(0.05)
        steps = engine.stats().num_steps
        assert engine.health().paused and engine.health().last_step_age is None
        streams.append(engine.generate(prompts[8], GREEDY))
        await anyio.sleep(0.05)
        assert engine.stats().num_steps == steps
        engine.pause()
        engine.resume()
        for i, stream in enumerate(streams):
            ids = [first[i].id] if i < len(first) else []
            assert ids + await ids_of(stream) == expected[i]
        assert not engine.health().paused


# --- aclose(drain=...)


@pytest.mark.anyio
async def test_drain_lets_everyone_finish(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    engine = make_engine(max_num_seqs=2)
    await engine.start()
    streams = [engine.generate(prompt, GREEDY) for prompt in prompts[:6]]
    streams.append(engine.generate("some text", GREEDY))
    engine.pause()
    await engine.aclose(drain=True)
    with pytest.raises(EngineClosedError):
        engine.generate(prompts[0], GREEDY)
    for i, stream in enumerate(streams[:6]):
        assert await ids_of(stream) == expected[i]
    assert await streams[6].text() and streams[6].finish_reason == "length"


@pytest.mark.anyio
async def test_drain_refuses_new_requests_and_ends_in_time(
    make_engine: MakeEngine, prompts: Any
) -> None:
    engine = make_engine(max_buffered_tokens=4)
    await engine.start()
    stuck = engine.generate(prompts[1], ENDLESS)
    await anext(stuck)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: engine.aclose(drain=0.3))
            with pytest.raises(EngineClosedError, match="takes no new requests"):
                while True:
                    engine.generate(prompts[0], GREEDY, max_tokens=1).abort()
                    await anyio.lowlevel.checkpoint()
    with pytest.raises(EngineClosedError):
        await stuck.text()
    await engine.aclose(drain=True)
    with pytest.raises(InvalidParameterError, match="drain"):
        await engine.aclose(drain=-1.0)


@pytest.mark.anyio
async def test_a_cancelled_drain_closes_at_once(make_engine: MakeEngine, prompts: Any) -> None:
    engine = make_engine(max_buffered_tokens=4)
    await engine.start()
    stuck = engine.generate(prompts[1], ENDLESS)
    await anext(stuck)
    with anyio.fail_after(10):
        with anyio.move_on_after(0.05) as scope:
            await engine.aclose(drain=True)
        assert scope.cancelled_caught
    assert not engine.health().alive
    with pytest.raises(EngineClosedError):
        await stuck.text()


# --- n


@pytest.mark.anyio
@pytest.mark.parametrize("caching", [True, False])
async def test_n_choices_are_those_of_n_requests(
    make_engine: MakeEngine, prompts: Any, caching: bool
) -> None:
    """The prompt is computed once and its blocks are shared, with or without a prefix cache."""
    prompt = prompts[20]
    async with make_engine(enable_prefix_caching=caching) as engine:
        alone = [
            await ids_of(engine.generate(prompt, DRAWN, seed=7 + i, enable_prefix_caching=False))
            for i in range(4)
        ]
        assert len({tuple(ids) for ids in alone}) == 4
        before = engine.stats()
        with stepped(engine) as gate:
            stream = engine.generate(prompt, DRAWN, n=4)
            gate.allow(4)
            tokens = [await anext(stream) for _ in range(4)]
            shared = engine.stats().num_shared_blocks
            gate.allow(100)
            tokens += [token async for token in stream]
        assert shared == (len(prompt) - 1) // 16
        got: list[list[Any]] = [[] for _ in range(4)]
        for token in tokens:
            assert token.index == len(got[token.choice])
            got[token.choice].append(token)
        assert [[token.id for token in choice] for choice in got] == alone
        assert [choice[-1].finish_reason for choice in got] == ["length"] * 4
        assert stream.finish_reasons == ("length",) * 4
        assert stream.usage.prompt_tokens == len(prompt)
        assert stream.usage.completion_tokens == 40
        texts = await stream.texts()
        assert texts == ["".join(choice) for choice in got]
        assert await stream.text() == texts[0]
        await settled(engine)
        after = engine.stats()
        assert after.num_prompt_tokens - before.num_prompt_tokens == len(prompt) + 1
        assert (after.num_running, after.num_waiting) == (0, 0)
        assert after.num_free_blocks == after.num_blocks and after.num_shared_blocks == 0


@pytest.mark.anyio
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
async def test_n_choices_are_aborted_together(
    make_engine: MakeEngine, prompts: Any, num_steps: int
) -> None:
    async with make_engine(max_num_seqs=2) as engine:
        with stepped(engine) as gate:
            stream = engine.generate(prompts[20], DRAWN, n=3, max_tokens=100)
            if num_steps:
                gate.allow(num_steps)
            gate.wait_reached()
            stream.abort()
            assert stream.finish_reasons == ("abort",) * 3
            gate.allow(1)
        await settled(engine)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.anyio
async def test_a_slow_reader_pauses_all_choices(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine(max_num_seqs=4, max_buffered_tokens=6) as engine:
        stream = engine.generate(prompts[10], DRAWN, n=3, max_tokens=20)
        tokens = [await anext(stream)]
        with anyio.fail_after(10):
            while engine.stats().num_paused < 3:
                await anyio.lowlevel.checkpoint()
        assert states(engine) == {stream.request_id: "paused"}
        tokens += [token async for token in stream]
        assert len(tokens) == 60


def test_n_outputs_of_llm(make_llm: Callable[..., LLM], prompts: Any) -> None:
    with make_llm() as llm:
        (output, other) = llm.generate(prompts[4:6], DRAWN, n=3)
        singles = [llm.generate(prompts[4], DRAWN, seed=7 + i)[0] for i in range(3)]
    assert [choice.text for choice in output.choices] == [single.text for single in singles]
    assert [choice.token_ids for choice in output.choices] == [s.token_ids for s in singles]
    assert output.text == output.choices[0].text
    assert output.usage.completion_tokens == 30
    assert len(other.choices) == 3


# --- prefix cache per request


@pytest.mark.anyio
async def test_salt_and_opt_out(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    prompt = prompts[20]  # three full blocks and a part
    full = (len(prompt) - 1) // 16 * 16

    async with make_engine() as engine:

        async def cached(**options: Any) -> int:
            stream = engine.generate(prompt, GREEDY, **options)
            assert await ids_of(stream) == expected[20]
            return stream.usage.cached_tokens

        assert await cached(enable_prefix_caching=False) == 0
        assert await cached() == 0, "it left nothing"
        assert await cached(enable_prefix_caching=False) == 0, "and reads nothing"
        assert await cached() == full
        assert await cached(cache_salt="tenant") == 0
        assert await cached(cache_salt="tenant") == full
        assert await cached(cache_salt="other") == 0


# --- what can be seen


@pytest.mark.anyio
async def test_sequences_and_blocks_in_stats_and_health(
    make_engine: MakeEngine, prompts: Any
) -> None:
    async with make_engine(max_num_seqs=2, max_num_batched_tokens=16) as engine:
        with stepped(engine) as gate:
            streams = [engine.generate(prompts[i], ENDLESS, request_id=f"r{i}") for i in (2, 20, 3)]
            gate.allow(2)
            await anext(streams[0])
            await anext(streams[0])  # the second step's: its blocks are cached by now
            gate.wait_reached()
            stats, health = engine.stats(), engine.health()
            gate.allow(50)
            for stream in streams:
                stream.abort()
        decode, prefill, waiting = stats.sequences
        assert (decode.request_id, decode.state, decode.slot) == ("r2", "decode", 0)
        assert (prefill.request_id, prefill.state, prefill.slot) == ("r20", "prefill", 1)
        assert (waiting.request_id, waiting.state, waiting.slot) == ("r3", "waiting", None)
        assert (waiting.num_prompt_tokens, waiting.num_blocks) == (10, 0)
        assert 0 < prefill.num_computed_tokens < prefill.num_prompt_tokens == 61
        assert prefill.num_blocks == 4
        assert (stats.max_num_seqs, stats.max_num_batched_tokens) == (2, 16)
        assert (health.num_running, health.num_waiting) == (2, 1)
        assert (health.num_free_blocks, health.num_blocks) == (stats.num_free_blocks, 128)
        await settled(engine)
        assert engine.stats().num_cached_blocks > 0


@pytest.mark.anyio
async def test_stats_name_the_first_waiters_only(make_engine: MakeEngine) -> None:
    """A page asks for them several times a second, however long the queue is."""
    async with make_engine() as engine:
        engine.pause()
        streams = [engine.generate([3], GREEDY, request_id=str(i), priority=-i) for i in range(300)]

        def wait() -> None:
            end = time.monotonic() + 10
            while engine.stats().num_waiting < 300 and time.monotonic() < end:
                time.sleep(0.01)  # who spins keeps the GIL from the engine

        await anyio.to_thread.run_sync(wait)
        assert engine.stats().num_waiting == 300
        named = [int(seq.request_id) for seq in engine.stats().sequences]
        assert named == list(range(299, 299 - 256, -1))
        del streams


@pytest.mark.anyio
async def test_the_retry_hint_follows_the_pace(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        core = engine._engine
        assert core is not None
        assert core._time_until_free(1) == 1.0, "nothing is known yet"
        now = time.perf_counter()
        core._end_times.extend(now - 10 + i for i in range(10))  # one a second
        assert 0.9 < core._time_until_free(1) < 1.5
        assert 4.5 < core._time_until_free(5) < 6
        assert core._time_until_free(10_000) == 60.0


@pytest.mark.anyio
async def test_one_line_of_log_per_request(
    make_engine: MakeEngine, prompts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tinyvllm.engine")
    async with make_engine() as engine:
        await engine.generate("secret words", GREEDY, request_id="mine").text()
        engine.pause()
        with pytest.raises(RequestTimeoutError):
            await engine.generate(prompts[1], GREEDY, request_id="late", timeout=0.01).text()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(("mine", "late"))]
    assert len(lines) == 2
    assert lines[0].startswith("mine: length; ") and "12 output tokens; queued 0." in lines[0]
    assert lines[1].startswith("late: abort (RequestTimeoutError); 4 prompt tokens (0 cached), 0 ")
    assert not any("secret" in r.getMessage() for r in caplog.records)
