"""The student's adapter on its way to an engine, every optimizer step: from the GPU through page-locked buffers into a folder.

Used by opsd/trainer.py. Checkpoints are written by PEFT's `save_pretrained` (opsd/sharding.py). This folder lives for one sync, so it has
no model card; the buffers live as long as the run, because copying into fresh memory is what takes the time.
"""

from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from opsd.adapter import WEIGHTS
from opsd.sharding import whole_matrices
from opsd.teacher_load import ADAPTER


class AdapterExport:
    """Writes what an engine reads of the complete adapter: its weights, in `dtype`, and its configuration."""

    def __init__(self, model: PeftModel, dtype: torch.dtype):
        self._model = model
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}  # by parameter name
        self._named: dict[str, torch.Tensor] = {}  # the same tensors by the name PEFT saves them under

    def write(self, folder: Path) -> None:
        """Fills `folder`, this process's own; every process has to take part, because shards are gathered."""
        for name, tensor in whole_matrices(self._model):
            if name not in self._buffers:
                self._buffers[name] = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=tensor.is_cuda)
            self._buffers[name].copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not self._named:
            self._named = get_peft_model_state_dict(self._model, state_dict=self._buffers, adapter_name=ADAPTER)
        folder.mkdir()
        save_file(self._named, folder / WEIGHTS)
        self._model.peft_config[ADAPTER].save_pretrained(folder)
