"""Starting, closing, dying, forking: nothing hangs and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support.engine_helpers import GREEDY, settled, stepped

from tinyvllm import (
    LLM,
    AsyncEngine,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidParameterError,
    ModelError,
    ModelNotFoundError,
    NotSupportedError,
    SamplingParams,
)
from tinyvllm.sequence import Sequence
from tinyvllm.stream import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeEngine = Callable[..., AsyncEngine]

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.anyio
async def test_used_before_start_and_after_close(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for use in (lambda: engine.generate("x"), lambda: engine.tokenizer, engine.stats):
        with pytest.raises(EngineClosedError, match="start"):
            use()
    assert not engine.health().alive
    await engine.aclose()
    async with engine:
        await engine.start()
        assert engine.health().alive and engine.health().last_step_age is None
    await engine.aclose()
    assert not engine.health().alive and engine.health().error is None
    with pytest.raises(EngineClosedError, match="closed"):
        engine.generate("x")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.anyio
async def test_a_closed_engine_starts_again_and_beside_others(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    first, second = make_engine(), make_engine(block_size=32)
    for _ in range(2):
        async with first, second:
            streams = [engine.generate(prompts[5], GREEDY) for engine in (first, second)]
            for stream in streams:
                assert [token.id async for token in stream] == expected[5]


@pytest.mark.anyio
async def test_close_releases_the_model(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine() as engine:
        await engine.generate(prompts[5], GREEDY).text()
        core = engine._engine
        assert core is not None
        alive = [
            weakref.ref(thing)
            for thing in (core._runner, core._runner.model, core._runner.kv_cache.k[0])
        ]
        gc.collect()
        gc.disable()
    try:
        assert [ref() for ref in alive] == [None] * 3, "freed by reference counts alone"
    finally:
        gc.enable()


@pytest.mark.anyio
async def test_close_while_streaming(make_engine: MakeEngine, prompts: Any) -> None:
    """Readers get the tokens that exist, then an error that says why no more come."""
    ends: list[Any] = []
    async with anyio.create_task_group() as tasks:

        async def read(stream: Any) -> None:
            count = 0
            try:
                async for _ in stream:
                    count += 1
                    started.set()
            except EngineClosedError as error:
                ends.append((count, stream.usage.completion_tokens, str(error)))

        engine = make_engine(max_num_seqs=4)
        started = anyio.Event()
        await engine.start()
        with stepped(engine) as gate:
            streams = [engine.generate(prompt, ENDLESS) for prompt in prompts[:8]]
            streams.append(engine.generate("some text", ENDLESS))
            for stream in streams:
                tasks.start_soon(read, stream)
            gate.allow(5)
            await started.wait()
            assert engine._engine is not None
            engine._engine.close()  # at most one step more
        await engine.aclose()
    assert len(ends) == 9
    assert all(read == generated for read, generated, _ in ends)
    assert {text for _, _, text in ends} == {"the engine was closed"}
    assert {stream.finish_reason for stream in streams} == {"abort"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("model", "overrides", "error"),
    [
        ("no/such/model/anywhere", {}, ModelNotFoundError),
        (".", {}, ModelError),
        (None, {"max_model_len": 100_000}, ConfigError),
        (None, {"num_blocks": 10**9}, ConfigError),
        (None, {"device": "cuda:99"}, NotSupportedError),
    ],
)
async def test_a_failed_start_leaves_nothing(
    tiny_model_dir: Path, model: Any, overrides: Any, error: type[Exception]
) -> None:
    before = threading.active_count()
    engine = AsyncEngine(model or tiny_model_dir, **overrides)
    for _ in range(2):
        with pytest.raises(error):
            await engine.start()
        assert threading.active_count() == before
    with pytest.raises(EngineDeadError):
        engine.generate("x")
    assert isinstance(engine.health().error, error)
    await engine.aclose()


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    message = "is not a model directory: it has no config.json; it needs config.json, *.safetensors"
    with pytest.raises(ModelNotFoundError, match=re.escape(f"{tmp_path} {message}")):
        LLM(tmp_path)


@pytest.mark.anyio
async def test_a_cancelled_start_leaves_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while weights are loading: the loader stops at its next report."""
    from tinyvllm.engine import Engine

    loading, go = threading.Event(), threading.Event()
    report = Engine._report

    def slow_report(self: Engine, phase: str, fraction: float) -> None:
        if phase == "loading weights":
            loading.set()
            go.wait(10)
        report(self, phase, fraction)

    monkeypatch.setattr(Engine, "_report", slow_report)
    before = threading.active_count()
    engine = make_engine()
    close = Engine.close

    def close_and_go(self: Engine) -> None:
        close(self)
        go.set()

    monkeypatch.setattr(Engine, "close", close_and_go)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.start)
        while not loading.is_set():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert threading.active_count() == before
    with pytest.raises(EngineClosedError):
        engine.generate("x")


