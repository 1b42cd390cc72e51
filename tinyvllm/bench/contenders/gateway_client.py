"""Chats, straight from the library and through the gateway: what does the wire cost?

Both get the same text, since the wire takes no token ids: a word for each id of the workload. The
gateway is a process of its own, as its users run it, and its clients are in this one, a socket per
stream. One frame may carry several tokens; those count as having come together.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection, connect

import tinyvllm
from tinyvllm.bench.contenders import Run, Settings, UnavailableError
from tinyvllm.bench.contenders.tinyvllm_engine import TinyvllmContender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyvllm.bench.workloads import Work

_WORDS = "time way year work day part place case week point hand group fact water line end".split()
_TEMPLATE_TOKENS = 128
"""More than a chat template adds to a prompt."""


def _text(work: Work) -> str:
    return " ".join(_WORDS[i % len(_WORDS)] for i in work.prompt_ids)


class ChatContender(TinyvllmContender):
    """The library's own streams, of chats."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(_with_room(settings))

    async def _consume(self, work: Work, temperature: float) -> Run:
        run = Run(time.perf_counter())
        stream = self.engine.chat(
            [{"role": "user", "content": _text(work)}],
            temperature=temperature,
            max_tokens=work.max_tokens,
            ignore_eos=True,
        )
        async for _ in stream:
            run.times.append(time.perf_counter())
        return run


class GatewayContender:
    """The same chats through `python -m tinyvllm.gateway`."""

    name = "gateway"
    version = tinyvllm.__version__

    def __init__(self, settings: Settings) -> None:
        settings = _with_room(settings)
        flags = {
            "model": settings.model_dir,
            "device": settings.device,
            "num-threads": settings.num_threads,
            "max-num-seqs": max(64, settings.max_num_seqs),
            "max-model-len": settings.max_model_len,
            "port": 0,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tinyvllm.gateway", *(f"--{k}={v}" for k, v in flags.items())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        if not url:
            _, errors = self._process.communicate()
            raise UnavailableError(f"the gateway did not start: {errors.strip()[-500:]}")
        self._url = url.replace("http", "ws", 1) + "v1/responses"
        self._runner = asyncio.Runner()

    def run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        return self._runner.run(self._run(work, temperature))

    async def _run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        sockets = [await connect(self._url, compression=None, proxy=None) for _ in work]
        try:
            chats = zip(sockets, work, strict=True)
            return await asyncio.gather(*(self._chat(*chat, temperature) for chat in chats))
        finally:
            for socket in sockets:
                await socket.close()

    async def _chat(self, socket: ClientConnection, work: Work, temperature: float) -> Run:
        event = {
            "type": "response.create",
            "input": _text(work),
            "temperature": temperature,
            "max_output_tokens": work.max_tokens,
            "tinyvllm": {"ignore_eos": True},
        }
        run = Run(time.perf_counter())
        await socket.send(json.dumps(event))
        async for message in socket:
            if '"response.output_text.delta"' in str(message):
                run.times.append(time.perf_counter())
                continue
            answer: dict[str, Any] = json.loads(message)
            if answer["type"] in ("response.incomplete", "response.completed"):
                num_tokens = answer["response"]["usage"]["output_tokens"]
                run.times += [time.perf_counter()] * (num_tokens - len(run.times))
                break
            if answer["type"] in ("error", "response.failed"):
                raise UnavailableError(f"the gateway answered {answer}")
        return run

    def close(self) -> None:
        self._runner.close()
        self._process.terminate()
        self._process.communicate()


def _with_room(settings: Settings) -> Settings:
    return Settings(
        model_dir=settings.model_dir,
        device=settings.device,
        num_threads=settings.num_threads,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len + _TEMPLATE_TOKENS,
    )
