"""A request's tokens depend on nothing but the request: not on company, chunks, preemptions, the
prefix cache or siblings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engine_helpers import ONE_ORDER, settled

from tinyvllm import AsyncEngine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeEngine = Callable[..., AsyncEngine]

COLUMNS: dict[str, dict[str, Any]] = {
    "reference-float32": {"ops": "reference", "dtype": "float32"},
    "native-bfloat16": ONE_ORDER,
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, logprobs=2),
    "drawn": SamplingParams(temperature=3.0, seed=11, ignore_eos=True, max_tokens=24, logprobs=2),
}
PICKED = (0, 5, 11, 21, 33)  # of the prompts: 1, 16, 34, 64 and 100 ids, so all kinds of last block

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def read(stream: Any) -> list[tuple[int, float]]:
    return [(token.id, token.logprob) async for token in stream]


@pytest.fixture(params=COLUMNS)
def column(request: pytest.FixtureRequest) -> dict[str, Any]:
    return COLUMNS[request.param]


@pytest.fixture(params=PARAMS)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return PARAMS[request.param]


def same(column: dict[str, Any], got: list[Any], alone: list[Any]) -> None:
    """Native ops sum in an order of their own: equal to the last bit. Torch's does not promise
    that, so of the reference the tokens are compared."""
    if "ops" in column:
        assert [token_id for token_id, _ in got] == [token_id for token_id, _ in alone]
    else:
        assert got == alone


async def alone(
    make_engine: MakeEngine, column: Any, prompts: Any, params: SamplingParams
) -> list[list[tuple[int, float]]]:
    """Each of the picked prompts in an engine that has and caches nothing else."""
    async with make_engine(**column, enable_prefix_caching=False) as engine:
        return [await read(engine.generate(prompts[i], params)) for i in PICKED]


async def test_company_chunks_cache_and_preemption(
    make_engine: MakeEngine, prompts: Any, column: Any, params: SamplingParams
) -> None:
    want = await alone(make_engine, column, prompts, params)

    async with make_engine(**column) as engine:
        for is_cached in (False, True):
            crowd = [engine.generate(prompt, params, seed=3) for prompt in prompts[::3]]
            streams = [engine.generate(prompts[i], params) for i in PICKED]
            for stream, right in zip(streams, want, strict=True):
                same(column, await read(stream), right)
            if is_cached:
                for i, stream in zip(PICKED, streams, strict=True):
                    assert stream.usage.cached_tokens >= (len(prompts[i]) - 1) // 16 * 16
            del crowd

    async with make_engine(**{**column, "max_num_seqs": 4, "max_num_batched_tokens": 7}) as engine:
        streams = [engine.generate(prompts[i], params) for i in PICKED]
        for stream, right in zip(streams, want, strict=True):
            same(column, await read(stream), right)

    for caching in (True, False):
        # The stream cannot run far ahead of its reader, to its end perhaps.
        bounds = {"max_num_seqs": 1, "max_buffered_tokens": 2}
        config = {**column, **bounds, "enable_prefix_caching": caching}
        async with make_engine(**config) as engine:
            for i, right in zip(PICKED, want, strict=True):
                before = engine.stats().num_preemptions
                stream = engine.generate(prompts[i], params, priority=1)
                got = []
                for _ in range(6):
                    got += [(t.id, t.logprob) for t in [await anext(stream) for _ in range(2)]]
                    await engine.generate([7, 8, 9], temperature=0.0, max_tokens=1).text()
                got += await read(stream)
                same(column, got, right)
                await settled(engine)
                preempted = engine.stats().num_preemptions - before
                assert preempted >= 2
                if engine.config.ops == "reference":
                    assert preempted >= 5


async def test_siblings(make_engine: MakeEngine, prompts: Any, column: Any) -> None:
    """Choice i has the tokens of a request of its own with seed + i."""
    params = PARAMS["drawn"]
    by_seed = [
        await alone(
            make_engine, column, prompts, SamplingParams(**{**_fields(params), "seed": 11 + choice})
        )
        for choice in range(4)
    ]
    for caching in (True, False):
        async with make_engine(**column, enable_prefix_caching=caching) as engine:
            streams = [engine.generate(prompts[i], params, n=4) for i in PICKED]
            for place, stream in enumerate(streams):
                got: list[list[Any]] = [[] for _ in range(4)]
                async for token in stream:
                    got[token.choice].append((token.id, token.logprob))
                for choice in range(4):
                    same(column, got[choice], by_seed[choice][place])


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "ignore_eos", "max_tokens")} | {
        "logprobs": params.logprobs
    }


@pytest.mark.slow
async def test_real_model_in_a_crowd(smollm2_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """50 prompts in BF16: alone and all at once, in chunks."""
    texts = [f"{i}. {verb} the story of a {noun}" for i, (verb, noun) in enumerate(_WORDS)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
    config = {"num_blocks": 512, "enable_prefix_caching": False, **ONE_ORDER}
    async with AsyncEngine(smollm2_dir, **config) as engine:
        alone = [[t.id async for t in engine.generate(text, params)] for text in texts]
        streams = [engine.generate(text, params) for text in texts]
        crowd = [[token.id async for token in stream] for stream in streams]
    num_different = sum(a != b for a, b in zip(alone, crowd, strict=True))
    with capsys.disabled():
        print(f"\nreal model, alone against a crowd: {num_different} of {len(texts)} differ")
    assert num_different == 0


_WORDS = [
    (verb, noun)
    for verb in ("Tell", "Write", "Read", "Explain", "Forget")
    for noun in ("dog", "ship", "king", "tree", "clock", "river", "storm", "cook", "spy", "bridge")
]
