"""Muon for the tiny model's pretraining: momentum, orthogonalised per weight matrix (Jordan et al. 2024), in float32.

Used by `pretrain.py`; it needs fewer steps than AdamW. torch.optim.Muon does the same in bfloat16, which is slow on CPUs and rounds
differently from one processor to another. Matrices of one shape are orthogonalised together, since they are small.
"""

import torch

# Newton-Schulz coefficients of the published quintic iteration: singular values end between about 0.7 and 1.2 after five rounds.
_A, _B, _C, _ROUNDS = 3.4445, -4.7750, 2.0315, 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """(N, rows, columns) -> the same shape, each with its singular values moved to about 1."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Weight matrices only (never embeddings or norms). `step(learning_rate)` consumes the gradients."""

    def __init__(self, parameters: list[torch.nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.01):
        self.momentum, self.weight_decay = momentum, weight_decay
        self._by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            self._by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        self._average = {shape: torch.zeros(len(group), *shape) for shape, group in self._by_shape.items()}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for shape, group in self._by_shape.items():
            gradient = torch.stack([parameter.grad for parameter in group])  # (N, rows, columns)
            average = self._average[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(average, self.momentum))  # Nesterov
            update *= max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, direction in zip(group, update, strict=True):
                parameter.mul_(1 - learning_rate * self.weight_decay).sub_(direction, alpha=learning_rate)
                parameter.grad = None
