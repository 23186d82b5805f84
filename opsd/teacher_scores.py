"""A teacher of which only the likeliest entries of every token are known, in the form in which the loss takes a teacher.

Made by opsd/teacher_server.py, used by opsd/fused_divergence.py in the place of hidden states and output projection.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TopKScores:
    """A teacher's likeliest entries of N tokens: `ids` (N, K) and their log-probabilities `logps` (N, K), nats at temperature 1.

    Takes the place of the teacher's hidden states in the loss, and is cut into chunks like them.
    """

    ids: torch.Tensor
    logps: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape

    def detach(self) -> "TopKScores":
        return self

    def __getitem__(self, rows) -> "TopKScores":
        return TopKScores(self.ids[rows], self.logps[rows])

    @classmethod
    def joined(cls, parts: Sequence["TopKScores"], device: torch.device) -> "TopKScores":
        """The tokens of several sequences one after another, on `device`."""
        return cls(torch.cat([p.ids for p in parts]).to(device), torch.cat([p.logps for p in parts]).to(device))


@dataclass(frozen=True)
class TopKProjection:
    """Rebuilds logits (n, V) from `TopKScores`: the kept entries as they are, what is left of the mass spread evenly over the others.

    Only sums over the others are meaningful, which is what a comparison of `top_k` entries and a tail uses. Without `tail` the others are
    excluded.
    """

    vocab_size: int
    dtype: torch.dtype
    tail: bool

    def logits(self, scores: TopKScores, temperature: float) -> torch.Tensor:
        kept = scores.logps.to(self.dtype)
        others = torch.full_like(kept[:, :1], -math.inf)
        if self.tail:
            left = (1.0 - kept.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(self.dtype).tiny)
            others = left.log() - math.log(max(self.vocab_size - kept.shape[1], 1))
        logits = others.expand(-1, self.vocab_size).contiguous()
        return logits.scatter_(-1, scores.ids, kept) / temperature
