"""A child process of `bench start`: load one engine, draw one token, say so.

    python -P first_token.py ENGINE MODEL DEVICE THREADS

It is run by its path and imports only what its engine needs.
"""

import sys

DONE = "first token"
PROMPT_IDS = [1, 10, 20, 30, 40, 50, 60, 70]


def run_tinyvllm(model: str, device: str, num_threads: int) -> None:
    import asyncio

    from tinyvllm import AsyncEngine

    async def first() -> None:
        async with AsyncEngine(model, device=device, num_threads=num_threads) as engine:
            async for _ in engine.generate(PROMPT_IDS, max_tokens=1, temperature=0):
                print(DONE, flush=True)

    asyncio.run(first())


def run_transformers(model: str, device: str, num_threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
    loaded.generate(torch.tensor([PROMPT_IDS], device=device), max_new_tokens=1, do_sample=False)
    print(DONE, flush=True)


def run_llama_cpp(model: str, device: str, num_threads: int) -> None:
    from llama_cpp import Llama

    assert device == "cpu"
    loaded = Llama(model, n_ctx=2048, n_threads=num_threads, verbose=False)
    loaded.eval(PROMPT_IDS)
    loaded.sample(temp=0.0)
    print(DONE, flush=True)


if __name__ == "__main__":
    runners = {
        "tinyvllm": run_tinyvllm,
        "transformers": run_transformers,
        "llama.cpp": run_llama_cpp,
    }
    runners[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
