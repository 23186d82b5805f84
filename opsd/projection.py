"""The output projection (`lm_head`) for one chunk of hidden states, shared by the fused losses and log-probabilities.

    logits = softcap * tanh(logit_scale * (hidden W^T + bias) / softcap)          (without a softcap: just the scaled sum)

Operands keep the model's dtype; the product comes out in `logits_dtype`, float32 by default. cuBLAS writes float32 from
bf16 operands directly (`out_dtype`); other devices multiply in float32. Rounding logits to bf16 moves entries across the
divergence's clamp and makes its gradient 19 to 46% wrong, so bf16 logits are only there to repeat the published runs.
"""

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

    def hidden_gradient(self, logits_gradient: torch.Tensor, out: torch.Tensor) -> None:
        """Write `logits_gradient W` `(n, H)` into `out`; `logits_gradient` is with respect to `product`'s result."""
        if out.dtype == self.operand_dtype:
            torch.mm(logits_gradient, self.weight, out=out)
        else:
            out.copy_(torch.mm(logits_gradient, self.weight))

    def weight_gradient(self, logits_gradient: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`logits_gradient^T hidden`, `(V, H)`, in float32 or wider."""
        hidden = self.operand(hidden)
        if self.half_product:
            return torch.mm(logits_gradient.t(), hidden, out_dtype=torch.float32)
        return torch.mm(logits_gradient.t(), hidden)


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
    """Tokens per chunk: about 1 GiB of logits for one role, at most 2,048 (larger chunks were not faster on an H200)."""
    return max(1, min(2048, 2**30 // (vocab_size * itemsize)))
