"""`python -m tinyvllm.gateway`: one model behind a chat page and OpenAI's Responses protocol.

The port is taken first, so that a busy one fails at once, but connections are refused until the
model is ready. Standard output gets one line, the URL, when they are accepted; progress and errors
go to standard error. SIGINT and SIGTERM close every socket with 1012, abort what runs and exit
with 0; a second one does not wait for the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm import DEFAULT_MODEL, AsyncEngine, ConfigError, EngineConfig, TinyvllmError
from tinyvllm.gateway.server import Gateway, Limits
from tinyvllm.gateway.web import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

_ENGINE_FLAGS = (
    "device",
    "dtype",
    "ops",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_blocks",
    "expected_seq_len",
    "block_size",
    "max_buffered_tokens",
    "num_threads",
    "scheduling",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinyvllm.gateway",
        description="Serve one model: a chat page at /, and OpenAI's Responses API over WebSocket "
        "at /v1/responses.",
        epilog="With openai-python: AsyncOpenAI(base_url='http://127.0.0.1:8765/v1', "
        "api_key='none').responses.connect()",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="an alias, a directory, or org/name (default: %(default)s)",
    )

    network = parser.add_argument_group("network")
    network.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    network.add_argument(
        "--port",
        type=_port,
        default=8765,
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    network.add_argument(
        "--insecure",
        action="store_true",
        help="allow a --host that other machines can reach: there is no authentication yet",
    )
    network.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        type=_origin,
        metavar="ORIGIN",
        help="a site whose pages may connect too, like https://chat.example; repeatable",
    )
    network.add_argument(
        "--compression",
        action="store_true",
        help="permessage-deflate: for slow links; costs memory and time per connection",
    )
    network.add_argument(
        "--max-message-bytes",
        type=_positive,
        default=Limits().max_message_bytes,
        metavar="N",
        help="largest event a client may send (default: %(default)s)",
    )

    engine = parser.add_argument_group("engine", "defaults suit the machine and the model")
    engine.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    engine.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    engine.add_argument(
        "--ops", choices=("native", "reference"), help="reference: plain torch, slow, for debugging"
    )
    engine.add_argument(
        "--max-num-seqs", type=_positive, metavar="N", help="requests that run at once"
    )
    engine.add_argument(
        "--max-num-batched-tokens", type=_positive, metavar="N", help="token budget of one step"
    )
    engine.add_argument(
        "--max-model-len", type=_positive, metavar="N", help="prompt plus answer, in tokens"
    )
    engine.add_argument("--num-blocks", type=_positive, metavar="N", help="KV cache blocks")
    engine.add_argument(
        "--expected-seq-len",
        type=_positive,
        metavar="N",
        help="tokens that a typical request reaches; sizes the KV cache without --num-blocks",
    )
    engine.add_argument("--block-size", type=int, choices=(16, 32), help="tokens per KV block")
    engine.add_argument(
        "--max-buffered-tokens",
        type=_positive,
        metavar="N",
        help="a response whose reader lags more waits until it drains",
    )
    engine.add_argument("--num-threads", type=_positive, metavar="N", help="CPU threads")
    engine.add_argument("--scheduling", choices=("continuous", "static"))
    engine.add_argument(
        "--no-prefix-caching", action="store_true", help="compute shared prompt beginnings anew"
    )
    engine.add_argument(
        "--enforce-eager", action="store_true", help="never capture step graphs: for debugging"
    )
    return parser


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine flags that were given, over the defaults. Raises `ConfigError`."""
    chosen = {
        name: getattr(args, name) for name in _ENGINE_FLAGS if getattr(args, name) is not None
    }
    if args.no_prefix_caching:
        chosen["enable_prefix_caching"] = False
    if args.enforce_eager:
        chosen["enforce_eager"] = True
    return EngineConfig(**chosen)


def main(
    argv: Sequence[str] | None = None,
    *,
    new_engine: Callable[[str, EngineConfig], AsyncEngine] = AsyncEngine,
) -> int:
    """Serve until a signal. Returns the exit code: 0, 1 (cannot serve) or 2 (wrong arguments)."""
    args = build_parser().parse_args(argv)
    if not is_loopback(args.host) and not args.insecure:
        return _refuse(
            f"--host {args.host} lets other machines in, and there is no authentication yet; "
            "add --insecure if that is meant",
            2,
        )
    try:
        config = engine_config(args)
    except ConfigError as exc:
        return _refuse(str(exc), 2)
    try:
        sock = bind(args.host, args.port)
    except OSError as exc:
        return _refuse(_listen_error(args.host, args.port, exc), 1)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    show_progress()
    with sock:
        try:
            return _run(_serve(args, config, sock, new_engine))
        except (TinyvllmError, _ListenError) as exc:
            return _refuse(str(exc), 1)


class _ListenError(Exception):
    """The port was taken between `bind` and the moment the model was ready."""


class _ProgressHandler(logging.Handler):
    """Shows the engine's reports while it loads, "%s: %.0f %%" of phase and percentage: a line
    that counts on a terminal, a line per phase elsewhere."""

    _phase = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple) or len(record.args) != 2:
            return
        phase, percent = record.args
        if sys.stderr.isatty():
            end = "\n" if percent == 100 else ""
            print(f"\r\x1b[K{record.getMessage()}", end=end, file=sys.stderr, flush=True)
        elif phase != self._phase and percent != 100:
            print(f"{phase} ...", file=sys.stderr, flush=True)
        self._phase = str(phase)


def show_progress() -> None:
    """Print what the engine logs of its loading on standard error, and nothing twice."""
    engine_logger = logging.getLogger("tinyvllm.engine")
    engine_logger.setLevel(logging.INFO)
    handler = _ProgressHandler(logging.INFO)
    handler.addFilter(lambda record: record.levelno == logging.INFO)
    engine_logger.addHandler(handler)
    for other in logging.getLogger().handlers:
        other.addFilter(lambda record: record.levelno > logging.INFO)


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
    sock: socket.socket,
    new_engine: Callable[[str, EngineConfig], AsyncEngine],
) -> int:
    stop = asyncio.Event()
    gateway: Gateway | None = None

    def on_signal() -> None:
        if stop.is_set() and gateway is not None:
            gateway.abort()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

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
            allowed_origins=args.allow_origin,
            compression=compression,
            limits=Limits(max_message_bytes=args.max_message_bytes),
        )
        try:
            await gateway.start()
        except OSError as exc:
            raise _ListenError(_listen_error(args.host, args.port, exc)) from exc
        async with gateway:
            seconds = time.perf_counter() - started
            print(f"ready in {seconds:.1f} s; Ctrl-C stops", file=sys.stderr, flush=True)
            print(gateway.url, flush=True)
            await stop.wait()
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
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def _refuse(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _listen_error(host: str, port: int, exc: OSError) -> str:
    return f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another with --port"


def _origin(text: str) -> str:
    if not re.fullmatch(r"https?://[^/?#\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin, like https://chat.example")
    return text


def _port(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return value


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
