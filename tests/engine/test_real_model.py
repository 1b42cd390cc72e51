"""SmolLM2-135M-Instruct: 20 prompts x 128 greedy tokens equal transformers', in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine_helpers import GREEDY

from tinyvllm import LLM, AsyncEngine, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 128
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n",
    "Explain in simple words why the sky is blue.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are:",
    "Q: What is the largest planet of the solar system?\nA:",
    "Ingredients: two eggs, flour, milk.\n\nMethod:",
    "In 1969, the first human",
    "SELECT name, COUNT(*) FROM",
    "Es war einmal ein kleines Mädchen,",
    "Les trois mousquetaires sont",
    "El perro corre por",
    "import numpy as np\n\ndef softmax(x):",
    "A haiku about autumn:\n",
    "The following is a list of common English idioms and what they mean.\n1.",
    "<html>\n<head>\n<title>",
    "日本の首都は",
    "Water boils at",
]


def transformers_greedy(
    model_dir: Path, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy ids in float32 of the left-padded batch, and at each step by how much the first
    choice leads the second."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack([torch.topk(step, 2).values for step in out.logits])  # [steps, prompts, 2]
    leads = (top[..., 0] - top[..., 1]).T.tolist()
    return out.sequences[:, longest:].tolist(), leads


# float32 logits of this model (magnitude 40, 576-long dot products, 30 layers) differ between two
# orders of summation by about 1e-4. Two candidates nearer than this are a tie: either may be drawn.
TIE = 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_float32_equals_transformers(smollm2_dir: Path) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    with LLM(smollm2_dir, ops="reference", dtype="float32", num_blocks=256) as llm:
        outputs = llm.generate(PROMPTS, params)
    prompts = [output.prompt_token_ids for output in outputs]
    wanted, leads = transformers_greedy(smollm2_dir, prompts)
    for text, output, want, lead in zip(PROMPTS, outputs, wanted, leads, strict=True):
        if output.token_ids != want:
            at = next(i for i in range(NUM_TOKENS) if output.token_ids[i] != want[i])
            assert lead[at] < TIE, f"{text!r}: token {at} differs, lead {lead[at]}"


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_real_chat_streams(smollm2_dir: Path) -> None:
    async with AsyncEngine(smollm2_dir, num_blocks=256) as engine:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        stream = engine.chat(messages, temperature=0.0, max_tokens=64)
        tokens = [token async for token in stream]
        assert "Paris" in "".join(tokens)
        assert stream.finish_reason == "stop"
        assert tokens[-1] == "" and tokens[-1].id in engine.model_config.eos_token_ids
        ids = [token.id for token in tokens]
        assert "".join(tokens) == engine.tokenizer.decode(ids)


@pytest.mark.slow
def test_native_tokens_are_the_same_in_any_company(smollm2_dir: Path) -> None:
    params = SamplingParams(**{**_fields(GREEDY), "max_tokens": 24})
    with LLM(smollm2_dir, num_blocks=512, max_num_batched_tokens=64) as llm:
        crowd = llm.generate(PROMPTS[:10], params)
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS[:10]]
    assert [o.token_ids for o in crowd] == [o.token_ids for o in alone]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "ignore_eos", "max_tokens")}
