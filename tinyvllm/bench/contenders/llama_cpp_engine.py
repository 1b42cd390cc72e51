"""llama.cpp through its low-level binding: continuous batching with its own batch API, in BF16.

The weights are the checkpoint's own, written once as a BF16 GGUF (gguf_export.py), so that every
engine reads the same numbers at the same precision.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm.bench.contenders import Run, Settings, UnavailableError
from tinyvllm.bench.gguf_export import cached_bf16_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyvllm.bench.workloads import Work

_MAX_SEQS = 256
"""llama.cpp's own limit; more requests wait for a free sequence."""


class LlamaCppContender:
    """One llama_context; decodes of all running sequences and whole prompts share a batch."""

    name = "llama.cpp"

    def __init__(self, settings: Settings) -> None:
        if settings.device != "cpu":
            raise UnavailableError("measured on the CPU only")
        try:
            import llama_cpp
        except ImportError as error:
            raise UnavailableError("pip install llama-cpp-python") from error
        self.version: str = llama_cpp.__version__
        self._lib: Any = llama_cpp
        self._rng = np.random.default_rng(0)
        # The library keeps this pointer: it must live as long as the process uses llama.cpp.
        self._quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = cached_bf16_gguf(settings.model_dir)
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise UnavailableError(f"llama.cpp cannot load {path}")
        self._max_seqs = min(settings.max_num_seqs, _MAX_SEQS)
        self._max_batch = max(2048, settings.max_model_len)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._max_seqs * settings.max_model_len
        params.n_batch = self._max_batch
        params.n_seq_max = self._max_seqs
        # One KV cache for all sequences: on a CPU several times as fast at 16 sequences as the
        # default, which splits the cache per sequence.
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = settings.num_threads
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise UnavailableError("llama.cpp cannot make a context of this size")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(self._max_batch, 0, 1)

    def run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        submitted = time.perf_counter()
        runs = [Run(submitted) for _ in work]
        waiting = deque(range(len(work)))
        free = list(range(self._max_seqs))
        running: dict[int, int] = {}  # seq_id -> index into work
        while waiting or running:
            self._batch.n_tokens = 0
            rows: list[
                tuple[int, int]
            ] = []  # (place in the batch, seq_id) of each wanted logits row
            for seq_id, idx in running.items():
                position = len(work[idx].prompt_ids) + len(runs[idx].token_ids) - 1
                rows.append((self._add(runs[idx].token_ids[-1:], position, seq_id), seq_id))
            while waiting and free:
                prompt = work[waiting[0]].prompt_ids
                if self._batch.n_tokens + len(prompt) > self._max_batch:
                    break
                seq_id = free.pop()
                running[seq_id] = waiting.popleft()
                rows.append((self._add(prompt, 0, seq_id), seq_id))
            status = self._lib.llama_decode(self._context, self._batch)
            if status != 0:
                raise RuntimeError(f"llama_decode of {self._batch.n_tokens} tokens gave {status}")
            tokens = [self._draw(place, temperature) for place, _ in rows]
            now = time.perf_counter()
            for (_, seq_id), token in zip(rows, tokens, strict=True):
                run = runs[running[seq_id]]
                run.token_ids.append(token)
                run.times.append(now)
                if len(run.token_ids) == work[running[seq_id]].max_tokens:
                    del running[seq_id]
                    free.append(seq_id)
                    self._lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        return runs

    def _add(self, token_ids: Sequence[int], position: int, seq_id: int) -> int:
        """Append tokens of one sequence to the batch; logits of the last one. Its place."""
        batch = self._batch
        for offset, token_id in enumerate(token_ids):
            place = batch.n_tokens
            batch.token[place] = token_id
            batch.pos[place] = position + offset
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = seq_id
            batch.logits[place] = 0
            batch.n_tokens = place + 1
        batch.logits[batch.n_tokens - 1] = 1
        return int(batch.n_tokens) - 1

    def _draw(self, place: int, temperature: float) -> int:
        pointer = self._lib.llama_get_logits_ith(self._context, place)
        logits = np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))
        if temperature > 0:
            logits = logits / temperature + self._rng.gumbel(size=self._vocab_size)
        return int(logits.argmax())

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
