"""What makes the transformer's forward and backward fast without changing what is computed.

Used by `opsd/setup_run.py` on CUDA. At the 1.7B shape an eager LoRA layer is bound by launches and by element-wise passes over memory;
compiling the decoder layers fuses those, and PEFT's cast of every input to the adapter's float32 is dropped because autocast undoes it.
"""

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def drop_input_casts(model: nn.Module) -> int:
    """Stops PEFT from casting layer inputs to the adapter's dtype: under autocast the product is in bf16 either way.

    Returns the number of layers changed.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    return len(layers)


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> int:
    """Compiles every decoder layer for any sequence length; all layers share the compiled code. Returns their number."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    return len(layers)
