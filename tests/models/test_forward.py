"""The forward pass against transformers, and against itself however the tokens are fed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from support.forward import PagedRunner
from support.tiny_models import ARCHITECTURES, LLAMA3_ROPE, make_tiny_model
from transformers import AutoModelForCausalLM

from tinyvllm.loader import load_config, load_model
from tinyvllm.models import Transformer, rope_cos_sin
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from pathlib import Path

    from tinyvllm.ops import Ops

LENGTH = 70  # past four blocks of 16, past every window and past llama3's original context


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = ARCHITECTURES[request.param]
    path = tmp_path_factory.mktemp("tiny") / request.param
    return make_tiny_model(path, architecture, **overrides)


def load_ours(path: Path, dtype: torch.dtype, ops: Ops | None = None) -> Transformer:
    return load_model(
        path,
        load_config(path),
        ops or get_ops("reference"),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=512,
    )


def load_theirs(path: Path, dtype: torch.dtype) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def random_ids(vocab_size: int, length: int = LENGTH, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def their_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].double()


def our_logits(model: Transformer, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    return PagedRunner(model, max_len=len(ids), dtype=dtype).run({0: ids})[0].double()


def test_fp32_logits_are_as_exact_as_transformers(tiny: Path) -> None:
    """Truth is transformers in fp64; our fp32 error may be twice its own."""
    ids = random_ids(load_config(tiny).vocab_size)
    truth = their_logits(load_theirs(tiny, torch.float64), ids)
    theirs = their_logits(load_theirs(tiny, torch.float32), ids)
    ours = our_logits(load_ours(tiny, torch.float32), ids, torch.float32)
    assert truth.std() > 1.0  # the comparison means something
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


@pytest.mark.parametrize("ops", ["reference", "native"])
def test_bf16_logits_are_within_twice_transformers_error(
    tiny: Path, ops: Literal["reference", "native"]
) -> None:
    ids = random_ids(load_config(tiny).vocab_size)
    truth = their_logits(load_theirs(tiny, torch.float32), ids)
    theirs = their_logits(load_theirs(tiny, torch.bfloat16), ids)
    ours = our_logits(load_ours(tiny, torch.bfloat16, get_ops(ops)), ids, torch.bfloat16)
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()
    assert (ours - truth).square().mean() <= 4 * (theirs - truth).square().mean()


def greedy(model: Transformer, prompt: list[int], num_tokens: int) -> list[int]:
    runner = PagedRunner(model, max_len=len(prompt) + num_tokens)
    ids, chunk = [], prompt
    for _ in range(num_tokens):
        chunk = [int(runner.run({0: chunk})[0][-1].argmax())]
        ids += chunk
    return ids


def test_greedy_tokens_equal_transformers(tiny: Path) -> None:
    prompt = random_ids(load_config(tiny).vocab_size, length=19)
    theirs = load_theirs(tiny, torch.float32).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours = greedy(load_ours(tiny, torch.float32), prompt, 24)
    assert ours == theirs[0, len(prompt) :].tolist()


def test_chunks_and_single_tokens_equal_the_whole_prompt_bit_for_bit(tiny: Path) -> None:
    model = load_ours(tiny, torch.float32)
    ids = random_ids(model.config.vocab_size)
    whole = PagedRunner(model, max_len=LENGTH).run({0: ids})[0]
    assert not whole.isnan().any()
    for cuts in ([1, 16, 17, 33], [15, 48], list(range(1, LENGTH))):
        runner = PagedRunner(model, max_len=LENGTH)
        bounds = [0, *cuts, LENGTH]
        parts = [runner.run({0: ids[begin:end]})[0] for begin, end in itertools.pairwise(bounds)]
        assert torch.equal(torch.cat(parts), whole), cuts


def test_company_changes_no_bit(tiny: Path) -> None:
    """Three sequences in mixed steps (decode beside prefill) equal each of them alone."""
    model = load_ours(tiny, torch.float32)
    prompts = [random_ids(model.config.vocab_size, n, seed=n) for n in (16, 33, 5)]
    alone = [PagedRunner(model, max_len=40).run({0: prompt})[0] for prompt in prompts]
    runner = PagedRunner(model, max_len=40, num_seqs=3, block_size=32)
    steps = [
        {0: prompts[0][:15]},
        {0: prompts[0][15:], 1: prompts[1][:20]},
        {1: prompts[1][20:21], 2: prompts[2]},
        {1: prompts[1][21:]},
    ]
    together: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        for seq, logits in zip(step, runner.run(step), strict=True):
            together[seq].append(logits)
    for seq, logits in enumerate(alone):
        assert torch.equal(torch.cat(together[seq]), logits)


def test_only_the_wanted_rows_reach_the_head(tmp_path: Path) -> None:
    model = load_ours(make_tiny_model(tmp_path / "m"), torch.float32)
    ids = random_ids(model.config.vocab_size, 20)
    whole = PagedRunner(model, max_len=20).run({0: ids})[0]
    num_rows: list[int] = []

    class CountingOps:
        def __getattr__(self, name: str) -> Any:
            op = getattr(get_ops("reference"), name)

            def counted(out: torch.Tensor, *args: Any) -> None:
                num_rows.append(len(out))
                op(out, *args)

            return counted if "linear" in name else op

    counting = Transformer(model.config, CountingOps(), model.weights)
    logits = PagedRunner(counting, max_len=20).run_rows({0: ids}, [19, 3])
    assert torch.equal(logits, whole[[19, 3]])
    assert num_rows == [20] * (4 * model.config.num_layers) + [2]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        ("LlamaForCausalLM", {"rope_scaling": LLAMA3_ROPE}),
        ("Qwen3ForCausalLM", {"head_dim": 128, "rope_theta": 1e6}),
    ],
)
def test_rotary_table_equals_transformers_bit_for_bit(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    path = make_tiny_model(tmp_path / "m", architecture, **overrides)
    config = load_config(path)
    rotary = load_theirs(path, torch.float32).model.rotary_emb
    cos, sin = rotary(torch.empty(0), torch.arange(512)[None])
    half = config.head_dim // 2
    table = rope_cos_sin(config.rope, config.head_dim, 512)
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])
