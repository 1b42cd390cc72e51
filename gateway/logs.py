"""Log lines of the command: text or JSON, on standard error. What people write is in none."""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`INFO tinyvllm.gateway: response completed tag=5f3a09c1 output_tokens=12`."""

    def format(self, record: logging.LogRecord) -> str:
        details = "".join(f" {name}={value}" for name, value in _details(record).items())
        text = f"{record.levelname} {record.name}: {record.getMessage()}{details}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record carries."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_details(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _details(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as `extra`."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and value is not None
    }


def configure(*, level: str, json_lines: bool) -> None:
    """Send every log record to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())


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
        other.addFilter(
            lambda record: record.name != "tinyvllm.engine" or record.levelno > logging.INFO
        )
