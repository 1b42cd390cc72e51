"""LLM: the same engine, blocking, for scripts and offline batches."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tinyvllm.async_engine import AsyncEngine
from tinyvllm.errors import InvalidParameterError
from tinyvllm.hub import DEFAULT_MODEL
from tinyvllm.stream import Usage, read_blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from types import TracebackType

    from tinyvllm.config import EngineConfig
    from tinyvllm.engine import EngineStats
    from tinyvllm.sampling_params import SamplingParams
    from tinyvllm.stream import FinishReason, TokenStream
    from tinyvllm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOutput:
    """One of a request's `n` outputs."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[tuple[float, dict[int, float]]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. Text, ids, reason and logprobs are those of its first choice."""

    prompt: str | list[int] | list[Mapping[str, Any]]
    """As it was given: text, token ids or chat messages."""
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    """One per generated token, the EOS included where one was drawn."""
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[tuple[float, dict[int, float]]] | None
    """Per token: its log-probability and those of the most likely; None unless asked for."""
    prompt_logprobs: list[tuple[float, dict[int, float]] | None] | None
    """The same per token of the prompt, None for the first; None unless asked for."""
    choices: list[ChoiceOutput]
    """All `n` of them."""


class LLM:
    """A language model that answers batches.

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["Once upon a time", "The sea is"], max_tokens=64):
                print(output.text)

    Loads the model in the constructor. The calls block their thread and need no event loop; called
    from a coroutine they would block its loop, which is what `AsyncEngine` is for. Threads may
    share one LLM.
    """

    def __init__(
        self,
        model: str | PathLike[str] = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        **overrides: Any,
    ) -> None:
        self._engine = AsyncEngine(model, config, **overrides)
        engine = self._engine._launch()
        try:
            engine.started.wait_blocking()
        except BaseException:  # KeyboardInterrupt while loading
            self.close()
            raise
        self._engine._check_started(engine)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; one output per prompt, in order.

        `params`: one for all, or one per prompt. `progress` draws a bar on stderr; None does where
        stderr is a terminal. Raises what `AsyncEngine.generate` and its stream raise; the rest of
        the batch is then aborted.
        """
        one = isinstance(prompts, str) or isinstance(next(iter(prompts), None), int)
        batch = [prompts] if one else list(prompts)
        return self._run(self._engine.generate, batch, params, progress, sampling)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; as `generate`. `options` are those of
        `AsyncEngine.chat` (tools, ...) and fields of `SamplingParams`."""
        one = bool(messages) and hasattr(messages[0], "keys")
        conversations = [messages] if one else list(messages)
        return self._run(self._engine.chat, conversations, params, progress, options)

    def close(self) -> None:
        """Stop the engine and release all memory. Idempotent."""
        engine = self._engine._shut()
        if engine is not None:
            engine.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        start: Callable[..., TokenStream],
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        per_prompt = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(per_prompt) != len(prompts):
            raise InvalidParameterError(
                f"params must be one SamplingParams or one per prompt ({len(prompts)}); "
                f"got {len(per_prompt)}",
                param="params",
            )
        if progress is None:
            progress = sys.stderr.isatty()
        bar = _Bar(len(prompts), sys.stderr) if progress else None
        streams: list[TokenStream] = []
        tokens: list[list[tuple[Any, ...]]] = [[] for _ in prompts]
        try:
            for prompt, each in zip(prompts, per_prompt, strict=True):
                streams.append(start(prompt, each, **options))
            for idx, item in read_blocking(streams):
                tokens[idx].append(item)
                if bar is not None:
                    finished = item[2] is not None and None not in streams[idx].finish_reasons
                    bar.add(finished=finished)
        finally:
            for stream in streams:
                stream.abort()
            if bar is not None:
                bar.close()
        return [
            _output(prompt, stream, items)
            for prompt, stream, items in zip(prompts, streams, tokens, strict=True)
        ]


def _output(prompt: Any, stream: TokenStream, items: list[tuple[Any, ...]]) -> RequestOutput:
    choices = []
    for choice, reason in enumerate(stream.finish_reasons):
        assert reason is not None, stream
        mine = [item for item in items if item[4] == choice]
        has_logprobs = bool(mine) and mine[0][3] is not None
        choices.append(
            ChoiceOutput(
                text="".join(item[0] for item in mine),
                token_ids=[item[1] for item in mine],
                finish_reason=reason,
                logprobs=[item[3] for item in mine] if has_logprobs else None,
            )
        )
    first = choices[0]
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=stream.prompt_token_ids or [],
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=stream.usage,
        logprobs=first.logprobs,
        prompt_logprobs=stream.prompt_logprobs,
        choices=choices,
    )


class _Bar:
    """`  12/256 requests  1,234 tokens  98.7 tokens/s`, redrawn at most ten times a second."""

    def __init__(self, total: int, file: TextIO) -> None:
        self._total, self._file = total, file
        self._done = self._num_tokens = 0
        self._start = self._drawn = time.perf_counter()

    def add(self, finished: bool) -> None:
        self._num_tokens += 1
        self._done += finished
        now = time.perf_counter()
        if now - self._drawn >= 0.1:
            self._drawn = now
            self._draw(now)

    def close(self) -> None:
        self._draw(time.perf_counter())
        self._file.write("\n")
        self._file.flush()

    def _draw(self, now: float) -> None:
        width = 24
        filled = width * self._done // max(1, self._total)
        rate = self._num_tokens / max(1e-9, now - self._start)
        self._file.write(
            f"\r[{'#' * filled}{'.' * (width - filled)}] {self._done}/{self._total} requests, "
            f"{self._num_tokens:,} tokens, {rate:,.1f} tokens/s "
        )
        self._file.flush()
