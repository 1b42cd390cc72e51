"""The command's options: flags, and for each an environment variable TINYVLLM_NAME."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm import DEFAULT_MODEL, ConfigError, EngineConfig
from tinyvllm.gateway.limits import Limits
from tinyvllm.gateway.web import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "max_queued_requests",
    "num_threads",
    "scheduling",
)
_LIMIT_FLAGS = (
    "max_connections",
    "max_active",
    "max_lanes",
    "max_events_per_second",
    "max_message_bytes",
    "max_conversations",
    "resume_seconds",
    "stall_seconds",
    "behind_seconds",
    "idle_seconds",
    "handshake_seconds",
    "ping_seconds",
)
_DEFAULTS = Limits()


class _Parser(argparse.ArgumentParser):
    """Takes a flag's default from the environment, through the flag's own check."""

    def __init__(self, *args: Any, environ: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environ = environ

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given: list[str] = []
        for action in self._actions:
            name = f"TINYVLLM_{action.dest.upper()}"
            value = self._environ.get(name, "")
            if not value or not action.option_strings or action.dest == "help":
                continue
            flag = action.option_strings[-1]
            if action.nargs == 0:
                if value.lower() in ("1", "true", "yes", "on"):
                    given.append(flag)
                elif value.lower() not in ("0", "false", "no", "off"):
                    self.error(f"{name}: {value!r} is neither 1 nor 0")
            elif isinstance(action, argparse._AppendAction):
                given += [f"{flag}={part}" for part in value.split()]
            else:
                given.append(f"{flag}={value}")
        argv = sys.argv[1:] if args is None else args
        return super().parse_args([*given, *argv], namespace)


def build_parser(environ: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """The command's parser, over `environ` (None: the process's)."""
    parser = _Parser(
        prog="python -m tinyvllm.gateway",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve one model: a chat page at /, and OpenAI's Responses API over WebSocket "
        "at\n/v1/responses.",
        epilog="Every flag can be set in the environment: --max-num-seqs 8 is "
        "TINYVLLM_MAX_NUM_SEQS=8.\n\nWith openai-python:\n  AsyncOpenAI(base_url="
        "'http://127.0.0.1:8765/v1', api_key='none').responses.connect()",
        environ=os.environ if environ is None else environ,
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="an alias, a directory, or org/name (default: %(default)s)",
    )
    _add_network(parser.add_argument_group("network"))
    _add_safety(parser.add_argument_group("who may connect"))
    _add_limits(parser.add_argument_group("limits and times, in seconds"))
    _add_logs(parser.add_argument_group("logs"))
    _add_engine(parser.add_argument_group("engine", "defaults suit the machine and the model"))
    return parser


def _add_network(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port",
        type=_port,
        default=8765,
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, if not in there")
    group.add_argument(
        "--compression",
        action="store_true",
        help="permessage-deflate: for slow links; costs memory and time per connection",
    )
    group.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="after SIGTERM or SIGINT, running answers have this long (default: %(default)g)",
    )


def _add_safety(group: Any) -> None:
    group.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token that clients must show"
    )
    group.add_argument(
        "--token", help="the token itself; others see flags, so rather set TINYVLLM_TOKEN"
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="allow a --host that other machines can reach without a token",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        type=_origin,
        metavar="ORIGIN",
        help="a site whose pages may connect too, like https://chat.example; repeatable",
    )


def _add_limits(group: Any) -> None:
    def add(name: str, kind: Any, metavar: str, text: str) -> None:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(_DEFAULTS, name),
            metavar=metavar,
            help=f"{text} (default: %(default)g)",
        )

    add("max_connections", _positive, "N", "sockets that are open at once")
    add("max_active", _positive, "N", "responses of one connection that run at once")
    add("max_lanes", _positive, "N", "lanes of one connection")
    add("max_events_per_second", _seconds, "N", "events of one connection; 0: no bound")
    add("max_message_bytes", _positive, "N", "largest event a client may send")
    add("max_conversations", _positive, "N", "responses that can be continued by their id")
    add("resume_seconds", _seconds, "S", "a response outlives its last socket this long")
    add("stall_seconds", _above_zero, "S", "a socket that takes nothing this long is cut")
    add("behind_seconds", _above_zero, "S", "one that never catches up this long is closed")
    add("idle_seconds", _above_zero, "S", "one without any event or work this long is closed")
    add("handshake_seconds", _above_zero, "S", "time for the opening handshake")
    add("ping_seconds", _above_zero, "S", "silence before a ping")


def _add_logs(group: Any) -> None:
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="info: a line per socket and response, without what people write "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="(default: %(default)s)"
    )


def _add_engine(group: Any) -> None:
    group.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    group.add_argument(
        "--ops", choices=("native", "reference"), help="reference: plain torch, slow, for debugging"
    )
    group.add_argument(
        "--max-num-seqs", type=_positive, metavar="N", help="requests that run at once"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=_positive, metavar="N", help="token budget of one step"
    )
    group.add_argument(
        "--max-model-len", type=_positive, metavar="N", help="prompt plus answer, in tokens"
    )
    group.add_argument("--num-blocks", type=_positive, metavar="N", help="KV cache blocks")
    group.add_argument(
        "--expected-seq-len",
        type=_positive,
        metavar="N",
        help="tokens that a typical request reaches; sizes the KV cache without --num-blocks",
    )
    group.add_argument("--block-size", type=int, choices=(16, 32), help="tokens per KV block")
    group.add_argument(
        "--max-buffered-tokens",
        type=_positive,
        metavar="N",
        help="a response whose reader lags more waits until it drains",
    )
    group.add_argument(
        "--max-queued-requests",
        type=_positive,
        metavar="N",
        help="requests that may wait for a slot; one more is refused",
    )
    group.add_argument("--num-threads", type=_positive, metavar="N", help="CPU threads")
    group.add_argument("--scheduling", choices=("continuous", "static"))
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="compute shared prompt beginnings anew"
    )
    group.add_argument(
        "--no-async-scheduling",
        action="store_true",
        help="wait for a step's tokens before the next is scheduled",
    )
    group.add_argument(
        "--enforce-eager", action="store_true", help="never capture step graphs: for debugging"
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine flags that were given, over the defaults. Raises `ConfigError`."""
    chosen = {
        name: getattr(args, name) for name in _ENGINE_FLAGS if getattr(args, name) is not None
    }
    if args.no_prefix_caching:
        chosen["enable_prefix_caching"] = False
    if args.no_async_scheduling:
        chosen["async_scheduling"] = False
    if args.enforce_eager:
        chosen["enforce_eager"] = True
    return EngineConfig(**chosen)


def limits(args: argparse.Namespace) -> Limits:
    return Limits(**{name: getattr(args, name) for name in _LIMIT_FLAGS})


def read_token(args: argparse.Namespace) -> str | None:
    """The token of the flags, if any. Raises `ConfigError`."""
    token: str | None = args.token
    if args.token_file is not None:
        try:
            token = args.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as exc:
            raise ConfigError(f"--token-file {args.token_file}: {exc}", param="token_file") from exc
    if token is not None and not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", token):
        raise ConfigError(
            "the token must be made of letters, digits and !#$%&'*+-.^_`|~ only: browsers send it "
            "as a WebSocket subprotocol",
            param="token",
        )
    if token is None and not is_loopback(args.host) and not args.insecure:
        raise ConfigError(
            f"--host {args.host} lets other machines in; set a token (TINYVLLM_TOKEN or "
            "--token-file), or add --insecure if everyone may use it",
            param="host",
        )
    return token


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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def _above_zero(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value
