"""Rollouts from weights merged in the model's dtype, as published code samples: an ablation, and what its rounding costs.

The base weights are only read: every layer is merged into a temporary, pushed to the engine and dropped. The reported error is the part of
the adapter's update that rounding to the model's dtype loses (DESIGN.md section 3.1; BASELINES.md section 5).
"""

from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer


class MergedWeights:
    """Iterates over (name in the base model, merged weight) of every adapted layer; afterwards `relative_error` is known."""

    def __init__(self, model: PeftModel):
        self._model = model
        self._lost = self._update = self._applied = 0.0

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._lost = self._update = self._applied = 0.0
        for name, layer in self._model.get_base_model().named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            base = layer.get_base_layer().weight
            update = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
            merged = (base.float() + update).to(base.dtype)
            applied = merged.float() - base.float()
            self._lost += float((applied - update).double().square().sum())
            self._update += float(update.double().square().sum())
            self._applied += float(applied.double().square().sum())
            yield f"{name}.weight", merged

    @property
    def relative_error(self) -> float:
        """|what the merged weights changed - the adapter's update| / |update|, over all layers; 0 while the update is zero."""
        return (self._lost / self._update) ** 0.5 if self._update else 0.0

    @property
    def digest(self) -> str:
        """Changes when what was merged changes."""
        return f"merged-{self._applied!r}"
