"""SmolLM2-135M-Instruct: 20 prompts x 128 greedy tokens equal transformers', in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine_helpers import GREEDY, ONE_ORDER

from tinyvllm import LLM, AsyncEngine, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from tinyvllm import RequestOutput

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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_float32_equals_transformers(smollm2_dir: Path) -> None:
    """Every token is transformers' first choice after the same tokens: by induction, the same text.

    A tie is excused: two candidates nearer to each other than twice what float32 may move them,
    which is taken as twice transformers' own distance from float64.
    """
    transformers = pytest.importorskip("transformers")
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    with LLM(smollm2_dir, ops="reference", dtype="float32", num_blocks=256) as llm:
        outputs = llm.generate(PROMPTS, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)

    def logits(output: RequestOutput) -> torch.Tensor:
        ids = output.prompt_token_ids + output.token_ids[:-1]
        with torch.inference_mode():
            return model(torch.tensor([ids]), logits_to_keep=NUM_TOKENS).logits[0]

    wanted = [logits(output) for output in outputs]
    model.double()
    error = max((logits(outputs[i]) - wanted[i]).abs().max().item() for i in range(2))
    assert error < 1e-2
    for text, output, want in zip(PROMPTS, outputs, wanted, strict=True):
        ids = torch.tensor(output.token_ids)
        assert len(ids) == NUM_TOKENS
        lead = want.max(dim=-1).values - want[torch.arange(NUM_TOKENS), ids]
        assert (lead <= 4 * error).all(), (text, int(lead.argmax()), lead.max(), error)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_real_chat_streams(smollm2_dir: Path) -> None:
    async with AsyncEngine(smollm2_dir, num_blocks=256) as engine:
        # Every token of its answer leads by 1.7 or more: bfloat16, on whatever device, moves none.
        text = "Complete the sentence: The capital of France is"
        messages = [{"role": "user", "content": text}]
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
    config = {"num_blocks": 512, "max_num_batched_tokens": 64, **ONE_ORDER}
    with LLM(smollm2_dir, **config) as llm:
        crowd = llm.generate(PROMPTS[:10], params)
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS[:10]]
    assert [o.token_ids for o in crowd] == [o.token_ids for o in alone]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "ignore_eos", "max_tokens")}