def test_configuration_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        AsyncEngine("x", block_size=7)
    with pytest.raises(ConfigError, match="max_model_len must be an integer >= 2; got 1"):
        AsyncEngine("m", max_model_len=1)
    with pytest.raises(ConfigError, match="no field 'max_seqs'"):
        AsyncEngine("x", max_seqs=7)
    with pytest.raises(ValueError, match="model must be"):
        AsyncEngine(7)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_death(make_engine: MakeEngine, prompts: Any) -> None:
    """Live, parked, queued and later requests all end with the cause; close still works."""
    engine = make_engine(max_num_seqs=2)
    await engine.start()
    core = engine._engine
    assert core is not None
    errors: list[BaseException] = []

    async def read(stream: Any) -> None:
        try:
            async for _ in stream:
                pass
        except EngineDeadError as error:
            errors.append(error)

    boom = ZeroDivisionError("injected")

    def fail(*_: Any) -> Any:
        raise boom

    async with anyio.create_task_group() as tasks:
        with stepped(engine) as gate:
            streams = [engine.generate(prompt, ENDLESS) for prompt in prompts[:5]]
            unread = engine.generate(prompts[6], ENDLESS)
            for stream in streams:
                tasks.start_soon(read, stream)
            gate.allow(2)
            await anyio.lowlevel.checkpoint()
            core._runner.launch = fail  # type: ignore[method-assign]
    assert len(errors) == 5
    assert len({id(error) for error in errors}) == 5
    assert all(error.__cause__ is boom for error in errors)
    assert {stream.finish_reason for stream in streams} == {"error"}
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: injected"):
        await unread.text()
    with pytest.raises(EngineDeadError) as caught:
        engine.generate("later")
    assert caught.value.__cause__ is boom
    health = engine.health()
    assert not health.alive and health.error is boom
    await engine.aclose()
    await engine.start()
    assert engine.health().alive
    await engine.aclose()


