"""Variable-length attention for packed rows: several sequences in one row, each attending only to itself.

Registered with transformers under the name `opsd_varlen`; `opsd/batch.py` supplies the boundaries (`cu_seq_lens_q`, `max_length_q`), which
transformers hands through to here. On CUDA it is PyTorch's own FlashAttention (`torch.nn.attention.varlen`), or the FlashAttention 3 that
vLLM brings along where no gradient is wanted (it has no backward pass); elsewhere one scaled-dot-product call per sequence, which is exact
in any dtype.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from packaging.version import Version
from transformers import AttentionInterface, PreTrainedModel

NAME = "opsd_varlen"
VARLEN_NAMES_GQA = Version(torch.__version__) >= Version("2.12")  # before, grouped heads needed no flag


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, heads, S, D)
    key: torch.Tensor,  # (1, kv_heads, S, D)
    value: torch.Tensor,  # (1, kv_heads, S, D)
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor,  # (sequences + 1,) int32
    max_length_q: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence. Returns ((1, S, heads, D), None)."""
    if attention_mask is not None or sliding_window is not None or softcap is not None or dropout:
        raise RuntimeError(
            f"{NAME} supports plain causal attention only, got sliding_window={sliding_window}, softcap={softcap}, dropout={dropout}, "
            f"attention_mask={attention_mask is not None}; set packing=false"
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (S, heads, D)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        without_gradient = None if torch.is_grad_enabled() else flash_attention_3()
        if without_gradient is not None:
            out = without_gradient(
                q,
                k,
                v,
                cu_seqlens_q=cu_seq_lens_q,
                cu_seqlens_k=cu_seq_lens_q,
                max_seqlen_q=max_length_q,
                max_seqlen_k=max_length_q,
                softmax_scale=scaling,
                causal=True,
                fa_version=3,
            )
            return out.unsqueeze(0), None
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1, 0),
            **({"enable_gqa": q.shape[1] != k.shape[1]} if VARLEN_NAMES_GQA else {}),
        )
        return out.unsqueeze(0), None
    pieces = []
    bounds = cu_seq_lens_q.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        piece = F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        pieces.append(piece.transpose(1, 2))
    return torch.cat(pieces, dim=1), None


@functools.cache
def flash_attention_3() -> Callable | None:
    """vLLM's variable-length FlashAttention 3; None without vLLM's CUDA build or on a GPU that cannot run it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:  # builds for other devices have the folder without the kernels
        return None
    return flash_attn_varlen_func if is_fa_version_supported(3) else None


AttentionInterface.register(NAME, varlen_attention)


def supports_packing(config) -> str | None:
    """None when a model with this transformers config can run packed rows, else the reason why not."""
    text = config.get_text_config().to_dict()
    layer_types = set(text.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        return f"layer types {sorted(layer_types)}"
    if text.get("attn_logit_softcapping"):
        return "attention soft-capping"
    return None


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Runs `model` with the attention implementation `name` inside the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
