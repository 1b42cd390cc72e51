"""transformers: `generate` with its own KV cache, requests of a run as one left-padded batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from tinyvllm.bench.contenders import Run, Settings, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyvllm.bench.workloads import Work


class TransformersContender:
    """Eager BF16 `AutoModelForCausalLM`; static batches of at most `max_num_seqs`."""

    name = "transformers"

    def __init__(self, settings: Settings) -> None:
        try:
            import transformers
        except ImportError as error:
            raise UnavailableError("pip install transformers") from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.version: str = transformers.__version__
        self._settings = settings
        self._transformers = transformers
        torch.set_num_threads(settings.num_threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            settings.model_dir, dtype=torch.bfloat16
        )
        self._model: Any = model.eval().to(settings.device)

    def run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        torch.set_num_threads(self._settings.num_threads)
        submitted = time.perf_counter()
        runs: list[Run] = []
        for start in range(0, len(work), self._settings.max_num_seqs):
            runs += self._batch(work[start : start + self._settings.max_num_seqs], temperature)
        for run in runs:
            run.submitted = submitted
        return runs

    def _batch(self, work: Sequence[Work], temperature: float) -> list[Run]:
        width = max(len(one.prompt_ids) for one in work)
        longest = max(one.max_tokens for one in work)
        pads = [width - len(one.prompt_ids) for one in work]
        rows = [[0] * pad + list(one.prompt_ids) for pad, one in zip(pads, work, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        )
        times: list[float] = []

        def clock(input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(rows, device=self._settings.device),
                attention_mask=torch.tensor(mask, device=self._settings.device),
                generation_config=self._transformers.GenerationConfig(
                    max_new_tokens=longest, eos_token_id=None, pad_token_id=0, **sampling
                ),
                stopping_criteria=self._transformers.StoppingCriteriaList([clock]),
            )
        generated: list[list[int]] = out[:, width:].tolist()
        return [
            Run(0.0, ids[: one.max_tokens], times[: one.max_tokens])
            for ids, one in zip(generated, work, strict=True)
        ]

    def close(self) -> None:
        self._model = None
