"""GGUF files, read through mmap with every count and offset checked against the file's size.

The `gguf` package's own reader trusts the counts it finds; it serves here only to dequantize.
Layout: magic, version, tensor count, key count; then keys (name, type, value), then tensor infos
(name, dimensions, type, offset), then, aligned, the data. All little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tinyvllm.checkpoint import check_regular_file
from tinyvllm.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in row-major (HF) order, quantized `data` as [rows, bytes per row]."""

    path: Path
    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def dequantize_rows(self, begin: int, end: int) -> _Floats:
        """Rows [begin, end) of the tensor, seen as a matrix, as f32. Raises `CheckpointError`."""
        try:
            with np.errstate(all="ignore"):  # non-finite results are reported below
                values: _Floats = dequantize(self.data[begin:end], self.quantization)
        except NotImplementedError:
            self._fail(f"is quantized as {self.quantization.name}, which is not supported")
        if not np.isfinite(values).all():
            self._fail("has values that are not finite")
        return values

    def _fail(self, problem: str) -> NoReturn:
        message = f"{self.path}: tensor {self.name} {problem}"
        raise CheckpointError(message, path=self.path, tensor=self.name)


class GgufFile:
    """`metadata` by key and `tensors` by name. Raises `CheckpointError` for any damage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = check_regular_file(path, CheckpointError)
        if self._size < 24:
            self.fail(f"is {self._size} bytes long: not a GGUF file")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path}: cannot be mapped: {exc}", path=path) from exc
        self._offset = 0
        if self._take(4) != b"GGUF":
            self.fail("does not begin with GGUF")
        version = self._number("<I")
        if version not in (2, 3):
            self.fail(f"has GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        # A key takes at least 13 bytes and a tensor 24, which bounds both loops by the file's size.
        if num_keys * 13 + num_tensors * 24 > self._size:
            self.fail(f"says it holds {num_keys} keys and {num_tensors} tensors: truncated")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                self.fail(f"has the key {key!r} twice")
            self.metadata[key] = self._value(self._number("<I"), key)
        self.tensors: dict[str, GgufTensor] = {}
        for info in [self._tensor_info() for _ in range(num_tensors)]:
            if info[0] in self.tensors:
                self.fail(f"has tensor {info[0]!r} twice")
            self.tensors[info[0]] = self._tensor(*info)

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}", path=self.path)

    def _take(self, size: int) -> bytes:
        begin, end = self._offset, self._offset + size
        if end > self._size:
            self.fail(f"needs {size} bytes at offset {begin}, but ends at {self._size}: truncated")
        self._offset = end
        return self._data[begin:end]

    def _number(self, fmt: str) -> int:
        value: int = struct.unpack(fmt, self._take(struct.calcsize(fmt)))[0]
        return value

    def _string(self) -> str:
        begin = self._offset
        try:
            return self._take(self._number("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"has a string that is not UTF-8 at offset {begin}")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind != _ARRAY:
            self.fail(f"key {key!r} has the unknown type {kind}")
        item_kind, count = self._number("<I"), self._number("<Q")
        if item_kind in _SCALARS:
            return self._scalars(item_kind, count)
        if item_kind != _STRING:
            self.fail(f"key {key!r} is an array of the unsupported type {item_kind}")
        if count * 8 > self._size - self._offset:
            self.fail(f"key {key!r} says it has {count} strings: truncated")
        return [self._string() for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            self.fail(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dims))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            self.fail(f"tensor {name!r} has the unknown quantization {kind}")
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
        if min(shape) < 1 or shape[-1] % block_size:
            self.fail(f"tensor {name!r} of {quantization.name} has the impossible shape {shape}")
        row_bytes = shape[-1] // block_size * block_bytes
        num_rows = math.prod(shape[:-1])
        begin, size = self._data_begin() + offset, num_rows * row_bytes
        if begin + size > self._size:
            self.fail(
                f"tensor {name!r} lies at offsets {begin} to {begin + size}, but the file ends at "
                f"{self._size}: truncated"
            )
        data = np.frombuffer(self._data, np.uint8, size, begin).reshape(num_rows, row_bytes)
        return GgufTensor(self.path, name, shape, quantization, data)

    def _data_begin(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            self.fail(f"general.alignment is {alignment!r}")
        return -(-self._offset // alignment) * alignment
