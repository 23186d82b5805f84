"""A progress bar over optimizer steps with the loss, the unclipped divergence and the time left."""

from tqdm.auto import tqdm
from transformers import TrainerCallback


class ProgressBar(TrainerCallback):
    def __init__(self):
        self._bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and not args.disable_tqdm:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="train", unit="step", dynamic_ncols=True
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._bar is not None and "loss/objective" in logs:
            self._bar.set_postfix(loss=f"{logs['loss/objective']:.4g}", divergence=f"{logs['loss/divergence']:.4g}")

    def on_step_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.update(1)

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.close()
            self._bar = None
