"""The llama-family forward pass, written only with ops, and the memory it runs in."""

from tinyvllm.models.buffers import BufferPlan, ForwardBatch, ForwardBuffers, KVCache
from tinyvllm.models.rope import rope_cos_sin
from tinyvllm.models.transformer import LayerWeights, ModelWeights, Transformer

__all__ = [
    "BufferPlan",
    "ForwardBatch",
    "ForwardBuffers",
    "KVCache",
    "LayerWeights",
    "ModelWeights",
    "Transformer",
    "rope_cos_sin",
]
