"""Whole models on a GPU: against transformers, in any company, long, many, and under pressure.

The rest of tests/engine runs on the GPU too where there is one: it is the default device.
"""

from __future__ import annotations

import gc
import json
import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, make_tiny_model

from tinyvllm import _C, LLM, AsyncEngine, ConfigError, NotSupportedError, SamplingParams
from tinyvllm.cuda_steps import CudaSteps

if TYPE_CHECKING:
    from pathlib import Path

    from tinyvllm import RequestOutput

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


@pytest.fixture(scope="session")
def llama_1b_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in the shape of Llama-3.2-1B."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama-1b", **LLAMA_1B)


@pytest.fixture(scope="session")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of that, for 128k tokens."""
    values: dict[str, Any] = {**LLAMA_1B, "num_hidden_layers": 2, "vocab_size": 311}
    return make_tiny_model(tmp_path_factory.mktemp("models") / "long", **values)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


def random_prompts(count: int, low: int, high: int, vocab: int = 308) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


def check_greedy(model_dir: Path, outputs: list[RequestOutput]) -> None:
    """Every token is transformers' first choice after the same tokens, or a tie.

    A tie: in float32 the first choice leads by at most four times what bfloat16 moves transformers'
    own logits (each of the two may be off by twice that, by the rule for whole models).
    """
    transformers = pytest.importorskip("transformers")
    leads, errors, num_ties, num_tokens = [], [], 0, 0

    def load(dtype: torch.dtype) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        return model.to("cuda").eval()

    def last_logits(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
        """In chunks: in float32 the scores of all heads lie in memory."""
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            for chunk in ids[:, :-count].split(512, dim=1):
                model(chunk, past_key_values=cache, logits_to_keep=1)
            return model(ids[:, -count:], past_key_values=cache).logits[0].float()

    exact, rounded = load(torch.float32), load(torch.bfloat16)
    for output in outputs:
        count = len(output.token_ids)
        ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]], device="cuda")
        want, low = last_logits(exact, ids, count), last_logits(rounded, ids, count)
        errors.append((low - want).abs().max().item())
        drawn = torch.tensor(output.token_ids, device="cuda")
        lead = want.max(dim=-1).values - want.gather(1, drawn[:, None])[:, 0]
        leads.append(lead.max().item())
        num_ties += int((lead > 0).sum())
        num_tokens += count
    del exact, rounded
    torch._C._cuda_clearCublasWorkspaces()  # transformers' products
    torch.cuda.empty_cache()
    print(
        f"{num_ties} of {num_tokens} tokens are not the first choice of float32; the farthest is "
        f"{max(leads):.4f} behind it, and bfloat16 moves transformers' logits by {max(errors):.4f}"
    )
    assert max(leads) <= 4 * max(errors)


def test_greedy_tokens_of_the_1b_shape(llama_1b_dir: Path) -> None:
    prompts = random_prompts(24, 5, 700, vocab=128000)
    with LLM(llama_1b_dir, device="cuda") as llm:
        outputs = llm.generate(prompts, greedy(24))
    check_greedy(llama_1b_dir, outputs)


def test_greedy_tokens_of_the_real_model(smollm2_dir: Path) -> None:
    texts = ["The capital of France is", "def fib(n):\n", "Es war einmal", "1, 1, 2, 3, 5, 8,"] * 6
    with LLM(smollm2_dir, device="cuda") as llm:
        outputs = llm.generate(texts, greedy(48))
    check_greedy(smollm2_dir, outputs)


def test_how_many_outputs_change_with_their_company(llama_1b_dir: Path) -> None:
    """With at most 16 tokens a step one kernel runs every linear, and no bit may change. Larger
    steps take the tiled kernel, which sums in another order: counted, and excused as ties only."""
    prompts = random_prompts(200, 5, 60, vocab=128000)
    small = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "num_blocks": 2000}
    with LLM(llama_1b_dir, device="cuda", enable_prefix_caching=False, **small) as llm:
        alone = [llm.generate(prompt, greedy(16))[0].token_ids for prompt in prompts[:40]]
        crowd = [output.token_ids for output in llm.generate(prompts, greedy(16))]
    assert crowd[:40] == alone
    with LLM(llama_1b_dir, device="cuda", enable_prefix_caching=False, num_blocks=2000) as llm:
        large = llm.generate(prompts, greedy(16))
    changed = sum(a != b.token_ids for a, b in zip(crowd, large, strict=True))
    print(f"{changed} of 200 outputs change between steps of 16 and of up to 8192 tokens (linear)")
    check_greedy(llama_1b_dir, large[:50])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    architecture, overrides = ARCHITECTURES[name]
    model_dir = make_tiny_model(tmp_path / name, architecture, **overrides)
    if overrides.get("head_dim", 64) not in (64, 128):
        with pytest.raises(NotSupportedError, match="head_dim 32"):
            LLM(model_dir, device="cuda")
        return
    prompts = random_prompts(20, 1, 90)
    with LLM(model_dir, device="cuda", num_blocks=500, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, greedy(24))
        outputs += [llm.generate([prompt], greedy(24))[0] for prompt in prompts]
    check_greedy(model_dir, outputs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_tokens", [16_384, 131_000])
def test_long_contexts(long_dir: Path, num_tokens: int) -> None:
    prompt = random_prompts(1, num_tokens, num_tokens)[0]
    with LLM(long_dir, device="cuda", max_num_seqs=8, num_blocks=9000) as llm:
        manager = llm._engine._engine._scheduler.block_manager  # type: ignore[union-attr]
        random.Random(1).shuffle(manager._free)
        outputs = llm.generate([prompt], greedy(4))
    check_greedy(long_dir, outputs)


def test_512_sequences_at_once(tiny_model_dir: Path) -> None:
    prompts = random_prompts(512, 1, 90)
    with LLM(tiny_model_dir, device="cuda", max_num_seqs=512, num_blocks=5000) as llm:
        outputs = llm.generate(prompts, greedy(40))
        stats = llm._engine.stats()
    assert [len(output.token_ids) for output in outputs] == [40] * 512
    assert stats.num_free_blocks == stats.num_blocks
    check_greedy(tiny_model_dir, outputs[::8])


@pytest.mark.timeout(300)
@pytest.mark.anyio
async def test_ten_thousand_steps_under_pressure(tiny_model_dir: Path) -> None:
    """Arrivals, cancels and preemptions in a pool far too small: every whole answer is that of an
    unloaded run, bit for bit (steps of at most 16 tokens)."""
    import anyio

    rng = random.Random(2)
    small = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "device": "cuda"}
    prompts = random_prompts(60, 1, 120)
    with LLM(tiny_model_dir, num_blocks=1000, **small) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, greedy(60))]
    async with AsyncEngine(tiny_model_dir, num_blocks=40, **small) as engine:

        async def client() -> None:
            while engine.stats().num_steps < 10_000:
                which, take = rng.randrange(60), rng.choice((rng.randrange(1, 60), 60))
                stream = engine.generate(prompts[which], greedy(60), priority=rng.randrange(3))
                got = []
                async for token in stream:
                    got.append(token.id)
                    if len(got) == take:
                        break
                assert got == expected[which][: len(got)] and len(got) == take

        async with anyio.create_task_group() as tasks:
            for _ in range(32):
                tasks.start_soon(client)
        stats = engine.stats()
        assert stats.num_preemptions > 100
        print(f"{stats.num_steps} steps, {stats.num_preemptions} preemptions")


def test_engines_that_start_at_once(tiny_model_dir: Path) -> None:
    """On one GPU: each captures its graphs while others load, run and close."""
    prompts = random_prompts(20, 1, 90)
    sizes = {"num_blocks": 500, "max_num_seqs": 16, "max_num_batched_tokens": 16}
    with LLM(tiny_model_dir, device="cuda", **sizes) as llm:
        want = [output.token_ids for output in llm.generate(prompts, greedy(40))]
    found: list[list[list[int]]] = []

    def run() -> None:
        for _ in range(4):
            with LLM(tiny_model_dir, device="cuda", **sizes) as llm:
                outputs = llm.generate(prompts, greedy(40))
                found.append([output.token_ids for output in outputs])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want] * 16


def test_a_start_that_fails_while_it_captures(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the garbage collector, however long the error is kept."""
    before, num_calls = torch.cuda.memory_allocated(), 0
    capture = CudaSteps._capture

    def fail_late(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            raise RuntimeError("injected")
        return capture(*args, **kwargs)

    monkeypatch.setattr(CudaSteps, "_capture", fail_late)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="injected") as caught:
            LLM(tiny_model_dir, device="cuda", num_blocks=500)
        left = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    assert left == 0, caught.value
    monkeypatch.undo()
    with LLM(tiny_model_dir, device="cuda", num_blocks=500) as llm:
        assert len(llm.generate([[5, 6]], greedy(4))[0].token_ids) == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_at_once(tiny_model_dir: Path) -> None:
    """Engines side by side in one process, each with its memory on its own GPU."""
    prompts = random_prompts(20, 1, 90)
    sizes = {"num_blocks": 500, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    before = [torch.cuda.memory_allocated(i) for i in range(2)]
    with LLM(tiny_model_dir, device="cuda:1", **sizes) as second:
        assert torch.cuda.memory_allocated(0) == before[0]
        assert torch.cuda.memory_allocated(1) > before[1]
        with LLM(tiny_model_dir, device="cuda:0", **sizes) as first:
            found: dict[str, list[list[int]]] = {}

            def generate(name: str, llm: LLM) -> None:
                outputs = llm.generate(prompts, greedy(60))
                found[name] = [output.token_ids for output in outputs]

            threads = [
                threading.Thread(target=generate, args=each)
                for each in (("first", first), ("second", second))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert found["first"] == found["second"]
    assert [torch.cuda.memory_allocated(i) for i in range(2)] == before


@pytest.mark.parametrize("num_streams", [1, 8])
def test_json_beside_plain_requests_on_the_real_model(smollm2_dir: Path, num_streams: int) -> None:
    """A step's mask is made while its forward pass runs; the others get what they get alone."""
    json_schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    texts = [f"{i}. The capital of France is" for i in range(num_streams)]
    structured = SamplingParams(temperature=0.0, max_tokens=120, json_schema=json_schema)
    params = [greedy(100)] * num_streams
    small = {"num_blocks": 500, "max_num_seqs": 16, "max_num_batched_tokens": 16}
    with LLM(smollm2_dir, device="cuda", **small) as llm:
        alone = [output.token_ids for output in llm.generate(texts, params)]
        begin = time.perf_counter()
        *plain, answer = llm.generate([*texts, "A person as JSON: "], [*params, structured])
        seconds = time.perf_counter() - begin
    assert [output.token_ids for output in plain] == alone
    assert answer.finish_reason == "stop" and set(json.loads(answer.text)) == {"name", "age"}
    num_tokens = sum(len(output.token_ids) for output in (*plain, answer))
    print(f"{num_streams} streams and one of JSON: {num_tokens / seconds:,.0f} tok/s")


def test_a_gpu_that_is_not_there(tiny_model_dir: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"cuda:99.* usable GPUs are here"):
        LLM(tiny_model_dir, device="cuda:99")


def test_a_pool_that_does_not_fit(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks .* needs .* GiB are free"):
        LLM(tiny_model_dir, device="cuda", num_blocks=10**9)


def test_a_steady_engine_allocates_nothing(tiny_model_dir: Path) -> None:
    """Prompts, decode, new blocks, preemptions, draws of every plain kind: no allocation, not even
    from torch's own pool. Special rows get their state at the first request that asks for it."""
    prompts = random_prompts(40, 1, 90)
    drawn = [
        SamplingParams(temperature=0.8, top_k=20 * (i % 2), seed=i, max_tokens=40, ignore_eos=True)
        for i in range(40)
    ]
    special = [
        replace(params, presence_penalty=0.5, logprobs=3, logit_bias={5: 1.0}) for params in drawn
    ]

    def num_allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    sizes = {"num_blocks": 60, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with LLM(tiny_model_dir, device="cuda", **sizes) as llm:
        for kind in (drawn, special):
            llm.generate(prompts, kind)
            before = num_allocations()
            llm.generate(prompts, kind)
            assert num_allocations() == before
        assert llm._engine.stats().num_preemptions > 0


def test_every_byte_comes_back(tiny_model_dir: Path) -> None:
    """Weights, pool, graphs and workspaces, over engines that follow each other."""
    free = []
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        with LLM(tiny_model_dir, device="cuda", num_blocks=2000) as llm:
            llm.generate(random_prompts(4, 5, 50), greedy(8))
        assert torch.cuda.memory_allocated() == before
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1] - 2**20, free
