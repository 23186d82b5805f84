"""Stops a model's forward before its output projection: the loss works on hidden states (opsd/fused_divergence.py)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


class HiddenTap:
    """Lets a causal language model's forward return selected hidden states in place of logits.

    Inside `selecting(keep)` the output projection is skipped and the forward's `logits` are the final hidden states at the flat
    positions `keep`, shape (N, H). The call still goes through every wrapper (DDP, DeepSpeed), so gradients synchronise as usual.
    """

    def __init__(self, base: PreTrainedModel, dtype: torch.dtype | None = None):
        """`dtype`: what the projection's operands are cast to in mixed precision; None = the dtype of its weight."""
        self.head = base.get_output_embeddings()
        self._dtype = dtype
        self._project = self.head.forward
        self._keep: torch.Tensor | None = None
        self.head.forward = self._forward

    @property
    def dtype(self) -> torch.dtype:
        """Of both operands of the output projection."""
        return self._dtype or self.head.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """The output projection (V, H) in `dtype`; gradients flow through the cast."""
        return self.head.weight.to(self.dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.head.bias is None else self.head.bias.to(self.dtype)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (B, L, H)
        if self._keep is None:
            return self._project(hidden)
        return hidden.flatten(0, 1).index_select(0, self._keep)  # (N, H)

    @contextmanager
    def selecting(self, keep: torch.Tensor) -> Iterator[None]:
        self._keep = keep
        try:
            yield
        finally:
            self._keep = None
