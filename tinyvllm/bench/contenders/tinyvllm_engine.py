"""tinyvllm as its users run it: `async for` over one stream per request, text included."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import tinyvllm
from tinyvllm.bench.contenders import Run, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyvllm.bench.workloads import Work


class TinyvllmContender:
    """One AsyncEngine, its configuration the default where that is enough, and an event loop."""

    name = "tinyvllm"
    version = tinyvllm.__version__

    def __init__(self, settings: Settings) -> None:
        config = tinyvllm.EngineConfig(
            device=settings.device,
            num_threads=settings.num_threads,
            max_num_seqs=max(64, settings.max_num_seqs),
            max_model_len=settings.max_model_len,
        )
        self.engine = tinyvllm.AsyncEngine(settings.model_dir, config)
        self._runner = asyncio.Runner()
        self._runner.run(self.engine.start())

    def run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        return self._runner.run(self._run(work, temperature))

    async def _run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        return await asyncio.gather(*(self._consume(one, temperature) for one in work))

    async def _consume(self, work: Work, temperature: float) -> Run:
        run = Run(time.perf_counter())
        stream = self.engine.generate(
            list(work.prompt_ids),
            temperature=temperature,
            max_tokens=work.max_tokens,
            ignore_eos=True,
        )
        async for token in stream:
            run.times.append(time.perf_counter())
            run.token_ids.append(token.id)
        return run

    def close(self) -> None:
        self._runner.run(self.engine.aclose())
        self._runner.close()
