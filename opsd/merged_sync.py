"""Rollouts from weights merged in the model's dtype, as published code samples: an ablation, and what its rounding costs.

The base weights are only read: every layer is merged into a temporary, pushed to the engine and dropped. The reported error is the part of
the adapter's update that rounding to the model's dtype loses (DESIGN.md section 3.1; BASELINES.md section 5).
"""

from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer


class RoundedWeights:
    """Iterates over (name, weight as the engine gets it); afterwards `relative_error` is known. Subclasses say what the weights are."""

    def __init__(self) -> None:
        self._lost = self._update = self._applied = 0.0

    def changes(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(name, weight before any update, its update, both in float32; weight as the engine gets it) of every layer."""
        raise NotImplementedError

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._lost = self._update = self._applied = 0.0
        for name, before, update, rounded in self.changes():
            applied = rounded.float() - before
            self._lost += float((applied - update).double().square().sum())
            self._update += float(update.double().square().sum())
            self._applied += float(applied.double().square().sum())
            yield name, rounded

    @property
    def relative_error(self) -> float:
        """|what the engine's weights changed - the update| / |update|, over all layers; 0 while the update is zero."""
        return (self._lost / self._update) ** 0.5 if self._update else 0.0

    @property
    def digest(self) -> str:
        """Changes when what the engine gets changes."""
        return f"merged-{self._applied!r}"


class MergedWeights(RoundedWeights):
    """Every adapted layer by its name in the base model, merged."""

    def __init__(self, model: PeftModel):
        super().__init__()
        self._model = model

    def changes(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        for name, layer in self._model.get_base_model().named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            base = layer.get_base_layer().weight
            before = base.float()
            update = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
            yield f"{name}.weight", before, update, (before + update).to(base.dtype)
