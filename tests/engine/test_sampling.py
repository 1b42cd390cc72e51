"""Every sampling parameter against its definition: transformers' own processors and generate(),
vLLM's formulas written out; then the same tokens in any company."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
from support.engine_helpers import GREEDY
from transformers import AutoModelForCausalLM

from tinyvllm import AsyncEngine, InvalidParameterError, NotSupportedError, SamplingParams
from tinyvllm.batch import NUM_STAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    MakeEngine = Callable[..., AsyncEngine]
    Adjust = Callable[[list[float], list[int], list[int]], None]

pytestmark = pytest.mark.anyio

INF = float("inf")
EXACT = {"ops": "reference", "dtype": "float32"}
NUM_TOKENS = 24
PROMPT = [(13 * j) % 290 + 3 for j in range(20)]
VOCAB_SIZE = 311


# What a parameter means does not hang on the loop: the other tests here run on all of them.
one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors here are tiny: torch's threads would cost more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def hf_model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def logits_after(hf_model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab_size]"""
    with torch.no_grad():
        return hf_model(torch.tensor([ids])).logits[0]


def greedy(hf_model: Any, adjust: Adjust, num_tokens: int = NUM_TOKENS) -> list[int]:
    """`adjust(logits, prompt, output)` changes the logits in place before each argmax."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = logits_after(hf_model, PROMPT + output)[-1].tolist()
        adjust(logits, PROMPT, output)
        output.append(max(range(len(logits)), key=logits.__getitem__))
    return output


async def ids_of(engine: AsyncEngine, prompt: Any = PROMPT, **sampling: Any) -> list[int]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS} | sampling
    return [token.id async for token in engine.generate(prompt, **sampling)]


def penalize(params: SamplingParams) -> Adjust:
    """vLLM's documentation, word by word."""

    def adjust(logits: list[float], prompt: list[int], output: list[int]) -> None:
        for token_id, bias in (params.logit_bias or {}).items():
            logits[token_id] += bias
        for token_id in {*prompt, *output}:
            x, penalty = logits[token_id], params.repetition_penalty
            logits[token_id] = x / penalty if x > 0 else x * penalty
        for token_id, count in Counter(output).items():
            logits[token_id] -= params.frequency_penalty * count
            logits[token_id] -= params.presence_penalty
        if params.allowed_token_ids is not None:
            for token_id in set(range(len(logits))) - set(params.allowed_token_ids):
                logits[token_id] = -INF

    return adjust


@one_loop
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.8},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": {7: 100.0}},
        {"logit_bias": {7: 6.0, 9: 5.0, 300: -100.0}, "frequency_penalty": 0.7},
        {"logit_bias": {i: 0.01 * i for i in range(0, 300, 3)}, "repetition_penalty": 1.3},
        {"allowed_token_ids": [0, 31, 32, 63, 64, 200, 310]},
        {"allowed_token_ids": [5, 6], "frequency_penalty": 2.0, "logit_bias": {8: 100.0}},
    ],
    ids=str,
)
async def test_as_vllm_documents_it(
    make_engine: MakeEngine, hf_model: Any, sampling: dict[str, Any]
) -> None:
    expected = greedy(hf_model, penalize(SamplingParams(**sampling)))
    async with make_engine(**EXACT) as engine:
        assert await ids_of(engine, **sampling) == expected
        if sampling and sampling.get("repetition_penalty") != 0.8:
            assert expected != await ids_of(engine)


@one_loop
@pytest.mark.parametrize(
    ("sampling", "generate"),
    [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"min_tokens": 9, "ignore_eos": False}, {"min_new_tokens": 9}),
        ({"logit_bias": {7: 5.0, 11: 4.0}}, {"sequence_bias": [[[7], 5.0], [[11], 4.0]]}),
    ],
    ids=str,
)
async def test_as_transformers_generates(
    make_engine: MakeEngine, hf_model: Any, sampling: dict[str, Any], generate: dict[str, Any]
) -> None:
    if "min_new_tokens" in generate:  # a model that wants to stop at once
        sampling = {**sampling, "logit_bias": {2: 100.0}}
        generate = {**generate, "sequence_bias": [[[2], 100.0]]}
    eos = None if sampling.get("ignore_eos", True) else 2
    expected = hf_model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        **generate,
    )[0, len(PROMPT) :].tolist()
    async with make_engine(**EXACT) as engine:
        assert await ids_of(engine, **sampling) == expected
        assert len(expected) == (NUM_TOKENS if eos is None else 10)


