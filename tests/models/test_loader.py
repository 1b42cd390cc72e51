"""load_model on good checkpoints: dtypes, shards, ties, and what stays mapped (nothing)."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from support.forward import PagedRunner
from support.tiny_models import make_tiny_model, random_weights, save_weights

from tinyvllm import loader, staging
from tinyvllm.checkpoint import TensorEntry, open_checkpoint
from tinyvllm.errors import CheckpointError, ModelError, NotSupportedError
from tinyvllm.loader import load_config, load_model, weight_bytes
from tinyvllm.ops import get_ops
from tinyvllm.staging import Staging, plan_loads

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tinyvllm.models import Transformer
    from tinyvllm.ops import Ops


class PlainOps:
    """Packs nothing: a weight can be looked at as it was loaded."""

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def pack_gated_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str, float], None] | None = None,
    ops: Ops | None = None,
) -> Transformer:
    return load_model(
        path,
        load_config(path),
        ops or PlainOps(),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=64,
        progress=progress,
    )


def all_weights(model: Transformer) -> list[torch.Tensor]:
    weights = model.weights
    tensors = [weights.embed_tokens, weights.norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [
            t for f in dataclasses.fields(layer) if (t := getattr(layer, f.name)) is not None
        ]
    return tensors


def assert_equal_models(first: Transformer, second: Transformer) -> None:
    for a, b in zip(all_weights(first), all_weights(second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_stored_dtype_becomes_the_wanted_one(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=stored)
    model = load(path, wanted)
    source = random_weights(path, stored)
    assert {t.dtype for t in all_weights(model)} == {wanted}
    assert torch.equal(model.weights.embed_tokens, source["model.embed_tokens.weight"].to(wanted))
    assert torch.equal(model.weights.norm, source["model.norm.weight"].to(wanted))


def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    mixed = {
        name: weight.to(torch.bfloat16).to(dtypes[idx % 3])
        for idx, (name, weight) in enumerate(random_weights(path, torch.float32).items())
    }
    uniform = {name: weight.to(torch.bfloat16) for name, weight in mixed.items()}
    save_weights(path, mixed)
    first = load(path, torch.bfloat16)
    save_weights(path, uniform)
    assert_equal_models(first, load(path, torch.bfloat16))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_shards_equal_one_file(tmp_path: Path, architecture: str) -> None:
    one = load(make_tiny_model(tmp_path / "one", architecture))
    three = load(make_tiny_model(tmp_path / "three", architecture, num_shards=3))
    assert not (tmp_path / "three" / "model.safetensors").exists()
    assert_equal_models(one, three)


def test_tied_head_may_be_in_the_file_when_it_is_equal(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    without = load(path)
    weights = random_weights(path, torch.bfloat16)
    save_weights(path, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert_equal_models(without, load(path))


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    without = load(path)
    weights = random_weights(path, torch.bfloat16)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_weights(path, weights)
    assert_equal_models(without, load(path))


def test_an_unaligned_header_is_legal(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    expected = load(path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    file.write_bytes(
        (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :]
    )
    assert_equal_models(expected, load(path))


def test_the_model_outlives_its_file(tmp_path: Path) -> None:
    """A weight that stayed mapped would be zeros, or a SIGBUS, once the file is cut."""
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    model = load(path, ops=get_ops("reference"))
    before = PagedRunner(model, max_len=8).run({0: [5, 6, 7]})[0]
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(PagedRunner(model, max_len=8).run({0: [5, 6, 7]})[0], before)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    load(make_tiny_model(tmp_path / "m"), progress=lambda *args: told.append(args))
    assert [phase for phase, _ in told] == ["loading weights"] * 3
    assert [fraction for _, fraction in told] == [0.0, 0.5, 1.0]


def test_a_file_written_by_safetensors_without_metadata(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    save_file(random_weights(path, torch.bfloat16), path / "model.safetensors")
    load(path)


def test_joined_weights_keep_their_order(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "Qwen2ForCausalLM")
    layer, source = (
        load(path, torch.bfloat16).weights.layers[1],
        random_weights(path, torch.bfloat16),
    )
    prefix = "model.layers.1."
    for joined, kind in ((layer.qkv_proj, "weight"), (layer.qkv_bias, "bias")):
        parts = [source[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert joined is not None and torch.equal(joined, torch.cat(parts))
    gate_up = [source[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up_proj, torch.cat(gate_up))


def test_the_default_model_loads_in_half_a_second(smollm2_dir: Path) -> None:
    (smollm2_dir / "model.safetensors").read_bytes()  # into the page cache
    config = load_config(smollm2_dir)
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()  # of all threads: other processes do not count
        load_model(
            smollm2_dir,
            config,
            get_ops("native"),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_model_len=8192,
        )
        best = min(best, time.process_time() - begin)
    assert best < 0.5


CPU = torch.device("cpu")


def load_staged(
    path: Path,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str, float], None] | None = None,
    **sizes: int,
) -> Transformer:
    """As a GPU's loading does it, to the CPU."""
    config = load_config(path)
    reader = loader._StagedReader(open_checkpoint(path), PlainOps(), dtype, CPU)
    with reader.staged(loader._reading_order(config), **sizes):
        weights = loader._load_weights(reader, config, torch.empty(0), progress)
    return loader.Transformer(config, PlainOps(), weights)


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tinyvllm-read")]


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied, in shards": {"tie_word_embeddings": False, "num_shards": 3},
    "biases": {"architecture": "Qwen2ForCausalLM"},
    "norms of heads": {"architecture": "Qwen3ForCausalLM"},
}


