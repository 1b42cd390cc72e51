"""Two streams at once; the first to reach 12 tokens cancels the other.

python examples/stream.py
"""

import argparse
import asyncio

from tinyvllm import DEFAULT_MODEL, AsyncEngine, TokenStream


async def show(name: str, stream: TokenStream, rival: TokenStream) -> None:
    async for token in stream:
        print(f"{name}: {str(token)!r}")
        if token.index == 11:
            rival.abort()  # `break`, aclose(), cancelling its task or dropping it would do as well


async def main(model: str, max_tokens: int) -> None:
    async with AsyncEngine(model) as engine:
        tale = engine.generate("Once upon a time, a small dog", max_tokens=max_tokens)
        facts = engine.chat(
            [{"role": "user", "content": "Tell me three facts about the sea."}],
            max_tokens=max_tokens,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(show("tale ", tale, facts))
            tasks.create_task(show("facts", facts, tale))
        for name, stream in ("tale", tale), ("facts", facts):
            print(f"{name}: {stream.finish_reason} after {stream.usage.completion_tokens} tokens")


parser = argparse.ArgumentParser(description="Two streams, one of them cancelled.")
parser.add_argument("--model", default=DEFAULT_MODEL, help="alias, directory or org/name")
parser.add_argument("--max-tokens", type=int, default=64)
args = parser.parse_args()
asyncio.run(main(args.model, args.max_tokens))
