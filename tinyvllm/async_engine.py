"""AsyncEngine: the public face of an engine, for asyncio, uvloop and trio."""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm import metrics
from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine, EngineHealth
from tinyvllm.errors import EngineClosedError, InvalidParameterError
from tinyvllm.hub import DEFAULT_MODEL
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.stream import TokenStream, check_priority

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tinyvllm.config import ModelConfig
    from tinyvllm.engine import EngineStats, StepTimings
    from tinyvllm.tokenizer import Tokenizer


_MAX_SECONDS = 1e9  # more than a thread can be told to wait


class AsyncEngine:
    """A language model that streams.

        async with AsyncEngine("smollm2-135m-instruct") as engine:
            async for token in engine.generate("Once upon a time", max_tokens=64):
                print(token, end="", flush=True)

    `model` is an alias, a directory or org/name; `config` and `overrides` are `EngineConfig`'s
    fields. `async with`, or `await start()` and `await aclose()`. Streams may be read from any
    loop and from several loops at once; the engine belongs to none and outlives them.

    Requests still running at `aclose()` end: their readers get `EngineClosedError` after the
    tokens that exist. An engine that is dropped without `aclose()` stops, with a ResourceWarning.
    After a fork the child cannot use it: `EngineClosedError`.
    """

    def __init__(
        self,
        model: str | PathLike[str] = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        **overrides: Any,
    ) -> None:
        if not isinstance(model, str | PathLike):
            raise InvalidParameterError(
                f"model must be an alias, a directory or org/name; got {model!r}", param="model"
            )
        self.config = EngineConfig.resolve(config, overrides)
        self._model = model
        self._engine: Engine | None = None
        self._launching = threading.Lock()
        self._finalizer: Any = None

    # --- Life cycle -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, in a thread; returns when requests are taken. Idempotent while open; a
        closed engine can be started again.

        Raises `ModelError`s and `ConfigError`. After an error or a cancellation nothing is left.
        """
        if self._engine is not None and self._engine.is_closing:
            await self._engine.stopped.wait()
        engine = self._launch()
        try:
            await engine.started.wait()
        except BaseException:  # cancelled: loading stops at its next progress report
            await self.aclose()
            raise
        self._check_started(engine)

    async def aclose(self, *, drain: bool | float = False) -> None:
        """End every request, stop the engine thread and release all memory. Idempotent.

        `drain`: take no new requests and wait first until those that run and wait have ended; a
        number: so many seconds at most. A paused engine goes on. A reader that never comes back
        holds its request for ever: give a number. Cancelled while draining, it closes at once.
        """
        seconds = None if isinstance(drain, bool) else _check_seconds("drain", drain)
        engine = self._engine
        if drain and engine is not None and engine.is_running and engine.started.is_set():
            engine.drain(seconds)
            try:
                await engine.stopped.wait()
            finally:
                await self._end()
        else:
            await self._end()

    async def _end(self) -> None:
        engine = self._shut()
        if engine is None:
            return
        import anyio  # only needed here and at no one's first token

        with anyio.CancelScope(shield=True):
            await engine.stopped.wait()
        engine.join()

    def _launch(self) -> Engine:
        with self._launching:
            if self._engine is None or self._engine.stopped.is_set():
                self._engine = Engine(self._model, self.config)
                self._finalizer = weakref.finalize(self, _stop_unclosed, self._engine)
                self._engine.start()
            return self._engine

    def _check_started(self, engine: Engine) -> None:
        """After `engine.started`: raises why loading failed, then with nothing left behind."""
        if engine.start_error is not None:
            self._shut()
            engine.join()
            raise engine.start_error
        engine.check_open()

    def _shut(self) -> Engine | None:
        """Signal the end; returns the engine to wait for, if any."""
        engine = self._engine
        if engine is None or not engine.is_running:
            return None
        self._finalizer.detach()
        engine.close()
        return engine

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # --- Requests -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        timeout: float | None = None,
        cache_salt: str | None = None,
        enable_prefix_caching: bool = True,
        **sampling: Any,
    ) -> TokenStream:
        """Start a completion of `prompt`, text or token ids, and return its stream at once.

        `sampling` are fields of `SamplingParams`, on top of `params` or else of the model's
        defaults. Lower `priority` goes first. `request_id` is a label and need not be unique.

        `timeout`: seconds from now after which the stream ends with `RequestTimeoutError`, behind
        its tokens so far, whether it runs or still waits; looked at between steps. Prefix blocks
        are shared only among requests of the same `cache_salt`; without `enable_prefix_caching`
        this one reads and leaves none.

        Raises `InvalidParameterError` (among it `ContextLengthError` for ids),
        `EngineOverloadedError`, `EngineClosedError` or `EngineDeadError` here; what needs the
        tokenizer raises from the first read of the stream.
        """
        engine = self._running()
        if not isinstance(prompt, str):
            prompt = check_ids(prompt, engine.model_config.vocab_size)
        return self._submit(
            engine,
            prompt,
            params,
            sampling,
            priority=priority,
            request_id=request_id,
            timeout=timeout,
            cache_salt=cache_salt,
            enable_prefix_caching=enable_prefix_caching,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        timeout: float | None = None,
        cache_salt: str | None = None,
        enable_prefix_caching: bool = True,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Start the model's next message after `messages` ({"role": ..., "content": ...}), laid
        out by the model's own chat template, which also sees `template_options`.

        Raises like `generate`; from the first read of the stream `InvalidParameterError` for a
        message that is wrong, `ChatTemplateError` when there is no template or it refuses them.
        """
        engine = self._running()
        if isinstance(messages, Iterable) and not isinstance(messages, str | Mapping):
            messages = list(messages)
        if not isinstance(messages, list) or not all(hasattr(m, "keys") for m in messages):
            raise InvalidParameterError(
                'messages must be a list of {"role": ..., "content": ...}; '
                f"got {_short(messages)}",
                param="messages",
            )
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        for name in template_options or ():
            if not isinstance(name, str) or name in ("self", "messages", *options):
                raise InvalidParameterError(
                    f"template_options: {name!r} is not a name for the template's own variables; "
                    "messages, tools and add_generation_prompt are arguments of chat()",
                    param="template_options",
                )
        options |= template_options or {}
        messages = [dict(message) for message in messages]
        return self._submit(
            engine,
            messages,
            params,
            sampling,
            priority=priority,
            request_id=request_id,
            timeout=timeout,
            cache_salt=cache_salt,
            enable_prefix_caching=enable_prefix_caching,
            chat_options=options,
        )

    def _submit(
        self,
        engine: Engine,
        prompt: Any,
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        *,
        priority: int,
        request_id: str | None,
        timeout: float | None,
        cache_salt: str | None,
        enable_prefix_caching: bool,
        chat_options: Mapping[str, Any] | None = None,
    ) -> TokenStream:
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise InvalidParameterError(
                f"cache_salt must be a string; got {cache_salt!r}", param="cache_salt"
            )
        if not isinstance(enable_prefix_caching, bool):
            raise InvalidParameterError(
                f"enable_prefix_caching must be True or False; got {enable_prefix_caching!r}",
                param="enable_prefix_caching",
            )
        state = engine.new_state(
            prompt,
            SamplingParams.resolve(params, sampling, engine.model_config.sampling_defaults),
            priority=check_priority(priority),
            request_id=request_id,
            chat_options=chat_options,
            timeout=None if timeout is None else _check_seconds("timeout", timeout),
            cache_salt=(cache_salt or "").encode("utf-8", "surrogatepass"),
            enable_prefix_caching=enable_prefix_caching,
        )
        # The stream first: should an exception (KeyboardInterrupt) come from here on, its
        # finalizer takes the request back.
        stream = TokenStream(state, self)
        engine.submit(state)
        return stream

    def pause(self) -> None:
        """Hold all requests within one step; nothing is lost, and new ones are taken and wait.
        Timeouts go on. Idempotent; any thread."""
        self._running().set_paused(True)

    def resume(self) -> None:
        """Go on after `pause()`. Idempotent; any thread."""
        self._running().set_paused(False)

    # --- What it is and does --------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The alias or org/name, or the directory's name."""
        model = fspath(self._model)
        is_path = not isinstance(self._model, str) or Path(model).is_dir()
        return Path(model).resolve().name if is_path else model

    @property
    def model_config(self) -> ModelConfig:
        return self._running().model_config

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens of one request at most."""
        return self._running().max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self._running().tokenizer

    @property
    def step_timings(self) -> StepTimings | None:
        """Set to a `tinyvllm.engine.StepTimings` to have it filled; None turns it off."""
        return None if self._engine is None else self._engine.step_timings

    @step_timings.setter
    def step_timings(self, timings: StepTimings | None) -> None:
        self._running().step_timings = timings

    def stats(self) -> EngineStats:
        """A snapshot of what runs and of all counters; after `aclose()` the last one. Raises
        `EngineClosedError` before the start."""
        if self._engine is None:
            raise EngineClosedError("the engine is not started: no statistics yet")
        return self._engine.stats()

    def health(self) -> EngineHealth:
        """A snapshot; never raises."""
        if self._engine is None:
            return EngineHealth(alive=False, last_step_age=None, error=None)
        return self._engine.health()

    def enable_metrics(self) -> None:
        """Record histograms from now on; `metrics_text` and `EngineCollector` do by themselves.
        Costs a few microseconds a step. Idempotent until `aclose()`."""
        self._running().enable_metrics()

    def metrics_text(self) -> str:
        """All metrics in Prometheus's text format (0.0.4), under vLLM's names with the prefix
        `tinyvllm_`. Raises as `stats()`."""
        return metrics.render(self.metrics_families())

    def metrics_families(self) -> list[metrics.Family]:
        """What `metrics_text` writes, for `EngineCollector`."""
        if self._engine is None:
            raise EngineClosedError("the engine is not started: no metrics yet")
        return self._engine.metrics_families()

    def _running(self) -> Engine:
        if self._engine is None:
            raise EngineClosedError("the engine is not started: use `async with` or await start()")
        self._engine.check_open()
        return self._engine


def check_ids(prompt: Iterable[int], vocab_size: int) -> list[int]:
    """`prompt` as a list of plain ints. Raises `InvalidParameterError` unless all are token ids."""
    items = prompt
    try:
        if isinstance(prompt, bytes | bytearray | memoryview):  # a sequence of ints, but no ids
            raise TypeError("bytes")
        items = ids = list(prompt)
        if set(map(type, ids)) - {int}:
            if any(isinstance(i, bool) for i in ids):
                raise TypeError("bool")
            ids = [operator.index(i) for i in ids]
    except TypeError:
        raise InvalidParameterError(
            f"prompt must be text or a sequence of token ids; got {_short(prompt)}"
            f"{_prompt_hint(prompt, items)}",
            param="prompt",
        ) from None
    if not ids:
        raise InvalidParameterError("prompt has 0 tokens; give at least one", param="prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        idx, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidParameterError(
            f"prompt[{idx}] is {token_id}; token ids of this model are in [0, {vocab_size})",
            param="prompt",
        )
    return ids


def _check_seconds(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_SECONDS:  # type: ignore[operator]
        raise InvalidParameterError(
            f"{name} must be a number of seconds, above 0 and at most {_MAX_SECONDS:g}; "
            f"got {_short(value)}",
            param=name,
        )
    return float(value)  # type: ignore[arg-type]


def _prompt_hint(prompt: object, items: object) -> str:
    """What the caller may have meant by a prompt that holds no ids."""
    first = items[0] if isinstance(items, list) and items else None
    if isinstance(prompt, bytes | bytearray | memoryview):
        return "; decode it to text"
    if isinstance(prompt, Mapping) or isinstance(first, Mapping):
        return "; for messages use chat()"
    if isinstance(first, str | list | tuple):
        return "; one prompt per call; for lists use LLM.generate"
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _stop_unclosed(engine: Engine) -> None:
    """The AsyncEngine was collected, or the interpreter exits, without aclose()."""
    if not engine.is_running:
        return
    engine.close()
    if threading.main_thread().is_alive():
        # A collection may run anywhere, also in the engine thread: signal, but do not wait.
        warnings.warn(
            "an AsyncEngine was dropped without aclose(); use `async with`",
            ResourceWarning,
            stacklevel=2,
            source=engine,
        )
    else:
        engine.join(timeout=10)  # native code must not run on into the interpreter's teardown
