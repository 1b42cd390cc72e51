"""The llama family (Llama, Mistral, Qwen2, Qwen3) as one config-driven forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tinyvllm.config import ModelConfig
    from tinyvllm.models.buffers import ForwardBatch, ForwardBuffers, KVCache
    from tinyvllm.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block's weights. Projections are in the packed layout of the ops that run them."""

    input_layernorm: Tensor  # [H]
    qkv_proj: Tensor  # packed [(num_heads + 2 num_kv_heads) D, H]
    o_proj: Tensor  # packed [H, num_heads D]
    post_attention_layernorm: Tensor  # [H]
    gate_up_proj: Tensor  # packed for the gated linear, [2 I, H]
    down_proj: Tensor  # packed [H, I]
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights of a model, on its device and in its dtype."""

    embed_tokens: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # packed [V, H]
    cos_sin: Tensor  # [max_model_len, D] f32


class Transformer:
    """A llama-family model bound to one op set.

    `forward` calls nothing but ops on memory that exists already, so it can be captured as a graph.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: ModelWeights) -> None:
        assert len(weights.layers) == config.num_layers
        self.config = config
        self.ops = ops
        self.weights = weights
        self._eps = config.rms_norm_eps
        self._softmax_scale = config.head_dim**-0.5
        self._sliding_window = config.sliding_window or 0

    def forward(
        self,
        buffers: ForwardBuffers,
        batch: ForwardBatch,
        kv_cache: KVCache,
        *,
        every_token: bool = False,
    ) -> None:
        """Runs the batch's tokens, stores their keys and values, and fills `buffers.logits` for
        its `logits_indices`, which with `every_token` are all of them in order. Buffers must be
        narrowed to the batch: T tokens, R rows of logits."""
        ops, b, weights = self.ops, buffers, self.weights
        ops.embedding(b.residual, batch.input_ids, weights.embed_tokens)  # [T, H]
        for idx, layer in enumerate(weights.layers):
            self._block(layer, b, batch, kv_cache.k[idx], kv_cache.v[idx])
        self.head(b, None if every_token else batch.logits_indices)

    def head(self, buffers: ForwardBuffers, logits_indices: Tensor | None) -> None:
        """Fills `buffers.logits` for these tokens of the pass that ran last, [R] i32; None: all in
        order. Only the rows whose logits are wanted go through the final norm and the head."""
        ops, b, weights = self.ops, buffers, self.weights
        last = b.residual
        if logits_indices is not None:
            last = b.last_residual
            ops.gather_rows(last, b.residual, logits_indices)  # [R, H]
        head = weights.norm, weights.lm_head, None
        ops.norm_linear(b.logits, b.last_normed, last, *head, self._eps)  # [R, V]

    def _block(
        self,
        w: LayerWeights,
        b: ForwardBuffers,
        batch: ForwardBatch,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """Adds attention and MLP to b.residual."""
        ops, x, eps = self.ops, b.residual, self._eps  # x [T, H]
        norm, qkv_proj, qkv_bias = w.input_layernorm, w.qkv_proj, w.qkv_bias
        caches = k_cache, v_cache
        where = self.weights.cos_sin, batch.positions, batch.slot_mapping
        # b.qkv is [T, (num_heads + 2 num_kv_heads) D], b.q, b.k and b.v are its parts.
        if w.q_norm is None or w.k_norm is None:
            ops.norm_linear_rope_store_kv(
                b.qkv, *caches, b.normed, x, norm, qkv_proj, qkv_bias, *where, eps
            )
        else:
            ops.norm_linear(b.qkv, b.normed, x, norm, qkv_proj, qkv_bias, eps)
            ops.rms_norm(b.q, b.q, w.q_norm, eps)  # [T, num_heads, D]
            ops.rms_norm(b.k, b.k, w.k_norm, eps)  # [T, num_kv_heads, D]
            ops.rotary_embedding_store_kv(b.q, b.k, b.v, *caches, *where)
        self._attend(b, batch, *caches)  # [T, num_heads, D]
        ops.linear_add(x, b.attn_out_flat, w.o_proj, w.o_bias)
        gate_up_proj = w.post_attention_layernorm, w.gate_up_proj, w.gate_up_bias
        ops.norm_gated_linear(b.act, b.normed, x, *gate_up_proj, eps)  # [T, I]
        ops.linear_add(x, b.act, w.down_proj, w.down_bias)

    def _attend(
        self, b: ForwardBuffers, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Attends over the cache, the step's own keys included: b.q -> b.attn_out."""
        self.ops.paged_attention(
            b.attn_out,
            b.q,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.cu_seqlens_q,
            batch.seq_lens,
            self._softmax_scale,
            self._sliding_window,
        )
