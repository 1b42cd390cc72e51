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
embedding = _C.embedding
rms_norm = _C.rms_norm
add_rms_norm = _C.add_rms_norm
rotary_embedding_store_kv = _C.rotary_embedding_store_kv
paged_attention = _C.paged_attention
silu_and_mul = _C.silu_and_mul
linear = _C.linear
gather_rows = _C.gather_rows
sample = _C.sample


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] bfloat16 -> the layout that `linear` streams on the weight's device.

    [ceil(N / 16), ceil(K / 2), 16, 2] on a CPU, [ceil(N / 16), ceil(K / 32), 16, 32] on a GPU.
    """
    num_rows, num_columns = weight.shape
    inputs = 32 if weight.is_cuda else 2
    packed = torch.empty(
        ((num_rows + 15) // 16, (num_columns + inputs - 1) // inputs, 16, inputs),
        dtype=weight.dtype,
        device=weight.device,
    )
    _C.pack_linear(packed, weight)
    return packed


def capture() -> _C.Graph:
    """`with capture() as graph:` records the CPU ops that this thread calls inside; none runs.

    The graph keeps their tensors alive, and reads their contents at each `graph.replay()`.
    """
    return _C.Graph()
