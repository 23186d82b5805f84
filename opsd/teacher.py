"""The privileged role: whose weights score the student's tokens.

    base     the initial policy: the same model with its adapter switched off. Costs no memory and cannot drift, because the base weights
             are never written (DESIGN.md section 3.1). Without an adapter it is a frozen copy (opsd/full_weights.py).
    live     the student itself.
    ema      base + an exponential moving average of the adapter's *effective* weights. The average of A and the average of B do not
             multiply to the average of B A, so the product `scaling * B A` of every adapted layer is averaged, exactly, in float32:
             `E <- decay E + (1 - decay) scaling B A` after every optimizer step, from E = 0, the initial policy. It costs as much memory,
             and as much disk per checkpoint, as the adapted layers have in float32.
    adapter  base + a second adapter from a folder, frozen; its rank and targets may differ from the student's.
    model    another model, frozen, with the student's vocabulary; here, or behind a vLLM server (opsd/teacher_server.py).

For `ema` and `adapter` the student's own LoRA layers compute the teacher: their matrices are exchanged during its forward pass, which
copies nothing and leaves the model's structure, its checkpoints and its wrappers as they are.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.liger import apply_liger_kernel

from opsd.args import OPSDConfig
from opsd.batch import ModelInputs
from opsd.hidden_tap import HiddenTap
from opsd.method_args import is_address
from opsd.rollout import Rollout
from opsd.switches import Switches
from opsd.teacher_load import ADAPTER, adapter_matrices, load_teacher, lora_layers, pair_for
from opsd.teacher_scores import TopKScores
from opsd.teacher_server import TeacherServer

logger = logging.getLogger(__name__)

EMA_FILE = "teacher_ema.safetensors"


def completion_hidden(model: torch.nn.Module, tap: HiddenTap, inputs: ModelInputs) -> torch.Tensor:
    """Hidden states that predict the completion tokens, (N, H), in the dtype of the output projection."""
    with tap.selecting(inputs.keep):
        hidden = model(**inputs.forward, use_cache=False).logits
    return hidden.to(tap.dtype)


@contextmanager
def teacher_weights(model: PreTrainedModel, kind: str, switches: Switches | None = None) -> Iterator[None]:
    """Puts the weights of teacher `base` or `live` in place inside the block, without gradients and without dropout.

    `switches`: the model's, where they are made once for many blocks.
    """
    if kind not in ("base", "live"):
        raise ValueError(f"teacher_kind={kind!r} must be base or live")
    switches = switches or Switches(model)
    with switches.frozen(), switches.adapter_off() if kind == "base" else nullcontext():
        yield


@contextmanager
def exchanged(matrices: dict[torch.nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Lets each parameter hold another matrix inside the block; shapes may differ. Nothing is copied."""
    own = {parameter: parameter.data for parameter in matrices}
    try:
        for parameter, matrix in matrices.items():
            parameter.data = matrix
        torch.clear_autocast_cache()  # autocast remembers the low-precision copy of a parameter
        yield
    finally:
        for parameter, matrix in own.items():
            parameter.data = matrix
        torch.clear_autocast_cache()