@one_loop
async def test_a_model_s_own_repetition_penalty_counts(
    tiny_model_dir: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = path / "generation_config.json"
    own = {**json.loads(config.read_text()), "repetition_penalty": 1.5}
    config.write_text(json.dumps(own))
    async with make_engine() as engine:
        plain = await ids_of(engine)
        expected = await ids_of(engine, repetition_penalty=1.5)
    async with AsyncEngine(path, num_blocks=64, max_num_seqs=4) as engine:
        assert await ids_of(engine) == expected != plain
        assert await ids_of(engine, repetition_penalty=1.0) == plain


# ---- bad_words -----------------------------------------------------------------------------------


def forbid(words: list[list[int]]) -> Adjust:
    """vLLM: the last token of a word is masked where the output ends with the others."""

    def adjust(logits: list[float], prompt: list[int], output: list[int]) -> None:
        for word in words:
            if len(word) <= len(output) + 1 and output[len(output) - len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -INF

    return adjust


@one_loop
async def test_bad_words(make_engine: MakeEngine, hf_model: Any) -> None:
    """Those that would be generated: of one token, of two and of three, spaced and not."""
    async with make_engine(**EXACT) as engine:
        tokenizer = engine.tokenizer
        letters = [ids[0] for c in "BCDEFGHIJKLMNOPQRS" if len(ids := tokenizer.encode(c)) == 1]

        def restrict(words: list[list[int]]) -> Adjust:
            def adjust(logits: list[float], prompt: list[int], output: list[int]) -> None:
                forbid(words)(logits, prompt, output)
                for token_id in set(range(len(logits))) - set(letters):
                    logits[token_id] = -INF

            return adjust

        ids = await ids_of(engine, allowed_token_ids=letters)
        for chosen in (
            [ids[:1]],
            [ids[1:3]],
            [ids[1:4], ids[5:7], ids[8:9], ids[2:4]],
        ):
            words = [tokenizer.decode(word) for word in chosen]
            assert [tokenizer.encode(word) for word in words] == chosen  # no merge among them
            spaced = [tokenizer.encode(" " + word) for word in words]
            spaced = [s for s, c in zip(spaced, chosen, strict=True) if len(s) == len(c)]
            expected = greedy(hf_model, restrict([*chosen, *spaced]))
            assert expected != ids
            assert await ids_of(engine, allowed_token_ids=letters, bad_words=words) == expected
        with pytest.raises(InvalidParameterError, match="bad_words: ' ' has no tokens"):
            await engine.generate("x", bad_words=[" "]).text()


# ---- Log-probabilities ---------------------------------------------------------------------------


def assert_logprobs(entry: Any, raw: torch.Tensor, token_id: int, count: int) -> None:
    logprob, top = entry
    assert logprob == pytest.approx(raw[token_id].item(), abs=2e-5)
    values, ids = raw.topk(count)
    assert list(top.values()) == pytest.approx(values.tolist(), abs=2e-5)
    assert list(top) == ids.tolist()


@one_loop
async def test_logprobs_are_raw_under_every_adjustment(
    make_engine: MakeEngine, hf_model: Any
) -> None:
    async with make_engine(**EXACT) as engine:
        stream = engine.generate(
            PROMPT,
            temperature=0.5,
            seed=1,
            max_tokens=8,
            logprobs=4,
            ignore_eos=True,
            frequency_penalty=1.0,
            logit_bias={7: 50.0},
            allowed_token_ids=range(200),
        )
        tokens = [token async for token in stream]
    ids = [token.id for token in tokens]
    raw = torch.log_softmax(logits_after(hf_model, PROMPT + ids), -1)[len(PROMPT) - 1 :]
    for row, token in zip(raw, tokens, strict=False):
        assert_logprobs((token.logprob, token.top_logprobs), row, token.id, 4)


@one_loop
@pytest.mark.parametrize("length", [1, 2, 17, 100])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 3}, {"num_blocks": 9, "block_size": 16}],
    ids=["whole", "in chunks", "little memory"],
)
async def test_prompt_logprobs(
    make_engine: MakeEngine, hf_model: Any, length: int, overrides: dict[str, Any]
) -> None:
    """Of every token but the first, whatever the cache has of the prompt and however it is cut."""
    prompt = [(17 * j) % 290 + 3 for j in range(length)]
    async with make_engine(**EXACT, **overrides) as engine:
        plain = await ids_of(engine, prompt)  # fills the cache
        beside = engine.generate(PROMPT, GREEDY)
        stream = engine.generate(prompt, GREEDY, max_tokens=NUM_TOKENS, prompt_logprobs=3)
        ids = [token.id async for token in stream]
        assert ids == plain
        assert [token.id async for token in beside] == (await ids_of(engine))[:12]
    assert stream.usage.cached_tokens == 0
    found = stream.prompt_logprobs
    assert found is not None and len(found) == length
    assert found[0] is None
    raw = torch.log_softmax(logits_after(hf_model, prompt), -1)
    for entry, row, token_id in zip(found[1:], raw, prompt[1:], strict=False):
        assert_logprobs(entry, row, token_id, 3)


