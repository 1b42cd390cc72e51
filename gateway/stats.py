"""The picture behind `tinyvllm.stats`: what the engine does now, as one event.

Slots, blocks and sequences come from `engine.stats()`; a sequence is named by its response's tag.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyvllm import EngineError
from tinyvllm.gateway import json_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine, EngineStats, SequenceStats
    from tinyvllm.gateway.response import Responses

_FRESH_SECONDS = 0.05
"""Subscribers that ask at about the same time get the same event."""
_RATE_SECONDS = 1.0
_MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters at one time, for the rates between two of them."""

    time: float
    num_output_tokens: int
    num_prompt_tokens: int
    num_steps: int


class Stats:
    """Builds the events; `num_connections` is asked for each."""

    def __init__(
        self, engine: AsyncEngine, responses: Responses, num_connections: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._responses = responses
        self._num_connections = num_connections
        self._samples: deque[_Sample] = deque()
        self._event = b""
        self._built_at = 0.0

    def event(self) -> bytes | None:
        """The event for this moment; None of an engine that has nothing to tell."""
        now = time.monotonic()
        if not self._event or now - self._built_at >= _FRESH_SECONDS:
            try:
                stats = self._engine.stats()
            except EngineError:
                return None
            self._event = json_text.dumps(self._picture(stats, now))
            self._built_at = now
        return self._event

    def _picture(self, stats: EngineStats, now: float) -> dict[str, Any]:
        config = self._engine.config
        live = self._responses.live.values()
        return {
            "type": "tinyvllm.stats",
            "time": time.time(),
            "model": self._engine.model_name,
            **self._rates(stats, now),
            "num_steps": stats.num_steps,
            "queue": stats.num_waiting,
            "slots": {
                "total": getattr(stats, "max_num_seqs", config.max_num_seqs),
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "paused": stats.num_paused,
            },
            "blocks": {
                "total": stats.num_blocks,
                "free": stats.num_free_blocks,
                "used": stats.num_blocks - stats.num_free_blocks,
                "shared": stats.num_shared_blocks,
                "cached": stats.num_cached_blocks,
                "size": config.block_size,
            },
            "prefix_cache": {
                "queries": stats.prefix_cache_queries,
                "hits": stats.prefix_cache_hits,
            },
            "num_requests": stats.num_requests,
            "num_output_tokens": stats.num_output_tokens,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_preemptions": stats.num_preemptions,
            "sequences": [_sequence(sequence) for sequence in stats.sequences[:_MAX_SEQUENCES]],
            "num_sequences": stats.num_running + stats.num_waiting,
            "connections": self._num_connections(),
            "viewers": sum(response.num_viewers for response in live),
            "responses": len(live),
            "draining": self._responses.draining,
        }

    def _rates(self, stats: EngineStats, now: float) -> dict[str, float]:
        """Per second, over about the last one."""
        samples = self._samples
        newest = _Sample(now, stats.num_output_tokens, stats.num_prompt_tokens, stats.num_steps)
        samples.append(newest)
        while len(samples) > 2 and now - samples[1].time >= _RATE_SECONDS:
            samples.popleft()
        oldest = samples[0]
        seconds = max(now - oldest.time, 1e-9)
        return {
            "tokens_per_second": (newest.num_output_tokens - oldest.num_output_tokens) / seconds,
            "prompt_tokens_per_second": (newest.num_prompt_tokens - oldest.num_prompt_tokens)
            / seconds,
            "steps_per_second": (newest.num_steps - oldest.num_steps) / seconds,
        }


def _sequence(sequence: SequenceStats) -> dict[str, Any]:
    return {
        "tag": sequence.request_id,
        "state": sequence.state,
        "slot": sequence.slot,
        "prompt_tokens": sequence.num_prompt_tokens,
        "computed_tokens": sequence.num_computed_tokens,
        "cached_tokens": sequence.num_cached_tokens,
        "output_tokens": sequence.num_output_tokens,
        "blocks": sequence.num_blocks,
    }
