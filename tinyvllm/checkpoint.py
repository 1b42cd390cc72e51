"""Safetensors files, read through mmap and believed only after every number in them is checked.

The header comes from a stranger: lengths, offsets and shapes are compared with the file before a
byte of data is touched, so that a damaged or hostile file is a `CheckpointError` that names file
and tensor, and never a crash, a huge allocation or silent zeros. Weights are not searched for NaN:
that would read every byte of the file once more. `TensorEntry.read_into` reads without the mapping,
for staging.py.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tinyvllm.errors import CheckpointError, ModelError

_MAX_JSON_BYTES = 10 << 20  # 60,000 tensors; the largest dense llama has 1,200
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


def check_regular_file(path: Path, error: type[ModelError]) -> int:
    """The size of the file at `path`; raises `error` unless it is a readable regular file."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise error(f"{path}: no such file", path=path) from None
    except (OSError, ValueError) as exc:  # a symlink loop, a path that is too long, no permission
        raise error(f"{path}: cannot be read: {exc}", path=path) from exc
    if not stat.S_ISREG(info.st_mode):
        raise error(f"{path}: is not a regular file", path=path)
    return info.st_size


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def parse_json_object(
    data: bytes, where: str, path: Path, error: type[ModelError]
) -> dict[str, Any]:
    """`data` as a JSON object without NaN or duplicate keys; else `error`, which names `where`."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as exc:
        raise error(f"{where} is not valid JSON: {exc}", path=path) from exc
    if not isinstance(value, dict):
        raise error(f"{where} must be a JSON object; got {type(value).__name__}", path=path)
    return value


def read_json_object(path: Path, error: type[ModelError]) -> dict[str, Any]:
    """The JSON object in the file at `path`; raises `error`, which names the file."""
    size = check_regular_file(path, error)
    if size > _MAX_JSON_BYTES:
        raise error(f"{path}: {size} bytes is too large (at most {_MAX_JSON_BYTES})", path=path)
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise error(f"{path}: cannot be read: {exc}", path=path) from exc
    return parse_json_object(data, str(path), path, error)


class _OpenFile:
    """A descriptor that is closed when nothing refers to this object any more."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file: bytes [begin, end) of its mapped `data`."""

    path: Path
    file: _OpenFile
    data: mmap.mmap
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def check_dtype(self) -> torch.dtype:
        """The torch dtype; raises `CheckpointError` unless it is one that weights may have."""
        dtype = _FLOATS.get(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {self.name} has dtype {self.dtype}; "
                f"expected {', '.join(_FLOATS)}",
                path=self.path,
                tensor=self.name,
            )
        return dtype

    def raw(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes as a view of the mapped file. Do not write to it."""
        return np.frombuffer(self.data, np.uint8, self.end - self.begin, self.begin)

    def read(self) -> torch.Tensor:
        """The tensor as a view of the mapped file, in the file's dtype. Do not write to it."""
        dtype = self.check_dtype()
        raw = torch.from_numpy(self.raw())
        if self.begin % dtype.itemsize:  # legal, though writers pad the header to 8 bytes
            raw = raw.clone()
        return raw.view(dtype).view(self.shape)

    def read_into(self, out: memoryview, begin: int) -> None:
        """Fill `out` with the tensor's bytes from number `begin` on, by reads of the file (they
        need no GIL, and no page fault for every few pages as the mapping does)."""
        offset = self.begin + begin
        while out:
            try:
                count = os.preadv(self.file.fd, [out], offset)
            except OSError as exc:
                raise self._cannot_be_read(offset, str(exc)) from exc
            if count == 0:
                raise self._cannot_be_read(offset, "it ends there, and was longer before")
            out = out[count:]
            offset += count

    def _cannot_be_read(self, offset: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor {self.name} cannot be read at offset {offset}: {why}",
            path=self.path,
            tensor=self.name,
        )


class SafetensorsFile:
    """One mapped file; `tensors` holds its entries by name. Raises `CheckpointError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = check_regular_file(path, CheckpointError)
        if self.size < 8:
            self._fail(
                f"is {self.size} bytes long; a safetensors file begins with 8 bytes of length"
            )
        try:
            with path.open("rb") as file:
                # A private writable mapping: torch warns about buffers that are read-only.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._file = _OpenFile(file.fileno())
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path}: cannot be mapped: {exc}", path=path) from exc
        header_size = int.from_bytes(self.data[:8], "little")
        if header_size > self.size - 8:
            self._fail(
                f"says its header has {header_size} bytes at offset 8, but the file ends at "
                f"{self.size}: truncated, or not a safetensors file"
            )
        if header_size > _MAX_JSON_BYTES:
            self._fail(f"has a header of {header_size} bytes (at most {_MAX_JSON_BYTES})")
        header = parse_json_object(
            self.data[8 : 8 + header_size], f"{path}: the header", path, CheckpointError
        )
        header.pop("__metadata__", None)
        self._data_begin = 8 + header_size
        self.tensors = {name: self._entry(name, value) for name, value in header.items()}
        self._check_layout()

    def _fail(self, problem: str, tensor: str | None = None) -> NoReturn:
        what = "" if tensor is None else f"tensor {tensor!r} "
        raise CheckpointError(f"{self.path}: {what}{problem}", path=self.path, tensor=tensor)

    def _entry(self, name: str, value: object) -> TensorEntry:
        if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
            self._fail("needs dtype, shape and data_offsets in the header", name)
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
            self._fail(f"has the unknown dtype {dtype!r}", name)
        if not _is_sizes(shape) or len(shape) > 8:
            self._fail(f"has the impossible shape {str(shape)[:100]}", name)
        if not _is_sizes(offsets) or len(offsets) != 2:
            self._fail(f"has the impossible data_offsets {str(offsets)[:100]}", name)
        begin, end = (self._data_begin + offset for offset in offsets)
        if begin > end:
            self._fail(f"ends at offset {end}, before its begin at {begin}", name)
        if end > self.size:
            self._fail(
                f"lies at offsets {begin} to {end}, but the file ends at {self.size}: truncated",
                name,
            )
        num_bytes = math.prod(shape) * _ITEM_SIZES[dtype]
        if end - begin != num_bytes:
            self._fail(
                f"of {dtype} {shape} needs {num_bytes} bytes, but its offsets {begin} to {end} "
                f"hold {end - begin}",
                name,
            )
        return TensorEntry(self.path, self._file, self.data, name, dtype, tuple(shape), begin, end)

    def _check_layout(self) -> None:
        """The format's own rule: tensors fill the data section, without overlaps or holes."""
        entries = sorted(self.tensors.values(), key=lambda entry: (entry.begin, entry.end))
        if entries and entries[0].begin != self._data_begin:
            self._fail(f"does not begin where the data does ({self._data_begin})", entries[0].name)
        for before, entry in pairwise(entries):
            if entry.begin < before.end:
                self._fail(f"overlaps tensor {before.name!r} at offset {entry.begin}", entry.name)
            if entry.begin > before.end:
                self._fail(f"leaves a hole before it at offset {before.end}", entry.name)
        end = entries[-1].end if entries else self._data_begin
        if end != self.size:
            self._fail(f"has {self.size - end} bytes after its last tensor (offset {end})")


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in value
    )