def test_prompt_logprobs_of_a_blocking_llm(make_llm: Any) -> None:
    with make_llm() as llm:
        (output,) = llm.generate([PROMPT], GREEDY, prompt_logprobs=2)
        assert len(output.prompt_logprobs) == len(PROMPT)
        assert all(len(entry[1]) == 2 for entry in output.prompt_logprobs[1:])
        assert llm.generate([PROMPT], GREEDY)[0].prompt_logprobs is None


async def test_no_prompt_logprobs_unless_asked(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        await stream.text()
        assert stream.prompt_logprobs is None
        stream = engine.generate(PROMPT, GREEDY, prompt_logprobs=0)
        await stream.text()
        assert stream.prompt_logprobs is not None
        assert stream.prompt_logprobs[5] is not None and stream.prompt_logprobs[5][1] == {}


# ---- Structured output ---------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRUCTURES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"regex": "[a-f]{3,9}-(日本|é)"}, lambda t: bool(re.fullmatch("[a-f]{3,9}-(日本|é)", t))),
    ({"json_schema": SCHEMA}, lambda t: set(json.loads(t)) == {"a", "b"}),
    ({"json_schema": json.dumps(SCHEMA)}, lambda t: json.loads(t)["b"] == "x"),
    ({"grammar": 'start: "(" start ")" | "x"'}, lambda t: bool(re.fullmatch(r"\(*x\)*", t))),
]


@pytest.mark.parametrize("async_scheduling", [True, False])
async def test_structured_output(make_engine: MakeEngine, async_scheduling: bool) -> None:
    """Together with plain requests, whose tokens are what they are without."""
    async with make_engine(async_scheduling=async_scheduling, num_blocks=40) as engine:
        alone = await ids_of(engine)
        streams = [
            (engine.generate(prompt, seed=i, max_tokens=200, **structure), check)
            for i, (structure, check) in enumerate(STRUCTURES * 2)
            for prompt in ("Once upon a time", PROMPT)
        ]
        plain = [engine.generate(PROMPT, GREEDY, max_tokens=NUM_TOKENS) for _ in range(3)]
        for stream in plain:
            assert [token.id async for token in stream] == alone
        finished = 0
        for stream, check in streams:
            text = await stream.text()
            if stream.finish_reason == "stop":
                finished += 1
                assert check(text), text
            else:
                assert stream.finish_reason == "length"
        assert finished >= 8
        assert not engine._engine._followed or all(  # type: ignore[union-attr]
            seq.finish_reason
            for seq in engine._engine._followed.values()  # type: ignore[union-attr]
        )


