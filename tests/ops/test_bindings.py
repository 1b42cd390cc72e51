"""The border between Python and the kernels: what is accepted, and how the rest is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tinyvllm import _C
from tinyvllm.ops import native

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64

# Arguments that every op accepts: T = 3 tokens, 2 sequences, 4 heads, 2 KV heads, head_dim 16.
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    "embedding": {"out": ((3, 8), BF16), "input_ids": ((3,), I32), "weight": ((5, 8), BF16)},
    "rms_norm": {"out": ((3, 8), BF16), "x": ((3, 8), BF16), "weight": ((8,), BF16)},
    "rotary_embedding_store_kv": {
        "q": ((3, 4, 16), BF16),
        "k": ((3, 2, 16), BF16),
        "v": ((3, 2, 16), BF16),
        "k_cache": ((6, 4, 2, 16), BF16),
        "v_cache": ((6, 4, 2, 16), BF16),
        "cos_sin": ((32, 16), F32),
        "positions": ((3,), I32),
        "slot_mapping": ((3,), I32),
    },
    "paged_attention": {
        "out": ((3, 4, 16), BF16),
        "q": ((3, 4, 16), BF16),
        "k_cache": ((6, 4, 2, 16), BF16),
        "v_cache": ((6, 4, 2, 16), BF16),
        "block_tables": ((2, 3), I32),
        "cu_seqlens_q": ((3,), I32),
        "seq_lens": ((2,), I32),
    },
    "pack_linear": {"packed": ((2, 3, 16, 2), BF16), "weight": ((20, 5), BF16)},
    "pack_gated_linear": {"packed": ((3, 3, 16, 2), BF16), "weight": ((40, 5), BF16)},
    "linear": {
        "out": ((3, 20), BF16),
        "x": ((3, 5), BF16),
        "packed": ((2, 3, 16, 2), BF16),
        "bias": ((20,), BF16),
    },
    "linear_add": {
        "residual": ((3, 20), BF16),
        "x": ((3, 5), BF16),
        "packed": ((2, 3, 16, 2), BF16),
        "bias": ((20,), BF16),
    },
    "norm_linear": {
        "out": ((3, 20), BF16),
        "normed": ((3, 5), BF16),
        "x": ((3, 5), BF16),
        "norm_weight": ((5,), BF16),
        "packed": ((2, 3, 16, 2), BF16),
        "bias": ((20,), BF16),
    },
    "norm_linear_rope_store_kv": {
        "qkv": ((3, 16), BF16),
        "k_cache": ((6, 4, 1, 4), BF16),
        "v_cache": ((6, 4, 1, 4), BF16),
        "normed": ((3, 5), BF16),
        "x": ((3, 5), BF16),
        "norm_weight": ((5,), BF16),
        "packed": ((1, 3, 16, 2), BF16),
        "bias": ((16,), BF16),
        "cos_sin": ((32, 4), F32),
        "positions": ((3,), I32),
        "slot_mapping": ((3,), I32),
    },
    "norm_gated_linear": {
        "out": ((3, 20), BF16),
        "normed": ((3, 5), BF16),
        "x": ((3, 5), BF16),
        "norm_weight": ((5,), BF16),
        "packed": ((3, 3, 16, 2), BF16),
        "bias": ((40,), BF16),
    },
    "gather_rows": {"out": ((2, 8), BF16), "x": ((3, 8), BF16), "row_idx": ((2,), I32)},
    "sample": {
        "token_ids": ((2,), I32),
        "logits": ((2, 11), F32),
        "temperature": ((2,), F32),
        "top_k": ((2,), I32),
        "top_p": ((2,), F32),
        "min_p": ((2,), F32),
        "seeds": ((2,), I64),
        "step_idx": ((2,), I32),
    },
}
SCALARS: dict[str, tuple[float | int, ...]] = {
    "rms_norm": (1e-5,),
    "norm_linear": (1e-5,),
    "norm_linear_rope_store_kv": (1e-5,),
    "norm_gated_linear": (1e-5,),
    "paged_attention": (0.25, 0),
}
ARGUMENTS = [(op, argument) for op, shapes in SHAPES.items() for argument in shapes]

# One row more is legal here.
FREE_ROWS = {
    ("embedding", "weight"),
    ("gather_rows", "x"),
    ("rotary_embedding_store_kv", "cos_sin"),
    ("norm_linear_rope_store_kv", "cos_sin"),
    ("pack_linear", "weight"),  # up to a multiple of 16
    ("pack_gated_linear", "weight"),  # refused as odd, test_what_only_the_op_knows
}


def tensors(op: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES[op].items()}


def call(op: str, arguments: dict[str, object]) -> None:
    """Checks the arguments of `op` without running it: a capture only records."""
    function: Callable[..., None] = getattr(_C, op)
    with _C.Graph():
        function(*arguments.values(), *SCALARS.get(op, ()))


def refusal(op: str, arguments: dict[str, object]) -> str:
    with pytest.raises(ValueError) as caught:
        call(op, arguments)
    return str(caught.value)


@pytest.mark.parametrize("op", SHAPES)
def test_good_arguments_are_accepted(op: str) -> None:
    call(op, tensors(op))


@pytest.mark.parametrize("op", SHAPES)
def test_keywords_are_accepted(op: str) -> None:
    scalars = ["softmax_scale", "sliding_window"] if op == "paged_attention" else ["eps"]
    keywords = dict(zip(scalars, SCALARS.get(op, ()), strict=False))
    with _C.Graph() as graph:
        getattr(_C, op)(**tensors(op), **keywords)
    assert graph.num_ops == 1


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_wrong_dtype(op: str, argument: str) -> None:
    arguments = tensors(op)
    arguments[argument] = arguments[argument].to(torch.float16)
    message = refusal(op, arguments)
    expected = str(SHAPES[op][argument][1]).removeprefix("torch.")
    assert message.startswith(f"{op}: {argument}: expected dtype {expected}")
    assert message.endswith("got float16")


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_wrong_number_of_dimensions(op: str, argument: str) -> None:
    arguments = tensors(op)
    arguments[argument] = arguments[argument][None]
    message = refusal(op, arguments)
    # A third dimension of rms_norm's out is legal, and x then is what does not fit.
    blamed = "x" if (op, argument) == ("rms_norm", "out") else argument
    assert message.startswith(f"{op}: {blamed}: expected shape [")
    assert message.endswith(f"got {list(arguments[blamed].shape)}")


@pytest.mark.parametrize(("op", "argument"), [a for a in ARGUMENTS if a not in FREE_ROWS])
def test_wrong_size(op: str, argument: str) -> None:
    """One row more than fits: refused in whichever argument first disagrees, with both sizes."""
    arguments = tensors(op)
    arguments[argument] = torch.cat([arguments[argument], arguments[argument][:1]])
    message = refusal(op, arguments)
    assert message.startswith(f"{op}: ")
    assert "expected shape [" in message
    assert ", got [" in message


def test_a_shape_error_says_where_the_expected_size_comes_from() -> None:
    arguments = tensors("rotary_embedding_store_kv")
    arguments["v"] = torch.zeros(3, 2, 32, dtype=BF16)
    assert refusal("rotary_embedding_store_kv", arguments) == (
        "rotary_embedding_store_kv: v: expected shape [T, num_kv_heads, head_dim] with T = 3 "
        "(from q), num_kv_heads = 2 (from k), head_dim = 16 (from q), got [3, 2, 32]"
    )


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_a_strided_last_dimension_is_refused(op: str, argument: str) -> None:
    arguments = tensors(op)
    shape = arguments[argument].shape
    wide = torch.zeros(*shape[:-1], shape[-1] * 2, dtype=arguments[argument].dtype)
    arguments[argument] = wide[..., ::2]
    message = refusal(op, arguments)
    assert message.startswith(f"{op}: {argument}: expected ")
    assert "contiguous" in message
    assert f"for shape {list(shape)}" in message


def test_views_of_qkv_are_accepted() -> None:
    qkv = torch.zeros(3, (4 + 2 + 2) * 16, dtype=BF16)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split([64, 32, 32], dim=1))
    op = "rotary_embedding_store_kv"
    call(op, tensors(op) | {"q": q, "k": k, "v": v})
    call("rms_norm", {"out": q, "x": q, "weight": torch.zeros(16, dtype=BF16)})
    call("paged_attention", tensors("paged_attention") | {"q": q})


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_what_is_no_tensor(op: str, argument: str) -> None:
    for wrong in (1, [1.0], np.zeros(3, dtype=np.int32), None):
        if wrong is None and argument == "bias":
            continue
        arguments: dict[str, object] = {**tensors(op), argument: wrong}
        with pytest.raises(TypeError) as caught:
            call(op, arguments)
        kind = type(wrong).__qualname__
        kind = f"numpy.{kind}" if kind == "ndarray" else kind
        assert str(caught.value) == f"{op}: {argument}: expected a torch.Tensor, got {kind}"


def test_subclasses_are_tensors() -> None:
    class Named(torch.Tensor):
        pass

    weight = torch.arange(40.0).to(BF16).view(5, 8)
    out = torch.zeros(2, 8, dtype=BF16)
    ids = torch.tensor([4, 1], dtype=I32)
    for same in (torch.nn.Parameter(weight, requires_grad=False), weight.as_subclass(Named)):
        out.zero_()
        native.embedding(out, ids, same)
        assert torch.equal(out, weight[[4, 1]])


def test_tensors_that_need_a_gradient_are_refused() -> None:
    arguments = tensors("embedding")
    arguments["weight"] = torch.nn.Parameter(arguments["weight"])
    assert refusal("embedding", arguments) == (
        "embedding: weight: expected a tensor that needs no gradient: these ops record none, "
        "got requires_grad=True"
    )


@pytest.mark.parametrize(
    ("weight", "cause"),
    [
        (torch.zeros(5, 8, dtype=BF16, device="meta"), "meta"),
        (torch.zeros(5, 8, dtype=BF16).to_sparse(), "storage"),
    ],
)
def test_tensors_without_memory_are_refused(weight: torch.Tensor, cause: str) -> None:
    arguments = tensors("embedding") | {"weight": weight}
    with pytest.raises(ValueError, match="embedding: weight: this tensor cannot be shared") as info:
        call("embedding", arguments)
    assert cause in str(info.value.__cause__)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int16])
def test_dtypes_that_no_kernel_knows(dtype: torch.dtype) -> None:
    arguments = tensors("embedding") | {"weight": torch.zeros(5, 8, dtype=dtype)}
    assert "expected a dtype that kernels know" in refusal("embedding", arguments)


def test_more_dimensions_than_a_kernel_knows() -> None:
    arguments = tensors("embedding") | {"weight": torch.zeros([1] * 6, dtype=BF16)}
    assert "weight: expected at most 5 dimensions, got 6" in refusal("embedding", arguments)


def test_what_only_the_op_knows() -> None:
    arguments = tensors("paged_attention")
    arguments["out"] = arguments["q"] = torch.zeros(3, 3, 16, dtype=BF16)
    assert "num_heads to be a multiple of num_kv_heads, got 3 and 2" in refusal(
        "paged_attention", arguments
    )
    arguments = tensors("sample") | {"logits": torch.zeros(2, 0)}
    assert "at least one token in the vocabulary" in refusal("sample", arguments)
    odd = {"q": (3, 4, 5), "k": (3, 2, 5), "v": (3, 2, 5)}
    arguments = tensors("rotary_embedding_store_kv")
    arguments |= {name: torch.zeros(shape, dtype=BF16) for name, shape in odd.items()}
    arguments |= {name: torch.zeros(6, 4, 2, 5, dtype=BF16) for name in ("k_cache", "v_cache")}
    arguments["cos_sin"] = torch.zeros(32, 5)
    assert "an even head_dim, got 5" in refusal("rotary_embedding_store_kv", arguments)
    arguments = tensors("pack_gated_linear") | {"weight": torch.zeros(41, 5, dtype=BF16)}
    assert "an even number of rows, got 41" in refusal("pack_gated_linear", arguments)


@pytest.mark.parametrize("op", ["embedding", "gather_rows", "rotary_embedding_store_kv"])
@pytest.mark.parametrize("bad", [-2, 24, 2**31 - 1])
def test_an_index_out_of_range_is_an_error_and_writes_nothing(op: str, bad: int) -> None:
    argument = {"embedding": "input_ids", "gather_rows": "row_idx"}.get(op, "slot_mapping")
    arguments = tensors(op)
    for tensor in arguments.values():
        tensor.fill_(1)
    arguments[argument][1] = bad
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    with pytest.raises(IndexError, match=rf"{op}: {argument}\[1\]: expected .*, got {bad}$"):
        getattr(_C, op)(*arguments.values())
    for name, tensor in arguments.items():
        assert torch.equal(tensor, before[name])


def test_a_position_out_of_range_is_an_error() -> None:
    arguments = tensors("rotary_embedding_store_kv")
    arguments["positions"][2] = 32
    with pytest.raises(IndexError, match=r"positions\[2\]: expected 0 <= index < 32, got 32"):
        _C.rotary_embedding_store_kv(*arguments.values())


@pytest.mark.parametrize(
    "op", ["embedding", "rms_norm", "linear", "linear_add", "norm_linear", "norm_gated_linear"]
)
def test_no_tokens_are_legal(op: str) -> None:
    arguments = tensors(op)
    for name in ("out", "x", "residual", "normed", "input_ids"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    getattr(_C, op)(*arguments.values(), *SCALARS.get(op, ()))


def test_the_machine_is_described() -> None:
    assert _C.isa() in _C.available_isas()
    assert _C.available_isas()[0] == "portable"
    assert _C.num_threads() >= 1
    assert isinstance(_C.has_cuda, bool)
    assert _C.num_cuda_devices() == (torch.cuda.device_count() if _C.has_cuda else 0)
