"""Broken weight files: each a CheckpointError with file and tensor, in under a second."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_models import make_tiny_model, random_weights, save_weights, write_json

from tinyvllm.errors import CheckpointError, TinyvllmError
from tinyvllm.loader import load_config, load_model
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def load(path: Path) -> None:
    load_model(
        path,
        load_config(path),
        get_ops("reference"),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_model_len=64,
    )


def read_file(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_file(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def with_entry(name: str = Q_PROJ, **changes: Any) -> Callable[[Path], None]:
    """Changes one tensor's header entry; its data stays."""

    def breaker(path: Path) -> None:
        header, data = read_file(path / SINGLE)
        header[name] = {**header[name], **changes}
        write_file(path / SINGLE, header, data)

    return breaker


def with_offsets(change: Callable[[int, int, int], list[Any]]) -> Callable[[Path], None]:
    """`change(begin, end, data size)` gives q_proj's new data_offsets."""

    def breaker(path: Path) -> None:
        header, data = read_file(path / SINGLE)
        begin, end = header[Q_PROJ]["data_offsets"]
        with_entry(data_offsets=change(begin, end, len(data)))(path)

    return breaker


def with_header(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        header, data = read_file(path / SINGLE)
        write_file(path / SINGLE, make(json.dumps(header).encode()), data)

    return breaker


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        (path / SINGLE).write_bytes(change((path / SINGLE).read_bytes()))

    return breaker


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        weights = random_weights(path, torch.bfloat16)
        change(weights)
        save_weights(path, weights)

    return breaker


def with_config(**changes: Any) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        values = json.loads((path / "config.json").read_text())
        write_json(path / "config.json", {**values, **changes})

    return breaker


def replaced_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        (path / SINGLE).unlink()
        make(path / SINGLE)

    return breaker


def with_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        (path / SINGLE).unlink()
        save_weights(path, random_weights(path, torch.bfloat16), num_shards=3)
        index = json.loads((path / INDEX).read_text())
        write_json(path / INDEX, change(index) or index)

    return breaker


def after_sharding(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def breaker(path: Path) -> None:
        with_index(lambda index: None)(path)
        change(path)

    return breaker


def huge_sparse_header(path: Path) -> None:
    """200 MB of header, all holes: must be refused before it is read."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200 << 20))
        file.truncate(300 << 20)


def replace_entry(header: bytes, text: str) -> bytes:
    values = json.loads(header)
    values[Q_PROJ] = "@@"
    return json.dumps(values).replace('"@@"', text).encode()


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda weights: weights.pop(name)


# name, what the message must hold (file and tensor, mostly), how to break a good directory
CORPUS: list[tuple[str, str, Callable[[Path], None]]] = [
    ("no-weights", "neither model.safetensors nor", replaced_by(lambda p: None)),
    ("only-pickle", "only safetensors", replaced_by(lambda p: p.with_name("x.bin").touch())),
    ("empty-file", "is 0 bytes long", with_bytes(lambda b: b"")),
    ("seven-bytes", "is 7 bytes long", with_bytes(lambda b: b[:7])),
    ("only-length", "truncated", with_bytes(lambda b: b[:8])),
    ("cut-in-header", "truncated", with_bytes(lambda b: b[:200])),
    ("cut-in-data", "truncated", with_bytes(lambda b: b[:-1])),
    ("cut-by-half", "truncated", with_bytes(lambda b: b[: len(b) // 2])),
    ("grown", "5 bytes after its last tensor", with_bytes(lambda b: b + b"extra")),
    ("zeros", "not valid JSON", with_bytes(lambda b: bytes(len(b)))),
    ("not-safetensors", "truncated, or not", with_bytes(lambda b: b"PK\3\4" * 100)),
    ("length-max", "truncated", with_bytes(lambda b: b"\xff" * 8 + b[8:])),
    ("length-zero", "not valid JSON", with_bytes(lambda b: bytes(8) + b[8:])),
    ("header-bomb", "has a header of 209715200 bytes", replaced_by(huge_sparse_header)),
    ("depth-bomb", "not valid JSON", with_header(lambda h: b"[" * 1_000_000)),
    ("depth-bomb-objects", "not valid JSON", with_header(lambda h: b'{"a":' * 1_000_000)),
    ("digits-bomb", "not valid JSON", with_header(lambda h: b'{"a":' + b"9" * 1_000_000 + b"}")),
    ("nan-header", "NaN is not JSON", with_header(lambda h: replace_entry(h, "NaN"))),
    (
        "infinity-header",
        "Infinity is not JSON",
        with_header(lambda h: replace_entry(h, "Infinity")),
    ),
    ("header-not-utf8", "not valid JSON", with_header(lambda h: b"\xff" + h)),
    ("header-list", "must be a JSON object", with_header(lambda h: b"[]")),
    ("header-text", "must be a JSON object", with_header(lambda h: b'"model"')),
    ("header-empty", "bytes after its last tensor", with_header(lambda h: b"{}")),
    (
        "duplicate-name",
        f"duplicate key '{EMBED}'",
        with_header(lambda h: h[:-1] + f', "{EMBED}": {{}}}}'.encode()),
    ),
    ("entry-list", Q_PROJ, with_header(lambda h: replace_entry(h, "[]"))),
    ("entry-empty", Q_PROJ, with_header(lambda h: replace_entry(h, "{}"))),
    ("dtype-number", Q_PROJ, with_entry(dtype=7)),
    ("dtype-unknown", Q_PROJ, with_entry(dtype="BF17")),
    ("dtype-other-size", Q_PROJ, with_entry(dtype="F32")),
    ("shape-text", Q_PROJ, with_entry(shape="256,128")),
    ("shape-negative", Q_PROJ, with_entry(shape=[-256, -128])),
    ("shape-float", Q_PROJ, with_entry(shape=[256.0, 128])),
    ("shape-bool", Q_PROJ, with_entry(shape=[True, 128])),
    ("shape-huge", Q_PROJ, with_entry(shape=[2**62, 2**62])),
    ("shape-endless", Q_PROJ, with_entry(shape=[1] * 100_000)),
    ("shape-size", Q_PROJ, with_entry(shape=[256, 127])),
    ("shape-transposed", f"{Q_PROJ} has shape [128, 256]", with_entry(shape=[128, 256])),
    ("shape-flat", f"{Q_PROJ} has shape [32768]", with_entry(shape=[32768])),
    ("offsets-three", Q_PROJ, with_offsets(lambda b, e, n: [b, e, n])),
    ("offsets-reversed", Q_PROJ, with_offsets(lambda b, e, n: [e, b])),
    ("offsets-negative", Q_PROJ, with_offsets(lambda b, e, n: [b - e, 0])),
    ("offsets-float", Q_PROJ, with_offsets(lambda b, e, n: [float(b), float(e)])),
    ("offsets-past-end", Q_PROJ, with_offsets(lambda b, e, n: [n, n + e - b])),
    ("offsets-overflow", Q_PROJ, with_offsets(lambda b, e, n: [2**63 - 1, 2**63 + e - b - 1])),
    ("offsets-overlap", "overlaps tensor", with_offsets(lambda b, e, n: [b - 64, e - 64])),
    ("offsets-equal", Q_PROJ, with_offsets(lambda b, e, n: [b, b])),
    ("tensor-missing", Q_PROJ, with_weights(drop(Q_PROJ))),
    ("norm-missing", "model.norm.weight is missing", with_weights(drop("model.norm.weight"))),
    ("embed-missing", f"{EMBED} is missing", with_weights(drop(EMBED))),
    (
        "head-missing",
        "lm_head.weight is missing",
        with_config(tie_word_embeddings=False),
    ),
    (
        "head-differs",
        "lm_head.weight differs",
        with_weights(lambda w: w.update({"lm_head.weight": w[EMBED] + 1})),
    ),
    (
        "head-shape",
        "lm_head.weight has shape",
        with_weights(lambda w: w.update({"lm_head.weight": w[EMBED][1:].clone()})),
    ),
    (
        "unexpected",
        "'model.layers.0.adapter.weight' is unexpected",
        with_weights(lambda w: w.update({"model.layers.0.adapter.weight": torch.ones(3)})),
    ),
    (
        "unexpected-bias",
        "q_proj.bias' is unexpected",
        with_weights(lambda w: w.update({Q_PROJ.replace("weight", "bias"): torch.ones(256)})),
    ),
    (
        "dtype-i64",
        f"{Q_PROJ} has dtype I64",
        with_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ].long()})),
    ),
    (
        "dtype-f64",
        f"{Q_PROJ} has dtype F64",
        with_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ].double()})),
    ),
    (
        "dtype-f8",
        f"{Q_PROJ} has dtype F8_E4M3",
        with_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ].to(torch.float8_e4m3fn)})),
    ),
    ("more-layers", "model.layers.2.", with_config(num_hidden_layers=3)),
    ("fewer-layers", "model.layers.1.", with_config(num_hidden_layers=1)),
    ("other-vocabulary", f"{EMBED} has shape", with_config(vocab_size=312)),
    ("other-heads", "_proj.weight has shape", with_config(num_attention_heads=8)),
    (
        "other-architecture",
        "q_proj.bias is missing",
        with_config(architectures=["Qwen2ForCausalLM"]),
    ),
    ("q-norm-missing", "q_norm.weight is missing", with_config(architectures=["Qwen3ForCausalLM"])),
    ("directory", "is not a regular file", replaced_by(lambda p: p.mkdir())),
    ("fifo", "is not a regular file", replaced_by(os.mkfifo)),
    ("device", "is not a regular file", replaced_by(lambda p: p.symlink_to("/dev/zero"))),
    ("symlink-loop", "cannot be read", replaced_by(lambda p: p.symlink_to(SINGLE))),
    ("symlink-dangling", "no such file", replaced_by(lambda p: p.symlink_to("nowhere"))),
    ("index-empty", "has no weight_map", with_index(lambda i: {"metadata": {}})),
    ("index-empty-map", "has no weight_map", with_index(lambda i: {"weight_map": {}})),
    ("index-list", "has no weight_map", with_index(lambda i: {"weight_map": []})),
    ("index-number", EMBED, with_index(lambda i: i["weight_map"].update({EMBED: 3}))),
    ("index-outside", EMBED, with_index(lambda i: i["weight_map"].update({EMBED: "../x"}))),
    ("index-no-name", EMBED, with_index(lambda i: i["weight_map"].update({EMBED: ".."}))),
    (
        "index-wrong-shard",
        f"'{EMBED}' is missing",
        with_index(lambda i: i["weight_map"].update({EMBED: SHARD})),
    ),
    (
        "index-forgets",
        f"'{EMBED}' is in this file",
        with_index(lambda i: i["weight_map"].pop(EMBED) and i),
    ),
    (
        "index-unknown-tensor",
        "'made.up' is missing",
        with_index(lambda i: i["weight_map"].update({"made.up": SHARD})),
    ),
    ("index-malformed", INDEX, after_sharding(lambda p: (p / INDEX).write_text("{"))),
    ("shard-absent", f"{SHARD}: no such file", after_sharding(lambda p: (p / SHARD).unlink())),
    ("shard-truncated", "truncated", after_sharding(lambda p: os.truncate(p / SHARD, 5000))),
    ("shard-empty", f"{SHARD}: is 0 bytes", after_sharding(lambda p: os.truncate(p / SHARD, 0))),
    (
        "shard-twice",
        "is missing, but model.safetensors.index.json maps it here",
        after_sharding(lambda p: shutil.copy(p / SHARD, p / SHARD.replace("2-of", "3-of"))),
    ),
]


@pytest.fixture(scope="module")
def good_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("good") / "m")
    load(path)
    return path


@pytest.mark.parametrize(
    ("message", "breaker"), [pytest.param(text, how, id=name) for name, text, how in CORPUS]
)
def test_broken_directory(
    good_dir: Path, tmp_path: Path, message: str, breaker: Callable[[Path], None]
) -> None:
    path = tmp_path / "m"
    shutil.copytree(good_dir, path)
    breaker(path)
    begin = time.perf_counter()
    error = refusal(path)
    assert time.perf_counter() - begin < 1
    assert message in str(error)
    assert str(path) in str(error)  # the file, or the directory where one is absent
    assert error.path is not None and error.path.startswith(str(path))
    assert len(str(error)) < 1000
    if message.startswith("model.layers"):
        assert error.tensor is not None and message.startswith(error.tensor[:15])


def refusal(path: Path) -> CheckpointError:
    """The error that `load` raises, without its traceback, which would keep the file mapped."""
    try:
        load(path)
    except CheckpointError as error:
        return error.with_traceback(None)
    pytest.fail(f"{path} was loaded")


def test_unreadable_file(good_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root sees no permission errors, the system call is made to fail."""
    path = tmp_path / "m"
    shutil.copytree(good_dir, path)

    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mmap.mmap", denied)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be mapped"):
        load(path)


@pytest.fixture(scope="module")
def fuzz_dir(good_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "m"
    shutil.copytree(good_dir, path)
    return path


def load_or_refuse(path: Path) -> None:
    try:
        load(path)
    except TinyvllmError as error:
        assert str(path) in str(error)


@settings(
    max_examples=300,
    deadline=1000,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["flip", "cut", "insert", "delete"]))
@pytest.mark.parametrize("name", [SINGLE, "config.json", "generation_config.json"])
def test_any_damage_is_refused_by_name_or_loads(
    good_dir: Path, fuzz_dir: Path, name: str, seed: int, kind: str
) -> None:
    """Bytes of the header (or of a config) are flipped, cut off, put in or taken out."""
    data = bytearray((good_dir / name).read_bytes())
    dice = random.Random(seed)
    limit = min(len(data), 8 + int.from_bytes(data[:8], "little")) if name == SINGLE else len(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        place = dice.randrange(limit)
        if kind == "flip":
            data[place] ^= 1 << dice.randrange(8)
        elif kind == "insert":
            data[place:place] = dice.choice([b"0", b"9", b"-", b".", b"e", b'"', b"\x00", b"\xff"])
        elif kind == "delete":
            del data[place : place + dice.choice([1, 1, 3])]
    if kind == "cut":
        del data[dice.randrange(len(data)) :]
    (fuzz_dir / name).write_bytes(data)
    try:
        load_or_refuse(fuzz_dir)
    finally:
        shutil.copy(good_dir / name, fuzz_dir / name)


@settings(max_examples=60, deadline=1000, database=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_config_values_of_any_kind(good_dir: Path, fuzz_dir: Path, seed: int) -> None:
    dice = random.Random(seed)
    values = json.loads((good_dir / "config.json").read_text())
    keys = [*values, "rope_scaling", "rope_parameters", "quantization_config", "layer_types"]
    odd = [None, True, 0, -1, 1, 2**31, 10**30, 0.5, 1e308, "", "x", [], [[]], {}, {"type": []}]
    for key in dice.sample(keys, dice.choice([1, 1, 2])):
        values[key] = dice.choice(odd)
    write_json(fuzz_dir / "config.json", values)
    try:
        load_or_refuse(fuzz_dir)
    finally:
        shutil.copy(good_dir / "config.json", fuzz_dir / "config.json")
