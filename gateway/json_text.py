"""JSON as the wire wants it: orjson where it is installed, else the standard library, as strict.

`loads(text)` raises ValueError for anything that is not JSON, NaN and lone surrogates among it, and
RecursionError or ValueError for nesting without end. `dumps(value)` gives compact UTF-8.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def json_loads(text: str) -> Any:
    value = json.loads(text, parse_constant=_no_constant)
    # A lone surrogate ("\\ud800") has no UTF-8 form, and no tokenizer takes it.
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


loads: Callable[[str], Any] = json_loads
dumps: Callable[[object], bytes] = json_dumps
if importlib.util.find_spec("orjson") is not None:
    orjson: Any = importlib.import_module("orjson")  # optional, so untyped: lint may not have it
    loads, dumps = orjson.loads, orjson.dumps
