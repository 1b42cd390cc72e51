"""LLM: the blocking face."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from support.engine_helpers import GREEDY

from tinyvllm import (
    LLM,
    ContextLengthError,
    EngineClosedError,
    InvalidParameterError,
    ModelNotFoundError,
    RequestOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeLLM = Callable[..., LLM]


def test_outputs_come_in_order(make_llm: MakeLLM, prompts: Any, expected: Any) -> None:
    with make_llm() as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert [output.prompt for output in outputs] == prompts
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [output.text for output in outputs] == [llm.tokenizer.decode(i) for i in expected]
        assert {output.finish_reason for output in outputs} == {"length"}
        assert [output.usage.completion_tokens for output in outputs] == [12] * len(prompts)
        assert {output.logprobs for output in outputs} == {None}


def test_one_prompt_or_many(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        (from_text,) = llm.generate("Once upon", GREEDY)
        ids = llm.tokenizer.encode("Once upon")
        (from_ids,) = llm.generate(ids, GREEDY)
        assert from_text.token_ids == from_ids.token_ids
        both = llm.generate(["Once upon", ids], GREEDY)
        assert [output.token_ids for output in both] == [from_ids.token_ids] * 2
        assert llm.generate([], GREEDY) == []
        (chat,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
        chats = llm.chat([[{"role": "user", "content": "Hi"}]] * 2, GREEDY)
        assert [output.text for output in chats] == [chat.text] * 2


def test_params_per_prompt_and_logprobs(make_llm: MakeLLM, prompts: Any, expected: Any) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    with make_llm() as llm:
        outputs = llm.generate(prompts[:3], params, logprobs=1)
        assert [len(output.token_ids) for output in outputs] == [1, 2, 3]
        for output in outputs:
            assert output.logprobs is not None
            for token_id, (logprob, top) in zip(output.token_ids, output.logprobs, strict=True):
                assert top == {token_id: logprob}
        with pytest.raises(InvalidParameterError, match="one per prompt"):
            llm.generate(prompts[:3], params[:2])


def test_an_error_aborts_the_batch(make_llm: MakeLLM, prompts: Any, expected: Any) -> None:
    with make_llm() as llm:
        with pytest.raises(ContextLengthError) as caught:
            llm.generate(["fine", "long " * 1000, "fine"], GREEDY)
        assert caught.value.__notes__ == ["in request 1 (req-1)"]
        assert llm.generate(prompts[2], GREEDY)[0].token_ids == expected[2]
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_progress(make_llm: MakeLLM, prompts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with make_llm() as llm:
        llm.generate(prompts, GREEDY)
        assert capsys.readouterr().err == ""
        llm.generate(prompts, GREEDY, progress=True)
        assert "40/40 requests, 480 tokens" in capsys.readouterr().err


def test_inside_a_running_loop_and_from_threads(
    make_llm: MakeLLM, prompts: Any, expected: Any
) -> None:
    async def inside() -> list[RequestOutput]:
        with make_llm() as inner:
            return inner.generate(prompts[:4], GREEDY)

    assert [output.token_ids for output in asyncio.run(inside())] == expected[:4]
    results: dict[int, Any] = {}
    with make_llm() as llm:

        def run(i: int) -> None:
            results[i] = [output.token_ids for output in llm.generate(prompts[i:], GREEDY)]

        threads = [threading.Thread(target=run, args=(i,)) for i in (0, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {0: expected, 20: expected[20:]}


def test_lagging_is_no_reason_to_stop(make_llm: MakeLLM, prompts: Any, expected: Any) -> None:
    with make_llm(max_buffered_tokens=1) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == expected


def test_closed_and_failed(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("x")
    before = threading.active_count()
    with pytest.raises(ModelNotFoundError):
        LLM("no/such/model/anywhere")
    assert threading.active_count() == before
