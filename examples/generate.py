"""Offline batch: several prompts at once, one answer each.

python examples/generate.py --max-tokens 48 "The sea is" "My favourite colour is"
"""

import argparse

from tinyvllm import DEFAULT_MODEL, LLM, SamplingParams

parser = argparse.ArgumentParser(description="Complete prompts, all in one batch.")
parser.add_argument("prompts", nargs="*", default=["Once upon a time", "The capital of France is"])
parser.add_argument("--model", default=DEFAULT_MODEL, help="alias, directory or org/name")
parser.add_argument("--max-tokens", type=int, default=64)
parser.add_argument("--temperature", type=float, default=0.7)
args = parser.parse_args()

with LLM(args.model) as llm:
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    for output in llm.generate(args.prompts, params):
        print(f"--- {output.prompt}\n{output.text}")
        print(f"    [{output.usage.completion_tokens} tokens, {output.finish_reason}]\n")
