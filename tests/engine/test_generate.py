"""What a request asks for is what it gets, alone and in any company."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine_helpers import GREEDY, settled, stepped

from tinyvllm import (
    AsyncEngine,
    ContextLengthError,
    InvalidParameterError,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import LLM

    MakeEngine = Callable[..., AsyncEngine]
    MakeLLM = Callable[..., LLM]

pytestmark = pytest.mark.anyio


async def ids_of(engine: AsyncEngine, prompt: Any, *args: Any, **sampling: Any) -> list[int]:
    return [token.id async for token in engine.generate(prompt, *args, **sampling)]


async def all_ids(engine: AsyncEngine, prompts: Any, params: SamplingParams) -> list[list[int]]:
    """All at once; read one after another."""
    streams = [engine.generate(prompt, params) for prompt in prompts]
    return [[token.id async for token in stream] for stream in streams]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="crowd"),
        pytest.param({"max_num_batched_tokens": 17, "max_num_seqs": 7}, id="chunked"),
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param({"num_blocks": 12, "enable_prefix_caching": False}, id="preempted"),
        pytest.param({"block_size": 32, "num_blocks": 24}, id="blocks of 32"),
        pytest.param({"scheduling": "static"}, id="static"),
        pytest.param({"max_num_seqs": 1}, id="one slot"),
    ],
)
async def test_the_same_tokens_in_any_company(
    make_engine: MakeEngine,
    prompts: list[list[int]],
    expected: list[list[int]],
    overrides: dict[str, Any],
) -> None:
    async with make_engine(**overrides) as engine:
        assert await all_ids(engine, prompts, GREEDY) == expected
        stats = engine.stats()
        if stats.num_blocks == 12:
            assert stats.num_preemptions > 0
        # Again, in another order, and now from the prefix cache where there is one.
        assert await all_ids(engine, prompts[::-1], GREEDY) == expected[::-1]
        if engine.config.enable_prefix_caching:
            assert engine.stats().prefix_cache_hits > 0


async def test_cached_tokens_are_counted(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine() as engine:
        for cached in (0, 96):  # 100 tokens: six full blocks
            stream = engine.generate(prompts[33], GREEDY)
            await stream.text()
            assert stream.usage.cached_tokens == cached


async def test_seeds(make_engine: MakeEngine, prompts: Any) -> None:
    params = SamplingParams(seed=7, max_tokens=20, ignore_eos=True)
    async with make_engine() as engine:
        alone = await ids_of(engine, prompts[3], params)
        crowd = await all_ids(engine, [*prompts[:5], prompts[3]], params)
        assert crowd[3] == crowd[5] == alone
        assert await ids_of(engine, prompts[3], params, seed=8) != alone
        free = [await ids_of(engine, prompts[3], params, seed=None) for _ in range(3)]
        assert free[0] != free[1] or free[1] != free[2]


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": 1e-5}],
    ids=lambda sampling: next(iter(sampling)),
)
async def test_filters_that_leave_one_token(
    make_engine: MakeEngine, prompts: Any, expected: Any, sampling: dict[str, float]
) -> None:
    async with make_engine() as engine:
        assert (
            await ids_of(engine, prompts[8], max_tokens=12, ignore_eos=True, **sampling)
            == expected[8]
        )


async def test_max_tokens_and_the_end_of_the_context(make_engine: MakeEngine) -> None:
    async with make_engine(max_model_len=64) as engine:
        assert engine.max_model_len == 64
        for num_prompt, asked, got in ((10, 1, 1), (10, 54, 54), (10, 400, 54), (63, None, 1)):
            stream = engine.generate(
                [5] * num_prompt, max_tokens=asked, temperature=0, ignore_eos=True
            )
            tokens = [token async for token in stream]
            assert len(tokens) == got
            assert stream.finish_reason == "length"
        with pytest.raises(ContextLengthError, match="64 tokens"):
            engine.generate([5] * 64)


async def test_a_prompt_larger_than_the_pool(make_engine: MakeEngine) -> None:
    async with make_engine(num_blocks=4) as engine:
        with pytest.raises(ContextLengthError, match="num_blocks"):
            engine.generate([5] * 64)
        stream = engine.generate([5] * 60, temperature=0, ignore_eos=True)
        assert len([token async for token in stream]) == 4


async def test_eos_and_ignore_eos(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    """An id that the greedy answer holds is made the EOS."""
    async with make_engine() as engine:
        core = engine._engine
        assert core is not None
        eos, position = expected[9][4], expected[9].index(expected[9][4])
        object.__setattr__(core.model_config, "eos_token_ids", (eos,))
        stream = engine.generate(prompts[9], GREEDY, ignore_eos=False)
        tokens = [token async for token in stream]
        assert [token.id for token in tokens] == expected[9][: position + 1]
        assert (tokens[-1], tokens[-1].finish_reason) == ("", "stop")
        assert "".join(tokens) == engine.tokenizer.decode(expected[9][:position])
        assert await ids_of(engine, prompts[9], GREEDY) == expected[9]
        # min_tokens: the EOS cannot be drawn, and something else is.
        later = await ids_of(engine, prompts[9], GREEDY, ignore_eos=False, min_tokens=12)
        assert len(later) == 12 and eos not in later
        assert later[:position] == expected[9][:position]


async def test_stop_token_ids(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    stop_id = expected[9][4]
    position = expected[9].index(stop_id)
    async with make_engine() as engine:
        stream = engine.generate(prompts[9], GREEDY, stop_token_ids=[stop_id])
        tokens = [token async for token in stream]
        assert [token.id for token in tokens] == expected[9][: position + 1]
        assert (tokens[-1], stream.finish_reason) == ("", "stop")
        shown = engine.generate(
            prompts[9], GREEDY, stop_token_ids=[stop_id], include_stop_str_in_output=True
        )
        assert await shown.text() == engine.tokenizer.decode(expected[9][: position + 1])


async def test_stop_strings(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    async with make_engine() as engine:
        for prompt, ids in zip(prompts[10:20], expected[10:20], strict=True):
            whole = engine.tokenizer.decode(ids)
            stop = whole[len(whole) // 2 :][:3]
            cut = whole.index(stop)
            stream = engine.generate(prompt, GREEDY, stop=stop)
            tokens = [token async for token in stream]
            assert "".join(tokens) == whole[:cut]
            assert stream.finish_reason == tokens[-1].finish_reason == "stop"
            assert [token.id for token in tokens] == ids[: len(tokens)]
            shown = engine.generate(prompt, GREEDY, stop=stop, include_stop_str_in_output=True)
            assert await shown.text() == whole[: cut + len(stop)]
            # One that never completes is shown in the end.
            held = engine.generate(prompt, GREEDY, stop=[whole[-2:] + "\x00", "\x00"])
            assert await held.text() == whole
            assert held.finish_reason == "length"
        await settled(engine)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_logprobs(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    """Equal log_softmax of the raw logits, whatever the temperature and the masks."""
    async with make_engine() as engine:
        runner = engine._engine._runner  # type: ignore[union-attr]
        seen = []
        launch = runner.launch

        def recorded(batch: Any) -> Any:
            step = launch(batch)
            step.result()
            seen.append(runner._buffers.logits[0].clone())
            return step

        runner.launch = recorded  # type: ignore[method-assign]
        stream = engine.generate(
            prompts[9],
            max_tokens=6,
            temperature=0.7,
            seed=1,
            logprobs=3,
            min_tokens=5,
            stop_token_ids=[9],
        )
        tokens = [token async for token in stream]
        for token, logits in zip(tokens, seen[-6:], strict=True):
            raw = torch.log_softmax(logits, dim=-1)
            assert token.logprob == pytest.approx(float(raw[token.id]), abs=1e-6)
            assert token.top_logprobs is not None
            top = torch.topk(raw, 3)
            assert list(token.top_logprobs) == top.indices.tolist()
            # The kernel's exp errs by 2e-7 of the sum.
            assert list(token.top_logprobs.values()) == pytest.approx(top.values.tolist(), abs=5e-7)
        plain = engine.generate(prompts[9], max_tokens=2, logprobs=0, temperature=0)
        first = await anext(plain)
        assert first.logprob is not None and first.top_logprobs == {}


async def test_logprobs_do_not_change_the_tokens(
    make_engine: MakeEngine, prompts: Any, expected: Any
) -> None:
    async with make_engine() as engine:
        params = [GREEDY, SamplingParams(**{**_fields(GREEDY), "logprobs": 2})]
        streams = [engine.generate(p, params[i % 2]) for i, p in enumerate(prompts)]
        for i, stream in enumerate(streams):
            tokens = [token async for token in stream]
            assert [token.id for token in tokens] == expected[i]
            assert all((token.logprob is None) == (i % 2 == 0) for token in tokens)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "ignore_eos", "max_tokens")}


async def test_priority(make_engine: MakeEngine, prompts: Any) -> None:
    """With one slot, a later request of better priority ends first."""
    async with make_engine(max_num_seqs=1) as engine:
        with stepped(engine) as gate:
            slow = engine.generate(prompts[1], GREEDY, max_tokens=200)
            gate.allow(1)
            await anext(slow)
            urgent = engine.generate(prompts[2], GREEDY, priority=-1)
        assert len([token async for token in slow]) == 199
        assert len([token async for token in urgent]) == 12
        ended = urgent._state.time_ended, slow._state.time_ended
        assert ended == tuple(sorted(ended))  # type: ignore[type-var]
        assert engine.stats().num_preemptions == 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "match"),
    [
        ([], {}, InvalidParameterError, "at least one"),
        ([3, -1], {}, InvalidParameterError, r"prompt\[1\] is -1"),
        ([3, 311], {}, InvalidParameterError, r"\[0, 311\)"),
        ([True], {}, InvalidParameterError, "token ids"),
        (["a"], {}, InvalidParameterError, "one prompt per call; for lists use LLM.generate"),
        ([[3], [4]], {}, InvalidParameterError, "one prompt per call; for lists use LLM.generate"),
        ([{"role": "user"}], {}, InvalidParameterError, r"for messages use chat\(\)"),
        ({"role": "user"}, {}, InvalidParameterError, r"for messages use chat\(\)"),
        ([1.0], {}, InvalidParameterError, "token ids"),
        (b"Hello", {}, InvalidParameterError, "got b'Hello'; decode it to text"),
        (bytearray(b"Hello"), {}, InvalidParameterError, "decode it to text"),
        (None, {}, InvalidParameterError, "token ids"),
        (7, {}, InvalidParameterError, "token ids"),
        ("x", {"temperature": -1}, InvalidParameterError, "temperature"),
        ("x", {"temprature": 1}, InvalidParameterError, "temprature"),
        ("x", {"timeout": 0}, InvalidParameterError, "timeout must be a number of seconds"),
        ("x", {"timeout": True}, InvalidParameterError, "timeout"),
        ("x", {"timeout": float("inf")}, InvalidParameterError, "timeout"),
        ("x", {"cache_salt": 3}, InvalidParameterError, "cache_salt"),
        ("x", {"enable_prefix_caching": 1}, InvalidParameterError, "enable_prefix_caching"),
        ("x", {"params": {"seed": 1}}, InvalidParameterError, "SamplingParams; .* as keywords"),
        ("x", {"priority": "high"}, InvalidParameterError, "priority"),
        ([3] * 600, {}, ContextLengthError, "600 tokens"),
    ],
)
async def test_refused_at_the_call(
    make_engine: MakeEngine, prompt: Any, sampling: Any, error: type[Exception], match: str
) -> None:
    async with make_engine() as engine:
        with pytest.raises(error, match=match):
            engine.generate(prompt, **sampling)
        assert engine.stats().num_requests == 0
        assert len(await ids_of(engine, [3], GREEDY)) == 12


async def test_ids_of_numpy_and_torch(make_engine: MakeEngine, prompts: Any, expected: Any) -> None:
    async with make_engine() as engine:
        tensor = torch.tensor(prompts[7])
        for prompt in (tensor, tensor.numpy(), tuple(prompts[7]), iter(prompts[7])):
            assert await ids_of(engine, prompt, GREEDY) == expected[7]


async def test_chat(make_engine: MakeEngine) -> None:
    messages = [{"role": "user", "content": "Once upon a time"}]
    async with make_engine() as engine:
        stream = engine.chat(messages, GREEDY)
        text = await stream.text()
        assert stream.prompt_token_ids == engine.tokenizer.encode_chat(messages)
        assert await engine.generate(stream.prompt_token_ids, GREEDY).text() == text
        with pytest.raises(InvalidParameterError, match="messages"):
            engine.chat("Once upon a time")  # type: ignore[arg-type]
        broken = engine.chat([{"role": "user"}], GREEDY)
        with pytest.raises(InvalidParameterError, match=r"messages\[0\]\.content .* got None$"):
            await broken.text()
        with pytest.raises(InvalidParameterError, match="messages must be a non-empty list"):
            await engine.chat([], GREEDY).text()
        with pytest.raises(InvalidParameterError, match=r"messages must be a list .* got None$"):
            engine.chat(None)  # type: ignore[arg-type]
        with pytest.raises(
            InvalidParameterError, match=r"must be a list .* got \{'role': 'user'\}"
        ):
            engine.chat({"role": "user"})  # type: ignore[arg-type]
        assert await engine.chat(messages, GREEDY).text() == text


async def test_text_prompts(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for text in ("Once upon a time", "日本語 🎉", "x"):
            stream = engine.generate(text, GREEDY)
            answer = await stream.text()
            assert stream.prompt_token_ids == engine.tokenizer.encode(text)
            assert await engine.generate(stream.prompt_token_ids, GREEDY).text() == answer