def open_checkpoint(model_dir: Path) -> dict[str, TensorEntry]:
    """All tensors of a model directory by name, from one file or from an index and its shards."""
    if (model_dir / _SINGLE).exists() or (model_dir / _SINGLE).is_symlink():
        return SafetensorsFile(model_dir / _SINGLE).tensors
    index_path = model_dir / _INDEX
    if not index_path.exists():
        raise CheckpointError(
            f"{model_dir}: neither {_SINGLE} nor {_INDEX}; only safetensors weights are read",
            path=model_dir,
        )
    weight_map = read_json_object(index_path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map", path=index_path)
    files: dict[str, SafetensorsFile] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name == "..":
            raise CheckpointError(
                f"{index_path}: tensor {name!r} is mapped to {file_name!r}, not to a file name",
                path=index_path,
                tensor=name,
            )
        if file_name not in files:
            files[file_name] = SafetensorsFile(model_dir / file_name)
        if name not in files[file_name].tensors:
            raise CheckpointError(
                f"{model_dir / file_name}: tensor {name!r} is missing, but {_INDEX} maps it here",
                path=model_dir / file_name,
                tensor=name,
            )
    entries: dict[str, TensorEntry] = {}
    for file_name, file in files.items():
        for name, entry in file.tensors.items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} is in this file, but {_INDEX} maps it to "
                    f"{weight_map.get(name)!r}",
                    path=file.path,
                    tensor=name,
                )
            entries[name] = entry
    return entries
