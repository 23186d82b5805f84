"""What makes the transformer's forward and backward passes fast without changing what is computed.

Used by `opsd/setup_run.py`. An eager LoRA layer at the 1.7B shape is bound by launches and by element-wise passes over memory. Liger's
kernels fuse those of the norms, the rotary embedding and the gated activation; `fuse_adapters` those of the adapter; and PEFT's cast of
every input to the adapter's float32 is dropped, because autocast undoes it.
"""

import importlib.util
from types import MethodType

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

LIGER_PACKAGE = "liger_kernel"
LIGER_KERNELS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,  # it replaces the forward pass of which we take the hidden states
}


def drop_input_casts(model: nn.Module) -> int:
    """Stops PEFT from casting layer inputs to the adapter's dtype: under autocast the product is in bf16 either way.

    Returns the number of layers changed.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    return len(layers)


def choose_liger(args, model_type: str) -> None:
    """Sets which Liger kernels transformers applies for `use_liger_kernel`. Raises ValueError where there are none."""
    if not args.use_liger_kernel:
        return
    if args.device.type != "cuda" or importlib.util.find_spec(LIGER_PACKAGE) is None:
        raise ValueError(
            f"use_liger_kernel=true needs a CUDA device and the package liger-kernel, here device={args.device.type}; set it to false"
        )
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"use_liger_kernel=true: Liger has no kernels for model type {model_type}; set it to false")
    args.liger_kernel_config = LIGER_KERNELS


class AdaptedProduct(torch.autograd.Function):
    """`x W^T + bias + scaling (x A^T) B^T` with frozen `W` and `bias`: three matrix products forward, five backward, no other pass.

    `x` (…, in), `W` (out, in), `bias` (out,) or None, `A` (r, in) and `B` (out, r), which are cast to the dtype of `x`.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling):
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ a.to(x.dtype).t()
        out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        out.addmm_(inner, b.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(rows, inner, weight, a, b)
        ctx.scaling = scaling
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, upstream):
        rows, inner, weight, a, b = ctx.saved_tensors
        grad = upstream.reshape(-1, upstream.shape[-1])
        grad_inner = (grad @ b.to(grad.dtype)).mul_(ctx.scaling)
        grad_b = (grad.t() @ inner).to(b.dtype).mul_(ctx.scaling)
        grad_a = (grad_inner.t() @ rows).to(a.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_inner, a.to(grad.dtype)).view(*upstream.shape[:-1], -1)
        return grad_x, None, None, grad_a, grad_b, None


def _adapted_forward(layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    if layer.disable_adapters:
        return layer.base_layer(x)
    (name,) = layer.active_adapters
    base = layer.base_layer
    with torch.autocast(x.device.type, enabled=False):
        return AdaptedProduct.apply(
            x.to(base.weight.dtype),
            base.weight,
            base.bias,
            layer.lora_A[name].weight,
            layer.lora_B[name].weight,
            layer.scaling[name],
        )


def fuse_adapters(model: nn.Module) -> int:
    """Lets every plain LoRA layer compute its sum in one place. Returns the number of layers changed.

    For weights that are whole on this process, no dropout and one adapter; layers of any other kind are left as they are.
    """
    layers = [m for m in model.modules() if type(m) is LoraLinear and _is_plain(m)]
    for layer in layers:
        layer.forward = MethodType(_adapted_forward, layer)
    return len(layers)


def _is_plain(layer: LoraLinear) -> bool:
    dropouts = list(layer.lora_dropout.values())
    plain = type(layer.base_layer) is nn.Linear and not layer.lora_variant and not any(layer.lora_bias.values())
    return plain and len(dropouts) == 1 and isinstance(dropouts[0], nn.Identity)