@pytest.mark.anyio
async def test_death_in_waking(
    make_engine: MakeEngine, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    boom = ZeroDivisionError("injected")

    def fail(waiters: Any) -> Any:
        raise boom

    monkeypatch.setattr("tinyvllm.engine.wake", fail)
    async with make_engine() as engine:
        with pytest.raises(EngineDeadError) as caught:
            await engine.generate(prompts[1], ENDLESS).text()
        assert caught.value.__cause__ is boom


@pytest.mark.anyio
async def test_a_request_that_arrives_as_the_engine_dies(
    make_engine: MakeEngine, prompts: Any
) -> None:
    """Between check_open and the queue: the caller itself then ends it."""
    engine = make_engine()
    await engine.start()
    core = engine._engine
    assert core is not None
    states = [
        core.new_state(prompts[1], GREEDY),
        core.new_state("text", GREEDY),
    ]
    await engine.aclose()
    for state in states:
        core.submit(state)
        assert state.finished and isinstance(state.error, EngineClosedError)


@pytest.mark.anyio
@pytest.mark.parametrize("dies", [False, True], ids=["closed", "dead"])
async def test_ends_while_text_is_tokenized(
    make_engine: MakeEngine, prompts: Any, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """The text in work, those behind it, and the tokenizing thread itself."""
    engine = make_engine()
    await engine.start()
    core = engine._engine
    assert core is not None
    encode, in_work = core.tokenizer.encode, threading.Event()

    def slow_encode(text: str) -> list[int]:
        in_work.set()
        while core._end is None:
            time.sleep(0)
        return encode(text)

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(core.tokenizer, "encode", slow_encode)
    streams = [engine.generate("some text", GREEDY) for _ in range(3)]
    assert in_work.wait(10)
    if dies:
        core._runner.launch = fail  # type: ignore[method-assign]
        streams.append(engine.generate(prompts[1], GREEDY))
    else:
        core.close()
    for stream in streams:
        with pytest.raises(EngineDeadError if dies else EngineClosedError):
            await stream.text()
    await engine.aclose()


@pytest.mark.anyio
async def test_a_bad_request_does_not_kill_the_engine(
    make_engine: MakeEngine, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine() as engine:
        encode = engine.tokenizer.encode

        def refuse(text: str) -> list[int]:
            if text == "bad":
                raise ZeroDivisionError("in the tokenizer")
            return encode(text)

        monkeypatch.setattr(engine.tokenizer, "encode", refuse)
        bad = engine.generate("bad", GREEDY)
        with pytest.raises(ZeroDivisionError):
            await bad.text()
        assert await engine.generate("good", GREEDY).text()
        assert engine.health().alive


@pytest.mark.anyio
async def test_stats_and_health_of_a_running_engine(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine(max_num_seqs=2) as engine:
        with stepped(engine) as gate:
            streams = [engine.generate(prompt, ENDLESS) for prompt in prompts[:3]]
            gate.wait_reached()
            stats, health = engine.stats(), engine.health()
            assert stats.num_running + stats.num_waiting <= 3
            assert health.alive and health.last_step_age is not None
            assert 0 <= health.last_step_age < 60
            gate.allow(3)
            await anext(streams[0])
            for stream in streams:
                stream.abort()
        await settled(engine)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_requests) == (0, 0, 4)
        assert stats.num_prompt_tokens == 1 + 4 + 7 + 1
        assert stats.num_steps > 0 and stats.num_output_tokens > 0


@pytest.mark.anyio
async def test_idle_costs_nothing(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine() as engine:
        await engine.generate(prompts[0], GREEDY).text()
        await settled(engine)
        threads = [thread for thread in threading.enumerate() if "tinyvllm" in thread.name]
        assert len(threads) == 2
        before = [_cpu_ticks(thread) for thread in threads]
        await anyio.sleep(0.3)
        assert [_cpu_ticks(thread) for thread in threads] == before


def _cpu_ticks(thread: threading.Thread) -> int:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii")
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_dropped_engine_warns_and_stops(make_engine: MakeEngine, prompts: Any) -> None:
    engine = make_engine()
    asyncio.run(engine.start())
    core = engine._engine
    assert core is not None
    stream = engine.generate(prompts[0], ENDLESS)
    del engine
    gc.collect()
    assert core.is_running, "a stream keeps its engine"
    with pytest.warns(ResourceWarning, match="aclose"):
        del stream
        gc.collect()
    core.join(10)
    assert not core.is_running


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    """The child cannot use the engine, and is told so; the parent goes on."""
    engine = make_engine()
    asyncio.run(engine.start())
    stream = engine.generate(prompts[1], GREEDY)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(EngineClosedError, match="another process"):
                engine.generate("x")
            stream._state.buffer.clear()
            with pytest.raises(EngineClosedError, match="another process"):
                asyncio.run(stream.text())
            assert not engine.health().alive
            asyncio.run(engine.aclose())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [token for token in [asyncio.run(_ids(stream))] if token] == [expected[1]]
    asyncio.run(engine.aclose())


async def _ids(stream: Any) -> list[int]:
    return [token.id async for token in stream]


@pytest.mark.parametrize("how", ["end", "exception", "sigterm", "sigint"])
def test_process_exit_while_streaming(tiny_model_dir: Path, how: str) -> None:
    """No hang and no crash, however the process ends with an open engine."""
    code = f"""
import asyncio, os, signal, sys, time
from tinyvllm import AsyncEngine
async def main():
    engine = AsyncEngine({str(tiny_model_dir)!r}, num_blocks=64)
    await engine.start()
    streams = [engine.generate([5 + i], max_tokens=400, ignore_eos=True) for i in range(8)]
    await anext(streams[0])
    globals().update(engine=engine, streams=streams)
    how = {how!r}
    if how == "exception":
        raise ZeroDivisionError
    if how.startswith("sig"):
        os.kill(os.getpid(), getattr(signal, how.upper()))
        await asyncio.sleep(10)
asyncio.run(main())
"""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    wanted = {"end": (0,), "exception": (1,), "sigterm": (-15,), "sigint": (-2, 1, 130)}[how]
    assert done.returncode in wanted, done.stderr
    assert "Fatal Python error" not in done.stderr
    assert time.monotonic() - begin < 50


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
async def test_a_request_that_cannot_be_added(
    make_engine: MakeEngine, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Whatever is wrong with it ends that request; what must end the engine ends it too."""
    engine = make_engine()
    await engine.start()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise kind("injected")

    with monkeypatch.context() as patch:
        patch.setattr("tinyvllm.engine.Detokenizer", fail)
        with pytest.raises(kind if kind is ZeroDivisionError else EngineDeadError):
            await engine.generate(prompts[1], GREEDY).text()
    if kind is ZeroDivisionError:
        assert [t.id async for t in engine.generate(prompts[1], GREEDY)] == expected[1]
    await engine.aclose()


@pytest.mark.anyio
async def test_the_tokenizing_thread_survives_anything(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine() as engine:

        def fail(text: str) -> Any:
            raise SystemExit("injected")

        with monkeypatch.context() as patch:
            patch.setattr(engine.tokenizer, "encode", fail)
            with pytest.raises(SystemExit):
                await engine.generate("text", GREEDY).text()
        assert (await engine.generate("text", GREEDY).text()) is not None


def test_no_blocked_thread_keeps_a_stream_alive(make_engine: MakeEngine, prompts: Any) -> None:
    """Else a reader whose loop has closed would keep its stream, and so a dropped engine."""
    engine = make_engine()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    stream = engine.generate(prompts[1], ENDLESS)

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    task = loop.create_task(read(stream))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    alive = weakref.ref(stream)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task, loop, stream
    asyncio.run(settled(engine))
    core = engine._engine
    assert core is not None
    end = time.monotonic() + 10
    while alive() is not None and time.monotonic() < end:
        gc.collect()
    assert alive() is None
    asyncio.run(engine.aclose())


def test_an_idle_engine_keeps_no_sequence(make_engine: MakeEngine, prompts: Any) -> None:
    """They hold prompts, texts and readers; its slots and its last step must not."""
    engine = make_engine()

    def count() -> int:
        gc.collect()
        return sum(type(each) in (Sequence, StreamState) for each in gc.get_objects())

    async def use() -> None:
        await engine.start()
        plain = engine.generate(prompts[0], temperature=0.0, max_tokens=3)
        special = engine.generate(prompts[1], temperature=0.0, max_tokens=5, logprobs=1)
        for stream in (plain, special):
            await stream.text()

    before = count()
    asyncio.run(use())
    end = time.monotonic() + 10
    while count() > before and time.monotonic() < end:  # until the thread has gone to rest
        pass
    assert count() == before
    asyncio.run(engine.aclose())


@pytest.mark.anyio
async def test_template_options_do_not_hide_arguments(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for name in ("messages", "tools", "self", 3):
            with pytest.raises(InvalidParameterError, match="template_options") as caught:
                engine.chat([{"role": "user", "content": "x"}], template_options={name: 1})  # type: ignore[dict-item]
            assert caught.value.param == "template_options"


def test_start_from_two_threads_makes_one_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    cores: list[Any] = []
    threads = [threading.Thread(target=lambda: cores.append(engine._launch())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, cores))) == 1
    asyncio.run(engine.start())
    asyncio.run(engine.aclose())
