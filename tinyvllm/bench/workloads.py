"""The workloads: prompts and lengths, drawn once and given to every engine alike.

"full" sizes are for a GPU and a 1B model; "cpu" sizes keep a run of all engines to minutes;
"tiny" ones are for tests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

MAX_TOKEN_ID = 10000
"""Prompts draw ids up to this, as nano-vllm's benchmark does; a smaller vocabulary caps it."""

Size = Literal["cpu", "full", "tiny"]


@dataclass(frozen=True, slots=True)
class Work:
    """One request: a prompt of token ids, and how many tokens to generate (EOS is ignored)."""

    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted at once, in one round."""

    name: str
    num_requests: int
    prompt_len: tuple[int, int]
    """Inclusive range that each prompt's length is drawn from."""
    output_len: tuple[int, int]
    temperature: float = 0.0

    @property
    def max_model_len(self) -> int:
        return self.prompt_len[1] + self.output_len[1]

    def draw(self, round_idx: int, vocab_size: int) -> list[Work]:
        """The round's requests. Rounds differ, so that no prefix cache turns one into a hit."""
        rng = random.Random(round_idx)
        top = min(MAX_TOKEN_ID, vocab_size - 1)
        prompts = [
            tuple(rng.randint(0, top) for _ in range(rng.randint(*self.prompt_len)))
            for _ in range(self.num_requests)
        ]
        return [Work(prompt, rng.randint(*self.output_len)) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Every workload of one size."""

    latency: tuple[Workload, ...]
    ttft: tuple[Workload, ...]
    throughput: tuple[Workload, ...]
    streams: tuple[Workload, ...]
    step: tuple[Workload, ...]
    """Short prompts: only decoding is looked at."""


def _uniform(name: str, num_requests: int, prompt_len: int, output_len: int) -> Workload:
    return Workload(name, num_requests, (prompt_len, prompt_len), (output_len, output_len))


def _latency(prompt_len: int, output_len: int) -> Workload:
    return _uniform(f"latency {prompt_len}/{output_len}", 1, prompt_len, output_len)


def _ttft(prompt_len: int) -> Workload:
    return _uniform(f"ttft {prompt_len}", 1, prompt_len, 1)


def _streams(num_requests: int, prompt_len: int, output_len: int) -> Workload:
    return _uniform(f"streams {num_requests}", num_requests, prompt_len, output_len)


SIZES: dict[Size, Sizes] = {
    "cpu": Sizes(
        latency=(_latency(64, 128),),
        ttft=(_ttft(1024),),
        throughput=(_uniform("throughput 16 x 64/64", 16, 64, 64),),
        streams=(_streams(8, 64, 32), _streams(64, 64, 32)),
        step=(_streams(1, 4, 128), _streams(64, 4, 48)),
    ),
    "full": Sizes(
        latency=(_latency(64, 512), _latency(4096, 512)),
        ttft=(_ttft(512), _ttft(2048), _ttft(8192)),
        throughput=(Workload("throughput 256", 256, (100, 1024), (100, 1024), temperature=0.6),),
        streams=tuple(_streams(count, 128, 256) for count in (8, 64, 256, 1024)),
        step=tuple(_streams(count, 4, 256) for count in (1, 64, 256)),
    ),
    "tiny": Sizes(
        latency=(_latency(5, 6),),
        ttft=(_ttft(17),),
        throughput=(Workload("throughput 3", 3, (4, 9), (3, 6)),),
        streams=(_streams(2, 4, 5),),
        step=(_streams(1, 3, 16), _streams(3, 3, 16)),
    ),
}