async def test_a_structured_request_is_the_same_in_a_crowd(make_engine: MakeEngine) -> None:
    params = [
        SamplingParams(seed=i, max_tokens=40, **structure)
        for i, (structure, _) in enumerate(STRUCTURES)
    ]
    async with make_engine() as engine:
        alone = [await engine.generate(PROMPT, each).text() for each in params]
    async with make_engine(num_blocks=14, max_num_batched_tokens=16) as engine:
        engine.pause()  # all at once, whoever is slow: blocks for so many there are not
        streams = [engine.generate(PROMPT, each) for each in params * 3]
        for _ in iter(lambda: engine.stats().num_waiting, len(streams)):
            await anyio.sleep(0.001)
        engine.resume()
        assert [await stream.text() for stream in streams] == alone * 3
        assert engine.stats().num_preemptions > 0


@dataclass
class Launched:
    """What is known of a step when it has been launched."""

    num_seqs: int
    num_in_flight: int
    """Before it."""
    is_drawn: bool


def record_launches(engine: AsyncEngine) -> list[Launched]:
    """Of the steps from now on."""
    core = engine._engine
    assert core is not None
    launch, found = core._runner.launch, []

    def recorded(batch: Any) -> Any:
        num_in_flight = len(core._in_flight)
        step: Any = launch(batch)
        is_drawn = getattr(step, "_drawing", step) is not None
        found.append(Launched(batch.num_seqs, num_in_flight, is_drawn))
        return step

    core._runner.launch = recorded  # type: ignore[method-assign]
    return found