@pytest.mark.parametrize("sizes", [(256, 1), (256, 3), (4096, 2), (1 << 20, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_staged_weights_have_the_same_bits(
    shape: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path / "m", **SHAPES[shape])
    model = load_staged(path, torch.bfloat16, buffer_bytes=sizes[0], num_buffers=sizes[1])
    assert_equal_models(load(path, torch.bfloat16), model)
    assert not reading_threads()


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_staged_weights_of_mixed_dtypes(wanted: torch.dtype, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    weights = random_weights(path, torch.float32)
    save_weights(path, {n: w.to(dtypes[i % 3]) for i, (n, w) in enumerate(weights.items())})
    model = load_staged(path, wanted, buffer_bytes=1024, num_buffers=2)
    assert_equal_models(load(path, wanted), model)


def test_a_cut_file_is_named_while_it_is_staged(tmp_path: Path) -> None:
    """The mapping would be a SIGBUS."""
    path = make_tiny_model(tmp_path / "m")
    config, entries = load_config(path), open_checkpoint(path)
    reader = loader._StagedReader(entries, PlainOps(), torch.bfloat16, CPU)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(30000)
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* ends there") as info,
        reader.staged(loader._reading_order(config), buffer_bytes=4096, num_buffers=3),
    ):
        loader._load_weights(reader, config, torch.empty(0), None)
    assert info.value.tensor in entries and not reading_threads()


def test_a_cancelled_load_leaves_no_threads(tmp_path: Path) -> None:
    def cancel(phase: str, fraction: float) -> None:
        if fraction > 0:
            raise KeyboardInterrupt

    path = make_tiny_model(tmp_path / "m")
    with pytest.raises(KeyboardInterrupt):
        load_staged(path, progress=cancel, buffer_bytes=256, num_buffers=3)
    assert not reading_threads()


def test_staging_does_not_read_far_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight is bounded by the buffers, whatever the caller does."""
    entries = list(open_checkpoint(make_tiny_model(tmp_path / "m")).values())
    read: list[int] = []
    original = TensorEntry.read_into
    monkeypatch.setattr(
        TensorEntry,
        "read_into",
        lambda entry, out, begin: (read.append(len(out)), original(entry, out, begin))[1],
    )
    with Staging(entries, CPU, buffer_bytes=512, num_buffers=3) as staged:
        for entry in entries:
            staged.copy_to(torch.empty(entry.shape, dtype=entry.check_dtype()), entry)
            copied = sum(e.end - e.begin for e in entries[: entries.index(entry) + 1])
            assert sum(read) <= copied + 3 * 512
    assert sum(read) == sum(entry.end - entry.begin for entry in entries)


def entry_of(num_bytes: int) -> TensorEntry:
    unused: Any = None
    return TensorEntry(Path("f"), unused, unused, "t", "BF16", (num_bytes // 2,), 0, num_bytes)


@pytest.mark.parametrize("sizes", [(2,), (256,), (1024,), (10, 10, 3000, 512, 2, 1022), (1026, 2)])
def test_plans_cover_every_byte_once(sizes: tuple[int, ...]) -> None:
    entries = [entry_of(size) for size in sizes]
    loads = plan_loads(entries, 1024)
    for load in loads:
        ends = [0]
        for piece in load:
            assert piece.offset % 256 == 0 and piece.offset >= ends[-1]
            ends.append(piece.offset + piece.end - piece.begin)
        assert 0 < ends[-1] <= 1024
    for entry in entries:
        pieces = [piece for load in loads for piece in load if piece.entry is entry]
        bounds = [0, *(piece.end for piece in pieces)]
        assert [piece.begin for piece in pieces] == bounds[:-1] and bounds[-1] == entry.end
    assert len(loads) <= sum(-(-size // 256) for size in sizes) // 4 + 1


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_the_weights(tied: bool, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "Qwen3ForCausalLM", tie_word_embeddings=tied)
    model = load(path, torch.bfloat16)
    held = sum(weight.nbytes for weight in all_weights(model))
    total, more = weight_bytes(model.config, torch.bfloat16)
    assert total == held
    assert more == 128 * (4 + 2 * 2) * 64 * 2  # qkv


def on_a_gpu_with(free: int, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that keeps nothing, instead of a GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 8 << 30))
    return torch.device("meta")


def load_on(device: torch.device, path: Path, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    return load_model(
        path, load_config(path), PlainOps(), dtype=dtype, device=device, max_model_len=64
    )


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "m")
    total, more = weight_bytes(load_config(path), torch.bfloat16)
    device = on_a_gpu_with(total + more - 1, monkeypatch)
    monkeypatch.setattr(staging.Staging, "__init__", None)  # nothing may be read
    with pytest.raises(ModelError, match=r"the weights take .* GiB on meta, and .* are free") as e:
        load_on(device, path)
    assert e.value.path == str(path) and "choose another device=" in str(e.value)


def test_memory_that_is_gone_meanwhile_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "m")
    device = on_a_gpu_with(8 << 30, monkeypatch)
    assert load_on(device, path).weights.embed_tokens.is_meta  # it fits

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_load_layer", run_out)
    monkeypatch.setattr(loader, "_reading_order", lambda config: [])
    with pytest.raises(ModelError, match=r"8\.00 GiB of its 8\.00 GiB are free") as info:
        load_on(device, path)
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("capability", "advice"),
    [((7, 5), 'use "cpu"'), ((8, 9), "CUDAARCHS unset or 89-real"), ((9, 0), "or 90a-real")],
)
def test_a_gpu_that_the_kernels_were_not_built_for_is_named(
    capability: tuple[int, int], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "m")
    device = on_a_gpu_with(8 << 30, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def refuse(*_: object) -> None:
        raise RuntimeError("pack_linear: no kernel image is available for execution on the device")

    monkeypatch.setattr(PlainOps, "pack_linear", refuse)
    named = rf"no kernels for compute capability {capability[0]}\.{capability[1]}"
    with pytest.raises(NotSupportedError, match=named) as info:
        load_on(device, path)
    assert info.value.param == "device" and advice in str(info.value)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_loading_to_a_gpu(wanted: torch.dtype, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", num_shards=2, tie_word_embeddings=False)
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    model = load_on(device, path, wanted)
    for ours, theirs in zip(all_weights(model), all_weights(load(path, wanted)), strict=True):
        assert ours.device == device and torch.equal(ours.cpu(), theirs)
    assert not reading_threads()
    del model, ours
    assert torch.cuda.memory_allocated(device) == before
