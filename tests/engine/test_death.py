"""An engine that fails at any point of its step: everybody is told why, at once, and nothing is
left that keeps the next engine from starting."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from support.engine_helpers import GREEDY

from tinyvllm import EngineDeadError, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine
    from tinyvllm.engine import Engine

    MakeEngine = Callable[..., AsyncEngine]

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)


class Bomb:
    """Replaces a function and fails at its second call."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.error = ZeroDivisionError("injected")
        self.time = 0.0
        self._real = real
        self._num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._num_calls += 1
        if self._num_calls >= 2:
            self.time = self.time or time.perf_counter()
            raise self.error
        return self._real(*args, **kwargs)


def arm(core: Engine, point: str, monkeypatch: pytest.MonkeyPatch) -> Bomb:
    """Puts a bomb at a point of the engine's step."""
    if point == "wake":
        from tinyvllm import engine

        bomb = Bomb(engine.wake)
        monkeypatch.setattr(engine, "wake", bomb)
        return bomb
    if point in ("draw", "result"):
        launch = core._runner.launch
        bomb = Bomb(lambda step: getattr(step, point)())

        class Failing:
            def __init__(self, step: Any) -> None:
                self.cancel, self.draw, self.result = step.cancel, step.draw, step.result
                # Not a lambda: a traceback's frame keeps its function's closure, cleared or not.
                setattr(self, point, partial(bomb, step))

        core._runner.launch = lambda batch: Failing(launch(batch))  # type: ignore[assignment, method-assign, return-value]
        return bomb
    owner, name = {
        "receive": (core, "_add"),
        "schedule": (core._scheduler, "schedule"),
        "build": (core._builder, "build"),
        "launch": (core._runner, "launch"),
        "update": (core._scheduler, "update"),
        "detokenize": (core, "_detokenize"),
        "publish": (core, "_publish"),
        "follow": (core, "_follow"),
        "finish": (core, "_note_end"),
    }[point]
    bomb = Bomb(getattr(owner, name))
    setattr(owner, name, bomb)
    return bomb


POINTS = (
    *("receive", "schedule", "build", "launch", "result", "update", "draw"),
    *("detokenize", "publish", "wake", "finish"),
)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("trio", {})], ids=["asyncio", "trio"])
@pytest.mark.parametrize("point", POINTS)
async def test_everyone_is_told_within_a_second(
    make_engine: MakeEngine,
    prompts: Any,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    engine = make_engine(max_num_seqs=3)
    await engine.start()
    core = engine._engine
    assert core is not None
    bomb = arm(core, point, monkeypatch)
    told: list[BaseException] = []

    async def read(stream: Any) -> None:
        with pytest.raises(EngineDeadError) as caught:
            async for _ in stream:
                pass
        told.append(caught.value)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            # Parked and running, waiting for a slot, several choices, in the tokenizer. Two end
            # soon, for the point that only an end comes by.
            lengths = [400, 2, 2, 400, 400, 400]
            streams = [
                engine.generate(prompt, ENDLESS, max_tokens=max_tokens)
                for prompt, max_tokens in zip(prompts[:6], lengths, strict=True)
            ]
            streams.append(engine.generate(prompts[7], temperature=1.0, n=2, ignore_eos=True))
            streams.append(engine.generate("some text", ENDLESS))
            unread = engine.generate(prompts[8], ENDLESS)
            readers = [s for s, n in zip(streams, [*lengths, 400, 400], strict=True) if n == 400]
            for stream in readers:
                tasks.start_soon(read, stream)
        with pytest.raises(EngineDeadError):
            await unread.text()
    assert len(told) == len(readers)
    assert all(error.__cause__ is bomb.error for error in told)
    assert {stream.finish_reason for stream in readers} == {"error"}
    for stream in (*readers, unread):
        ended = stream._state.time_ended
        assert ended is not None and ended - bomb.time < 1.0
    with pytest.raises(EngineDeadError, match="injected") as later:
        engine.generate(prompts[1], GREEDY)
    assert later.value.__cause__ is bomb.error
    assert engine.health().error is bomb.error
    monkeypatch.undo()
    await engine.aclose()
    async with make_engine() as another:
        stream = another.generate(prompts[5], GREEDY)
        assert [token.id async for token in stream] == expected[5]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"])
@pytest.mark.parametrize("point", ["launch", "update", "follow", "draw", "result"])
async def test_a_step_whose_draw_waits_goes_down_with_the_engine(
    make_engine: MakeEngine,
    prompts: Any,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """The forward pass of the next step is on its way, its draw is not, when the engine fails."""
    engine = make_engine(max_num_seqs=3)
    await engine.start()
    core = engine._engine
    assert core is not None
    streams = [
        engine.generate(prompts[1], ENDLESS),
        engine.generate(prompts[2], regex="[a-z]{300}", max_tokens=400),
        engine.generate(prompts[3], ENDLESS, presence_penalty=1.0, logprobs=2),
    ]
    with anyio.fail_after(20):
        for stream in streams:
            await anext(stream)
        bomb = arm(core, point, monkeypatch)
        for stream in streams:
            with pytest.raises(EngineDeadError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.__cause__ is bomb.error
    await engine.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("trio", {})], ids=["asyncio", "trio"])
@pytest.mark.parametrize("dies", [False, True], ids=["closed", "died"])
async def test_a_device_that_refuses_to_be_released(
    make_engine: MakeEngine,
    prompts: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dies: bool,
) -> None:
    """As after a fault of a GPU: the end comes all the same, and says what happened first."""
    engine = make_engine()
    await engine.start()
    core = engine._engine
    assert core is not None
    close = core._runner.close

    def refuse() -> None:
        close()
        raise RuntimeError("the device has failed")

    core._runner.close = refuse  # type: ignore[method-assign]
    with anyio.fail_after(20):
        if dies:
            bomb = arm(core, "result", monkeypatch)
            with pytest.raises(EngineDeadError, match="injected") as caught:
                await engine.generate(prompts[1], ENDLESS).text()
            assert caught.value.__cause__ is bomb.error
        await engine.aclose()
    assert core.stopped.is_set()
    assert "releasing the model" in caplog.text
