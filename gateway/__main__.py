"""`python -m tinyvllm.gateway`: one model behind a chat page and OpenAI's Responses protocol.

The port is taken first, so that a busy one fails at once, but connections are refused until the
model is ready. Standard output gets one line, the URL, when they are accepted; progress, logs and
errors go to standard error. SIGINT and SIGTERM drain: no new work, running answers have
`--drain-seconds`, every client is told, sockets close with 1012, exit code 0. A second one aborts.

One process, one engine: there is no --workers. Every worker would load its own weights and KV
cache and batch only its own requests, and one loop moves more tokens than one engine makes.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm import AsyncEngine, ConfigError, EngineConfig, TinyvllmError
from tinyvllm.gateway import flags, logs
from tinyvllm.gateway.server import Gateway

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Sequence


def main(
    argv: Sequence[str] | None = None,
    *,
    new_engine: Callable[[str, EngineConfig], AsyncEngine] = AsyncEngine,
) -> int:
    """Serve until a signal. Returns the exit code: 0, 1 (cannot serve) or 2 (wrong arguments)."""
    args = flags.build_parser().parse_args(argv)
    try:
        token = flags.read_token(args)
        config = flags.engine_config(args)
        ssl_context = tls_context(args)
    except ConfigError as exc:
        return _refuse(str(exc), 2)
    try:
        sock = bind(args.host, args.port)
    except OSError as exc:
        return _refuse(_listen_error(args.host, args.port, exc), 1)
    logs.configure(level=args.log_level, json_lines=args.log_format == "json")
    logs.show_progress()
    with sock:
        try:
            return _run(_serve(args, config, token, ssl_context, sock, new_engine))
        except (TinyvllmError, _ListenError) as exc:
            return _refuse(str(exc), 1)


class _ListenError(Exception):
    """The port was taken between `bind` and the moment the model was ready."""


def tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    """Of --tls-cert and --tls-key. Raises `ConfigError`."""
    if args.tls_cert is None:
        if args.tls_key is not None:
            raise ConfigError("--tls-key needs --tls-cert", param="tls_key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.tls_cert, args.tls_key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"--tls-cert {args.tls_cert}: {exc}", param="tls_cert") from exc
    return context


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port that does not listen yet. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _serve(
    args: argparse.Namespace,
    config: EngineConfig,
    token: str | None,
    ssl_context: ssl.SSLContext | None,
    sock: socket.socket,
    new_engine: Callable[[str, EngineConfig], AsyncEngine],
) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())

    started = time.perf_counter()
    engine = new_engine(args.model, config)
    try:
        if not await _unless(stop, engine.start()):
            return 0
        compression: Literal["deflate"] | None = "deflate" if args.compression else None
        gateway = Gateway(
            engine,
            host=args.host,
            sock=sock,
            token=token,
            allowed_origins=args.allow_origin,
            compression=compression,
            ssl_context=ssl_context,
            limits=flags.limits(args),
        )
        try:
            await gateway.start()
        except OSError as exc:
            raise _ListenError(_listen_error(args.host, args.port, exc)) from exc
        async with gateway:
            seconds = time.perf_counter() - started
            print(f"ready in {seconds:.1f} s; Ctrl-C stops", file=sys.stderr, flush=True)
            # What is loaded stays: collections need not go through it again and again, and tokens,
            # which are freed by their counts, need not start one every few milliseconds.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 20)
            print(gateway.url, flush=True)
            await stop.wait()
            if count := len(gateway.responses.live):
                print(
                    f"waiting up to {args.drain_seconds:g} s for {count} running "
                    f"response{'s' if count > 1 else ''}; Ctrl-C again stops at once",
                    file=sys.stderr,
                    flush=True,
                )
            if not await _unless(stop_now, gateway.drain(args.drain_seconds)):
                gateway.abort()
    finally:
        await engine.aclose()
    return 0


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run `work`, unless `stop` is set before it is done: then cancel it and return False."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        return False
    await task
    return True


def _run(work: Coroutine[Any, Any, int]) -> int:
    """asyncio.run, under uvloop where it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    # The engine thread and the loop pass the GIL to each other: by default after 5 ms at most.
    sys.setswitchinterval(0.001)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def _refuse(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _listen_error(host: str, port: int, exc: OSError) -> str:
    return f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another with --port"


if __name__ == "__main__":
    sys.exit(main())
