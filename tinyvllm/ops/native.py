"""The handwritten kernels of `_C`: bfloat16 storage, float32 inside.

An op called on CPU tensors runs on the process's thread pool with the GIL released; on CUDA
tensors it is launched on torch's current stream. Arguments are checked at this border: a wrong
dtype, shape, layout or device raises ValueError ("op: argument: expected ..., got ..."), a wrong
index IndexError. csrc/ops.h documents every shape.
"""

from __future__ import annotations

import torch

try:
    from tinyvllm import _C
except ImportError as error:
    raise ImportError(
        f"the compiled extension tinyvllm._C cannot be loaded ({error}): "
        'install tinyvllm with `pip install .`, or use ops="reference"'
    ) from error

name = "native"
supports_graphs = True

advance_decode = _C.advance_decode
take_drawn = _C.take_drawn
embedding = _C.embedding
rms_norm = _C.rms_norm
rotary_embedding_store_kv = _C.rotary_embedding_store_kv
paged_attention = _C.paged_attention
linear = _C.linear
linear_add = _C.linear_add
norm_linear = _C.norm_linear
norm_linear_rope_store_kv = _C.norm_linear_rope_store_kv
norm_gated_linear = _C.norm_gated_linear
gather_rows = _C.gather_rows
sample = _C.sample
adjust_logits = _C.adjust_logits
count_tokens = _C.count_tokens
top_logprobs = _C.top_logprobs


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] bfloat16 -> the layout that the linears stream on the weight's device.

    [ceil(N / 16), ceil(K / 2), 16, 2] on a CPU, [ceil(N / 16), ceil(K / 32), 16, 32] on a GPU.
    """
    packed = _empty_strips((len(weight) + 15) // 16, weight)
    _C.pack_linear(packed, weight)
    return packed


def pack_gated_linear(weight: torch.Tensor) -> torch.Tensor:
    """weight [2 I, K] bfloat16, gate above up -> what `norm_gated_linear` streams.

    As `pack_linear`, but each of the ceil(I / 8) strips holds 8 rows of gate and 8 of up.
    """
    packed = _empty_strips((len(weight) // 2 + 7) // 8, weight)
    _C.pack_gated_linear(packed, weight)
    return packed


def _empty_strips(num_strips: int, weight: torch.Tensor) -> torch.Tensor:
    inputs = 32 if weight.is_cuda else 2
    shape = (num_strips, (weight.shape[1] + inputs - 1) // inputs, 16, inputs)
    return torch.empty(shape, dtype=weight.dtype, device=weight.device)


def new_stream() -> _C.Stream:
    """Where graphs of CPU ops are launched to run beside the calling thread."""
    return _C.Stream()


def capture() -> _C.Graph:
    """`with capture() as graph:` records the CPU ops that this thread calls inside; none runs.

    The graph keeps their tensors alive, and reads their contents at each `graph.replay()`.
    """
    return _C.Graph()