@one_loop
@pytest.mark.parametrize(
    ("sampling", "draws_late"),
    [
        ({}, False),
        ({"presence_penalty": 1.0, "logprobs": 5}, False),
        ({"logit_bias": {7: 1.0}, "min_tokens": 9, "ignore_eos": False}, False),
        ({"allowed_token_ids": range(50, 90), "logprobs": 0}, False),
        ({"regex": "[a-z]{400}", "ignore_eos": False}, True),
        ({"bad_words": ["abc"]}, True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
async def test_every_request_has_a_token_each_step_and_none_waits(
    make_engine: MakeEngine, sampling: dict[str, Any], draws_late: bool
) -> None:
    """Steps run ahead: of one whose mask needs the token before, the forward pass does."""
    async with make_engine(device="cpu") as engine:
        await ids_of(engine)
        engine.pause()
        launched = record_launches(engine)
        plain = engine.generate(PROMPT, GREEDY, max_tokens=NUM_TOKENS)
        special = {"temperature": 0.7, "seed": 3, "ignore_eos": True, "max_tokens": NUM_TOKENS}
        stream = engine.generate(PROMPT, **{**special, **sampling})
        for _ in iter(lambda: engine.stats().num_waiting, 2):  # by the tokenizer's thread
            await anyio.sleep(0.001)
        engine.resume()
        assert [len([t async for t in each]) for each in (plain, stream)] == [NUM_TOKENS] * 2
    assert [step.num_seqs for step in launched] == [2] * NUM_TOKENS
    # On a CPU the prompts' step and the first of the decodes are waited for.
    assert [step.num_in_flight for step in launched] == [0] * 3 + [1] * (NUM_TOKENS - 3)
    late = [False] * 3 + [draws_late] * (NUM_TOKENS - 3)
    assert [not step.is_drawn for step in launched] == late


async def test_a_grammar_that_cannot_be_used_ends_its_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine() as engine:
        for sampling, match in [
            ({"json_schema": {"type": "objekt"}}, "^json_schema cannot be used: Invalid type"),
            ({"regex": "("}, "^regex cannot be used"),
            ({"grammar": "start: foo"}, "^grammar cannot be used: .*unknown name"),
        ]:
            for prompt in ("x", PROMPT):
                with pytest.raises(InvalidParameterError, match=match):
                    await engine.generate(prompt, **sampling).text()
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(NotSupportedError, match="pip install llguidance"):
            await engine.generate("x", regex="b").text()
        assert len(await ids_of(engine)) == NUM_TOKENS


async def test_a_grammar_with_no_token_left_ends_its_request_alone(
    make_engine: MakeEngine,
) -> None:
    async with make_engine() as engine:
        tokenizer = engine.tokenizer
        (a_id,), (b_id,) = tokenizer.encode("a"), tokenizer.encode("b")
        # At once, and after the first token.
        for allowed, regex in (([b_id], "a+"), ([a_id], "ab")):
            stream = engine.generate(PROMPT, regex=regex, allowed_token_ids=allowed)
            with pytest.raises(InvalidParameterError, match="leave no token to draw"):
                await stream.text()
            assert stream.finish_reason == "error"
        assert len(await ids_of(engine)) == NUM_TOKENS


async def test_a_grammar_goes_before_min_tokens(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, regex="a{4}", min_tokens=50, max_tokens=60)
        assert await stream.text() == "aaaa"
        assert stream.finish_reason == "stop"


# ---- In company ----------------------------------------------------------------------------------

EVERYTHING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"logit_bias": {7: 3.0, 9: 3.0, 11: -100.0}},
    {"logit_bias": dict.fromkeys(range(100), -5.0), "presence_penalty": 1.0},
    {"allowed_token_ids": range(40, 90)},
    {"bad_words": ["the", "a", " on"]},
    {"min_tokens": 7, "ignore_eos": False, "logit_bias": {2: 8.0}},
    {"logprobs": 2, "frequency_penalty": 0.5},
    {"prompt_logprobs": 1, "repetition_penalty": 1.1},
    {"regex": "[a-z ]{5,30}", "ignore_eos": False},
]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="crowd"),
        pytest.param({"max_num_batched_tokens": 17, "max_num_seqs": 7}, id="chunked"),
        pytest.param({"num_blocks": 14, "enable_prefix_caching": False}, id="preempted"),
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param({"async_scheduling": False}, id="waiting"),
        pytest.param({"max_num_seqs": 2}, id="two slots"),
    ],
)
async def test_the_same_tokens_in_any_company(
    make_engine: MakeEngine, overrides: dict[str, Any]
) -> None:
    """Slots change hands, sequences lose them and come back: nobody gets another's state."""
    requests = [
        (prompt, {"temperature": 0.8, "seed": 5, "max_tokens": 20, "ignore_eos": True, **each})
        for each in EVERYTHING
        for prompt in (PROMPT, PROMPT[:3])
    ]
    async with make_engine() as engine:
        alone = [[t.id async for t in engine.generate(p, **s)] for p, s in requests]
    async with make_engine(**overrides) as engine:
        for order in (requests, requests[::-1]):
            engine.pause()
            streams = [engine.generate(p, **s) for p, s in order]
            for _ in iter(lambda: engine.stats().num_waiting, len(streams)):
                await anyio.sleep(0.001)
            engine.resume()
            results = [[token.id async for token in stream] for stream in streams]
            assert results == (alone if order is requests else alone[::-1])
        if overrides.get("num_blocks"):
            assert engine.stats().num_preemptions > 0