class Teacher:
    """Scores the student's tokens with the weights of `args.teacher_kind`."""

    def __init__(
        self,
        args: OPSDConfig,
        student: PreTrainedModel,
        student_tap: HiddenTap,
        *,
        frozen: PreTrainedModel | None = None,
        sharded: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api_key: str | None = None,
    ):
        """`frozen`: the untrained copy of a student that has no adapter. `sharded`: whether the student's weights will be spread over
        processes (FSDP). `api_key`: of a teacher's server."""
        self._kind = args.teacher_kind
        self._decay = args.teacher_ema_decay
        self._student, self._tap, self._model = student, student_tap, student
        self._averages: dict[str, torch.Tensor] = {}  # adapted layer -> (out, in)
        self._identities: dict[tuple[int, float], torch.Tensor] = {}
        self._updates = 0
        self._matrices: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._server: TeacherServer | None = None
        self._switches: Switches | None = None
        if self._kind in ("ema", "adapter") and sharded:
            raise ValueError(
                f"teacher_kind={self._kind} needs whole weights on every process; use DDP or ZeRO-2, or teacher_kind=base"
            )
        if self._kind == "ema":
            layers = lora_layers(student).items()
            self._averages = {
                name: torch.zeros_like(layer.get_base_layer().weight, dtype=torch.float32) for name, layer in layers
            }
        elif self._kind == "adapter":
            self._matrices = adapter_matrices(student, Path(args.teacher_adapter))
        elif self._kind == "model" and is_address(args.teacher_model):
            rows = student.get_output_embeddings().weight.shape[0]
            self._server = TeacherServer(args.teacher_model, api_key, args.loss_top_k, rows, tokenizer)
        elif self._kind == "model":
            self._model = load_teacher(args.teacher_model, student, student_tap.dtype)
        elif self._kind == "base" and frozen is not None:
            self._model = frozen
        if self._model is not student:
            self._tap = HiddenTap(self._model, student_tap.dtype)
            if args.use_liger_kernel:  # as the training loop does for the student
                apply_liger_kernel(self._model, args.liger_kernel_config)

    def ask(self, examples: list[dict], rollouts: list[Rollout]) -> list[TopKScores] | None:
        """A server's scores of a step's sequences; None for a teacher that is here. Raises EngineDied when the server stays away."""
        if self._server is None:
            return None
        prompts = [example["teacher_prompt_ids"] for example in examples]
        return self._server.score(prompts, [rollout.completion_ids for rollout in rollouts])

    @property
    def tap(self) -> HiddenTap:
        """Of the teacher's model; the student's where a server projects."""
        return self._tap

    def hidden(self, inputs: ModelInputs) -> torch.Tensor:
        """Hidden states that predict the completion tokens, (N, H of the teacher), without gradient."""
        with self.weights():
            return completion_hidden(self._model, self._tap, inputs)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The teacher's weights are in place inside the block, without gradients and without dropout."""
        self._switches = self._switches or Switches(
            self._model
        )  # now, because sharding may exchange modules at the start
        if self._model is self._student and self._kind in ("base", "live"):
            with teacher_weights(self._student, self._kind, self._switches):
                yield
            return
        matrices = self._average_matrices() if self._kind == "ema" else self._matrices
        with self._switches.frozen(), exchanged(matrices):
            yield

    def _average_matrices(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Every average as a pair (B, A) for its LoRA layer, with the identity on the smaller side."""
        matrices = {}
        for name, layer in lora_layers(self._student).items():
            average, scaling = self._averages[name], layer.scaling[ADAPTER]
            out_features, in_features = average.shape
            size = min(out_features, in_features), scaling
            if size not in self._identities:  # undoes the layer's own scaling
                self._identities[size] = torch.eye(size[0], device=average.device) / scaling
            identity = self._identities[size]
            pair = (average, identity) if in_features <= out_features else (identity, average)
            matrices |= pair_for(layer, *pair)
        return matrices

    def advance(self, step: int) -> None:
        """Takes the student's weights after optimizer step `step` into the average, once."""
        if self._kind != "ema" or step <= self._updates:
            return
        with torch.no_grad():
            for name, layer in lora_layers(self._student).items():
                product = layer.get_delta_weight(ADAPTER).float()
                self._averages[name].lerp_(product.to(self._averages[name].device), 1 - self._decay)
        self._updates = step

    def save(self, checkpoint: Path, step: int) -> None:
        """Writes what the teacher has accumulated up to optimizer step `step` into the checkpoint."""
        if self._kind == "ema":
            self.advance(step)
            state = {name: average.contiguous() for name, average in self._averages.items()}
            save_file(state, checkpoint / EMA_FILE, metadata={"step": str(step)})

    def load(self, checkpoint: Path) -> None:
        """Restores what `save` wrote. Raises FileNotFoundError when the checkpoint has none."""
        if self._kind != "ema":
            return
        path = checkpoint / EMA_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"resume_from_checkpoint={checkpoint} has no {EMA_FILE}: it was not trained with teacher_kind=ema"
            )
        with safe_open(path, framework="pt") as state:
            for name, average in self._averages.items():
                average.copy_(state.get_tensor(name))
            self._updates = int(state.metadata()["step"])
        logger.info("teacher: moving average restored, %d layers, %d updates", len(self._averages), self._updates)
