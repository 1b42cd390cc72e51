"""Chat in the terminal. Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat.

python examples/chat.py --system "You are a pirate."
"""

import argparse
import asyncio
import contextlib
import sys

from tinyvllm import DEFAULT_MODEL, AsyncEngine, ContextLengthError


async def answer(engine: AsyncEngine, messages: list[dict[str, str]], max_tokens: int) -> str:
    """Prints the model's next message as it comes, and returns it."""
    stream = engine.chat(messages, max_tokens=max_tokens, temperature=0.3)
    with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C: keep what there is
        async for token in stream:
            print(token, end="", flush=True)
    pace = stream.timings.time_per_output_token
    speed = f", {1 / pace:.0f} tokens/s" if pace else ""
    count, reason = stream.usage.completion_tokens, stream.finish_reason
    print(f"\n[{count} tokens{speed}, {reason}]\n", file=sys.stderr)
    return await stream.text()


def chat(runner: asyncio.Runner, engine: AsyncEngine, system: str | None, max_tokens: int) -> None:
    start = [{"role": "system", "content": system}] if system else []
    messages = start.copy()
    while True:
        messages.append({"role": "user", "content": input("> ")})
        try:
            text = runner.run(answer(engine, messages, max_tokens))
            messages.append({"role": "assistant", "content": text})
        except ContextLengthError:
            print("[the conversation is too long: starting afresh]", file=sys.stderr)
            messages = start.copy()


parser = argparse.ArgumentParser(description="Chat in the terminal.")
parser.add_argument("--model", default=DEFAULT_MODEL, help="alias, directory or org/name")
parser.add_argument("--system", help="system message")
parser.add_argument("--max-tokens", type=int, default=512)
args = parser.parse_args()

with asyncio.Runner() as runner:  # input() blocks, so it stays outside of the event loop
    engine = AsyncEngine(args.model)
    runner.run(engine.start())
    print(f"{engine.model_name}: ask away.", file=sys.stderr)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        chat(runner, engine, args.system, args.max_tokens)
    runner.run(engine.aclose())