async def test_choices_have_their_own_counts(make_engine: MakeEngine) -> None:
    """Choice i has the tokens of a request with seed + i."""
    sampling = {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
    async with make_engine() as engine:
        apart = [await ids_of(engine, seed=40 + i, **sampling) for i in range(3)]
        together: list[list[int]] = [[], [], []]
        stream = engine.generate(
            PROMPT, n=3, seed=40, ignore_eos=True, max_tokens=NUM_TOKENS, **sampling
        )
        async for token in stream:
            together[token.choice].append(token.id)
    assert together == apart
    assert len({tuple(ids) for ids in apart}) == 3


async def test_readers_that_leave_disturb_nobody_s_state(make_engine: MakeEngine) -> None:
    """15 tasks, slots and blocks for a few: a third leaves midway, some ask for the impossible."""
    wanted = [
        *({"max_tokens": 20, "ignore_eos": True, **each} for each in EVERYTHING),
        {"json_schema": {"type": "object"}, "max_tokens": 20},
        {"n": 3, "frequency_penalty": 1.0, "max_tokens": 20},
        {"regex": "(", "max_tokens": 20},
        {"regex": "ab", "allowed_token_ids": [70], "max_tokens": 20},
    ]
    rng = random.Random(4)

    async def read(engine: AsyncEngine, which: int, num_tokens: int) -> Any:
        stream = engine.generate(PROMPT, temperature=0.8, seed=5, **wanted[which])
        read: list[list[int]] = [[] for _ in range(wanted[which].get("n", 1))]
        try:
            async for token in stream:
                read[token.choice].append(token.id)
                num_tokens -= 1
                if not num_tokens:
                    break
        except InvalidParameterError as error:
            return str(error)
        return read

    async with make_engine() as engine:
        alone = [await read(engine, which, -1) for which in range(len(wanted))]
    async with make_engine(num_blocks=6, max_num_seqs=6, max_num_batched_tokens=24) as engine:

        async def work() -> None:
            for _ in range(12):
                which = rng.randrange(len(wanted))
                leaves_after = rng.choice([-1, -1, rng.randrange(1, 15)])
                found = await read(engine, which, leaves_after)
                assert leaves_after > 0 or found == alone[which]

        async with anyio.create_task_group() as tasks:
            for _ in range(15):
                tasks.start_soon(work)
        assert engine.stats().num_preemptions > 0
        assert len(await ids_of(engine)) == NUM_TOKENS


@one_loop
async def test_choices_share_the_prompt_s_logprobs(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        alone = engine.generate(PROMPT, GREEDY, prompt_logprobs=2)
        await alone.text()
        stream = engine.generate(PROMPT, n=3, seed=1, max_tokens=5, prompt_logprobs=2)
        tokens = [token async for token in stream]
        assert {token.choice for token in tokens} == {0, 1, 2}
        assert stream.prompt_logprobs == alone.prompt_logprobs


@one_loop
async def test_choices_follow_a_grammar_each_by_itself(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        sampling = {"regex": "[a-z]{8}", "max_tokens": 20, "temperature": 2.0}
        apart = [await engine.generate(PROMPT, seed=1 + i, **sampling).text() for i in range(3)]
        texts = ["", "", ""]
        async for token in engine.generate(PROMPT, n=3, seed=1, **sampling):
            texts[token.choice] += token
        assert texts == apart
        assert len(set(texts)) > 1


@one_loop
async def test_json_from_the_real_model(smollm2_dir: Path) -> None:
    """With a vocabulary of 49,152, a schema as users write them, several at once."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "hobbies": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
    }
    messages = [{"role": "user", "content": "Describe a person named Ada as JSON."}]
    async with AsyncEngine(smollm2_dir, num_blocks=256, max_num_seqs=8) as engine:
        streams = [
            engine.chat(messages, json_schema=schema, temperature=t, seed=i, max_tokens=150)
            for i, t in enumerate((0.0, 0.7, 1.0))
        ]
        finished = 0
        for stream in streams:
            text = await stream.text()
            if stream.finish_reason == "stop":
                value = json.loads(text)
                assert set(value) == {"name", "age", "hobbies"} and 0 <= value["age"] <= 120
                finished += 1
        assert finished


@pytest.mark.parametrize(
    "sampling",
    [{"stop_token_ids": [311]}, {"logit_bias": {400: 1.0}}, {"allowed_token_ids": [5, 311]}],
    ids=str,
)
async def test_ids_that_the_model_does_not_have(
    make_engine: MakeEngine, sampling: dict[str, Any]
) -> None:
    async with make_engine() as engine:
        (name,) = sampling
        with pytest.raises(InvalidParameterError, match=rf"^{name} has the token id \d+; .*311\)"):
            engine.generate(PROMPT, **sampling)


async def test_others_pay_nothing(make_engine: MakeEngine) -> None:
    """No state of slots before a request asks, no counts before one has penalties."""
    async with make_engine() as engine:
        runner = engine._engine._runner  # type: ignore[union-attr]
        await ids_of(engine)
        assert runner._slot_logits is None
        await ids_of(engine, logprobs=1, prompt_logprobs=2)
        assert not runner._slot_logits._tables
        await ids_of(engine, logit_bias={3: 1.0})
        assert not runner._slot_logits._has_counts
        assert runner._slot_logits._counts.untyped_storage().nbytes() == 4 * VOCAB_SIZE
        await ids_of(engine, presence_penalty=1.0)
        assert runner._slot_logits._has_counts


@one_loop
async def test_nothing_is_allocated_for_the_next_requests(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first ones needed serves all that follow."""
    async with make_engine(device="cpu") as engine:
        runner = engine._engine._runner  # type: ignore[union-attr]

        async def run_all() -> None:
            for sampling in EVERYTHING:
                await ids_of(engine, temperature=0.8, **{"ignore_eos": True, **sampling})

        await run_all()
        monkeypatch.setattr("tinyvllm.slot_logits.Mirror.__init__", None)
        monkeypatch.setattr("tinyvllm.slot_logits.SlotLogits._zeros", None)
        await run_all()
        # One sequence, with a draw or without; three kinds of draw, each with every stage's memory.
        assert len(runner._graphs) == 2 and len(runner._draw_graphs) <= 3 * NUM_STAGES


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("enforce_eager", [False, True])
async def test_on_a_gpu(make_engine: MakeEngine, enforce_eager: bool) -> None:
    """What does not hang on rounding: what masks leave, what a bias forces, what counts forbid."""
    async with make_engine(device="cuda", enforce_eager=enforce_eager) as engine:
        plain = engine.generate(PROMPT, GREEDY, max_tokens=60)
        sampling = {"seed": 3, "max_tokens": 30, "ignore_eos": True}
        streams = {
            "allowed": engine.generate(PROMPT, allowed_token_ids=range(40, 90), **sampling),
            "bias": engine.generate(PROMPT, logit_bias={7: 100.0}, **sampling),
            # Six tokens far above the others, and 2 off for each time: they take turns.
            "counts": engine.generate(
                PROMPT,
                temperature=0.0,
                logit_bias=dict.fromkeys(range(50, 56), 90.0),
                frequency_penalty=2.0,
                repetition_penalty=1.0,
                max_tokens=60,
                ignore_eos=True,
            ),
            "stop": engine.generate(PROMPT, logit_bias={2: 100.0}, min_tokens=9, seed=1),
            "regex": engine.generate(PROMPT, regex="[a-f]{4,9}x", seed=1, max_tokens=40),
            "logprobs": engine.generate(PROMPT, logprobs=3, prompt_logprobs=2, **sampling),
        }
        tokens = {name: [token async for token in stream] for name, stream in streams.items()}
        ids = {name: [token.id for token in each] for name, each in tokens.items()}
        assert set(ids["allowed"]) <= set(range(40, 90))
        assert set(ids["bias"]) == {7}
        assert set(ids["counts"]) <= set(range(50, 56)) and len(set(ids["counts"])) > 2
        assert len(ids["stop"]) == 10 and ids["stop"][9] == 2 and 2 not in ids["stop"][:9]
        assert re.fullmatch("[a-f]{4,9}x", "".join(tokens["regex"]))
        for token in tokens["logprobs"]:
            assert token.logprob is not None and token.top_logprobs is not None
            assert token.logprob <= max(token.top_logprobs.values()) <= 0
        found = streams["logprobs"].prompt_logprobs
        assert found is not None and len(found) == len(PROMPT)
        assert len([token async for token in plain]) == 60
