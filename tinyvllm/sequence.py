"""Sequence: one request's tokens and how far they have been computed; what a step runs of it.

        add()            admitted             prompt computed         stop, length, abort
  ──────────► WAITING ───────────► PREFILL ───────────────► DECODE ───────────────► FINISHED
                 ▲                    │                        │
                 └──── preempted ─────┴────────────────────────┘

The last of `token_ids` is known but not computed yet while a sequence decodes: every step computes
`token_ids[num_scheduled_tokens:]` (or a chunk of it) and draws a token when it reaches the end.
With a step in flight that last token is on the device only; its successor's place is known anyway.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinyvllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

# Seeded by the system once: its own numbers cost the engine thread the GIL each time, and beside a
# busy event loop 5 ms to get it back.
_seeds = random.Random()


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


def stop_ids_of(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end a request's output after `min_tokens`."""
    ids = params.stop_token_ids
    return frozenset(ids if params.ignore_eos else (*ids, *eos_token_ids))


class Sequence:
    """One sequence. Owned by the engine thread; only `Scheduler` changes its state.

    Bounds are kept as lengths of `token_ids` (`min_len`, `max_len`) so that the stop check of a
    step is one set look-up and one comparison.
    """

    __slots__ = (
        "allowed",
        "arrival",
        "block_hashes",
        "block_table",
        "cache_salt",
        "capacity",
        "choice",
        "detokenizer",
        "eos_token_ids",
        "finish_reason",
        "forks",
        "max_len",
        "max_tokens",
        "min_len",
        "needs_logits",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "order",
        "owner",
        "params",
        "parent",
        "paused",
        "priority",
        "reads_prefix_cache",
        "request_id",
        "seed",
        "seq_id",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
        "writes_prefix_cache",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        eos_token_ids: Iterable[int] = (),
        seed: int | None = None,
        owner: Any = None,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt_token_ids)
        """Prompt, then output."""
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        """Tokens whose KV is in the blocks."""
        self.num_scheduled_tokens = 0
        """The same, once every launched step has ended."""
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache gave at the first admission."""
        self.block_table: list[int] = []
        self.capacity = 0
        """Tokens that `block_table` holds; kept by BlockManager."""
        self.block_hashes: list[bytes] = []
        """Chained digests of the first full blocks, as far as they were ever needed."""
        self.cache_salt = b""
        """Root of the hash chain: sequences with different salts share no blocks."""
        self.reads_prefix_cache = True
        self.writes_prefix_cache = True
        self.slot = -1
        self.params = params
        self.eos_token_ids = tuple(eos_token_ids)
        self.stop_ids = stop_ids_of(params, self.eos_token_ids)
        """Ids that end the sequence after `min_tokens`."""
        self.max_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens
        """Output tokens at most; `Scheduler.add` cuts it to what model and pool can hold."""
        self.min_len = self.num_prompt_tokens + params.min_tokens
        self.max_len = self.num_prompt_tokens + self.max_tokens
        self.priority = priority
        self.arrival = -1
        self.order: tuple[int, ...] = (priority, self.arrival)
        """What scheduling compares: lower goes first. Set by `Scheduler`: (priority, arrival), and
        for choice i > 0 of a request (priority, arrival, i)."""
        self.choice = 0
        """Which of the request's `n` outputs this is."""
        self.forks: list[Sequence] = []
        """The other choices, which arrive when this one's prompt is computed."""
        self.parent: Sequence | None = None
        """Choice 0, whose prompt blocks this one shares."""
        if seed is None:
            seed = params.seed
        self.seed = _seeds.getrandbits(63) if seed is None else seed
        """In [-2**63, 2**63)."""
        self.status = SequenceStatus.WAITING
        self.paused = False
        """The reader lags: not scheduled."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The token id or the stop string that ended the sequence."""
        self.num_preemptions = 0
        self.owner = owner
        """The engine's record of the request; nothing here looks at it."""
        self.detokenizer: Any = None
        """The engine's, like `owner`."""
        self.needs_logits = params.adjusts_logits or params.logprobs is not None
        """The request asks for more than a draw from its logits."""
        self.allowed: Any = None
        """Which tokens may be drawn next, an AllowedTokens, where the request limits them or asks
        anything else of its logits."""

    def fork(self, seq_id: int, choice: int, seed: int) -> Sequence:
        """Another choice of the same request: the same prompt and parameters, another seed.

        To be called before `Scheduler.add`, which takes the forks along.
        """
        child = Sequence(
            seq_id,
            self.token_ids,
            self.params,
            request_id=self.request_id,
            priority=self.priority,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            owner=self.owner,
        )
        child.cache_salt = self.cache_salt
        child.reads_prefix_cache = self.reads_prefix_cache
        child.writes_prefix_cache = self.writes_prefix_cache
        child.choice = choice
        child.parent = self
        self.forks.append(child)
        return child

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy."""
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}{' paused' if self.paused else ''}, "
            f"prompt={self.num_prompt_tokens}, output={self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, slot={self.slot}, order={self.order}, "
            f"blocks={self.block_table})"
        )


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """What one step computes of one sequence. Never changed, so decodes share one across steps."""

    seq: Sequence
    num_tokens: int
    """Query tokens: `token_ids[num_scheduled_tokens:][:num_tokens]` before `schedule()`; after it,
    the `num_tokens` before `num_scheduled_tokens`."""
    samples: bool
    """The step computes the last known token, so the next one is drawn."""


@dataclass(slots=True, eq=False)
class Schedule:
    """One step: decodes first, then prompt chunks. Empty is falsy."""

    sequences: list[ScheduledSequence]
    num_tokens: int
    num_decodes: int
    num_samples: int
    """Entries with `samples`: the tokens that `Scheduler.update` wants."""
    is_pure_decode: bool
    """Every entry is a decode of one token, and there is at least one."""
    preempted: list[Sequence]
    """Lost their slots and blocks in this step; never also in `sequences`."""

    def __bool__(self) -> bool:
        return bool(self.sequences)
