"""SmolLM2-135M-Instruct, the default model, against transformers in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.forward import PagedRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinyvllm.loader import load_config, load_model
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from pathlib import Path

    from tinyvllm.models import Transformer
    from tinyvllm.ops import Ops

# At each of their tokens the best two logits are at least 0.01 apart: a hundred times the rounding
# error of fp32, in which two machines' matrix products may well differ.
PROMPTS = [
    "Once upon a time",
    "def fibonacci(n):\n",
    "In 1969, two astronauts",
    "1, 2, 3, 4,",
    "Q: Why is the sky blue?\nA:",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir, padding_side="left")


@pytest.fixture(scope="module")
def theirs(smollm2_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()


def load_ours(path: Path, ops: Ops, dtype: torch.dtype) -> Transformer:
    config, device = load_config(path), torch.device("cpu")
    return load_model(path, config, ops, dtype=dtype, device=device, max_model_len=512)


def test_greedy_tokens_equal_transformers(smollm2_dir: Path, tokenizer: Any, theirs: Any) -> None:
    """transformers generates; ours, fed the same text, must choose every one of its tokens.

    As feeding whole or token by token gives the same bits (test_forward.py), that is what ours
    generates, too. tests/engine does 20 prompts x 128 tokens through the engine.
    """
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    outputs = theirs.generate(
        **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    model = load_ours(smollm2_dir, get_ops("reference"), torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        prompt_ids, expected = tokenizer(prompt)["input_ids"], output[-NUM_TOKENS:].tolist()
        ids = prompt_ids + expected[:-1]
        rows = list(range(len(prompt_ids) - 1, len(ids)))
        logits = PagedRunner(model, max_len=len(ids)).run_rows({0: ids}, rows)
        assert logits.argmax(-1).tolist() == expected, prompt


def test_logits_are_within_twice_transformers_error(
    smollm2_dir: Path, tokenizer: Any, theirs: Any
) -> None:
    ids = tokenizer(" ".join(PROMPTS))["input_ids"]

    def run(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].double()

    truth = run(theirs)
    lowered = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16).eval()
    their_error = run(lowered) - truth
    ours = load_ours(smollm2_dir, get_ops("native"), torch.bfloat16)
    logits = PagedRunner(ours, max_len=len(ids), dtype=torch.bfloat16).run({0: ids})[0]
    our_error = logits.double() - truth
    assert our_error.abs().max() <= 2 * their_error.abs().max()
    assert our_error.square().mean() <= 4 * their_error.square().mean()
