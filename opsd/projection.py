"""The output projection (`lm_head`) for one chunk of hidden states, shared by the fused losses and log-probabilities.

    logits = softcap * tanh(logit_scale * (hidden W^T + bias) / softcap)          (without a softcap: just the scaled sum)

Operands keep the model's dtype; the product comes out in `logits_dtype`, float32 by default. cuBLAS writes float32 from
bf16 operands directly (`out_dtype`); other devices multiply in float32. Rounding logits to bf16 moves entries across the
divergence's clamp and makes its gradient 19 to 46% wrong, so bf16 logits are only there to repeat the published runs.
"""

import functools
import math

import torch
from torch.distributed.tensor import DTensor

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class OutputProjection:
    """Weight `(V, H)`, bias `(V,)` or None, and the element-wise steps after them."""

    def __init__(self, weight, bias=None, *, logit_scale=1.0, softcap=None, logits_dtype=torch.float32, operand_dtype):
        if logits_dtype not in LOGITS_DTYPES:
            raise ValueError(f"logits_dtype={logits_dtype} must be one of {', '.join(map(str, LOGITS_DTYPES))}")
        if not math.isfinite(logit_scale) or logit_scale == 0.0:
            raise ValueError(
                f"logit_scale={logit_scale} must be finite and not 0; use 1 to leave the logits as they are"
            )
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ValueError(f"softcap={softcap} must be finite and > 0; use None for no soft-capping")
        self.half_product = weight.device.type == "cuda" and operand_dtype in (torch.bfloat16, torch.float16)
        wide = torch.promote_types(operand_dtype, logits_dtype) if logits_dtype == torch.float64 else operand_dtype
        self.operand_dtype = operand_dtype if self.half_product else torch.promote_types(wide, torch.float32)
        self.compute_dtype = torch.promote_types(logits_dtype, torch.float32)
        self.logits_dtype = logits_dtype
        self.rounding_dtype = operand_dtype
        self.weight = self.operand(weight.detach())
        self.bias = None if bias is None else bias.detach().to(self.compute_dtype)
        self.logit_scale = logit_scale
        self.softcap = softcap

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rounded as the model's own matrix product would, then in the dtype this device multiplies in."""
        return tensor.to(self.rounding_dtype).to(self.operand_dtype)

    def product(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden W^T` in `logits_dtype`, `(n, V)`, no bias, scale or softcap yet."""
        hidden = self.operand(hidden)
        if self.half_product and self.logits_dtype == torch.float32:
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
        if self.operand_dtype == self.logits_dtype:
            return torch.mm(hidden, self.weight.t(), out=out)
        logits = torch.mm(hidden, self.weight.t()).to(self.logits_dtype)
        return logits if out is None else out.copy_(logits)

    def logits(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """Logits divided by `temperature`, `(n, V)` in `compute_dtype`."""
        logits = self.product(hidden)
        if self.bias is not None:
            logits = logits.add_(self.bias.to(logits.dtype))
        logits = logits.to(self.compute_dtype)
        if self.softcap is None:
            return logits.mul_(self.logit_scale / temperature)
        return logits.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / temperature)


class ProjectionGradients:
    """Accumulates what one pass over all chunks leaves for the hidden states, the weight and the bias.

    All are before the pass's common factor (logit_scale / temperature / denominator): the hidden gradient is then of
    order one whatever the number of tokens, so that it can be kept in half precision.
    """

    def __init__(self, projection: OutputProjection, hidden: torch.Tensor, wants: tuple[str, ...]):
        zeros = functools.partial(torch.zeros, dtype=projection.compute_dtype, device=hidden.device)
        self.projection = projection
        self.hidden_states = hidden  # (n, H)
        self.hidden = torch.empty_like(hidden) if "hidden" in wants else None
        self.weight = zeros(projection.weight.shape) if "weight" in wants else None
        self.bias = zeros(projection.weight.shape[:1]) if "bias" in wants else None

    def add(self, rows: slice, gradient: torch.Tensor, token_weights: torch.Tensor | None = None) -> None:
        """Add one chunk, from the gradient `(n, V)` of its product with the weight, times each token's weight."""
        projection = self.projection
        operand = gradient.to(projection.operand_dtype)
        weights = None if token_weights is None else token_weights[rows, None]
        if self.hidden is not None:
            if self.hidden.dtype == projection.operand_dtype:
                torch.mm(operand, projection.weight, out=self.hidden[rows])
            else:
                self.hidden[rows] = torch.mm(operand, projection.weight)
            if weights is not None:
                self.hidden[rows] *= weights
        if self.weight is not None:
            hidden = self.hidden_states[rows] if weights is None else self.hidden_states[rows] * weights
            out_dtype = {"out_dtype": torch.float32} if projection.half_product else {}
            self.weight += torch.mm(operand.t(), projection.operand(hidden), **out_dtype)
        if self.bias is not None:
            self.bias += (gradient if weights is None else gradient * weights).sum(0)

    def attach(self, loss, scale, inputs: dict[str, torch.Tensor], kept: torch.Tensor | None) -> torch.Tensor:
        """The loss with a graph that hands out these gradients times `scale`. `kept`: the rows the pass was given."""
        found = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        if kept is not None and "hidden" in inputs:
            found["hidden"] = torch.zeros_like(inputs["hidden"]).index_copy_(0, kept, self.hidden)
        return _KnownGradients.apply(loss, scale, [found[name] for name in inputs], *inputs.values())


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, scale, gradients, *inputs):
        ctx.save_for_backward(scale, *gradients)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        scale, *gradients = ctx.saved_tensors
        factor = upstream * scale
        scaled = [(tensor * factor).to(dtype) for tensor, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return None, None, None, *scaled


def inputs_with_gradient(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those of the named tensors whose gradient is wanted now."""
    return {name: x for name, x in tensors.items() if x is not None and x.requires_grad and torch.is_grad_enabled()}


def divide(loss_sum: torch.Tensor, factor: float, denominator: float | torch.Tensor):
    """`loss_sum / denominator` and the gradients' common factor `factor / denominator`, both without waiting for a GPU."""
    scale = torch.full((), factor, dtype=loss_sum.dtype, device=loss_sum.device)
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(loss_sum.device, loss_sum.dtype)
    return loss_sum / denominator, scale / denominator


def operand_dtype_of(hidden: torch.Tensor) -> torch.dtype:
    """What `F.linear` would multiply in: the autocast dtype where autocast is on, otherwise the hidden states' own."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def check_projection(hidden, weight, bias, role: str) -> None:
    """Raise `ValueError` unless hidden `(N, H)`, weight `(V, H)` and bias `(V,)` are whole tensors that fit together."""
    for name, tensor in (("hidden states", hidden), ("lm_head weight", weight), ("lm_head bias", bias)):
        sharded = isinstance(tensor, DTensor) or (
            name != "hidden states" and tensor is not None and tensor.numel() == 0
        )
        if sharded:
            raise ValueError(
                f"{role} {name} is sharded (DTensor or an empty partition); a vocabulary-sharded projection is not "
                "supported, gather the full parameter around the call"
            )
    fits = hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (hidden, weight, bias)]
        raise ValueError(f"{role} hidden, weight, bias have shapes {shapes}; expected (N, H), (V, H), (V,) or None")


def default_chunk_size(vocab_size: int, itemsize: int) -> int:
    """Tokens per chunk: at most 1 GiB of logits a role and 2,048 tokens, in whole multiples of 512 where there are any, else of 128.

    A chunk that a matrix product cannot cut into whole tiles costs 6% on an H200 (1,664 against 1,536 tokens, results/bench_loss.json).
    """
    tokens = max(1, min(2048, 2**30 // (vocab_size * itemsize)))
    return tokens // 512 * 512 or tokens // 128 * 128 or tokens
