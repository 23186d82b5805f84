"""The method's arguments: objective, token weights, teacher and stopping rules; a part of `OPSDConfig` (opsd/args.py).

Every variant of the method that was reported or ruled out is one of these arguments; `recipes/ablations/` sets them. A parameter of a
mode that is not active is refused when it is given. Imports nothing of ours.
"""

import math
import re
from dataclasses import dataclass, field, fields


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    check(value in allowed, f"{name}={value!r} must be one of {', '.join(allowed)}")


def is_address(text: str | None) -> bool:
    """Whether the text names a server rather than a folder or a hub id."""
    return (text or "").startswith(("http://", "https://"))


def check_address(name: str, url: str) -> None:
    plain = re.fullmatch(r"https?://[^/@\s]+/?", url) is not None
    check(plain, f"{name}={url} must look like http://127.0.0.1:8001, without a key in it")


def option(default, help: str, choices: tuple[str, ...] | None = None):
    metadata = {"help": help} if choices is None else {"help": help, "choices": list(choices)}
    return field(default=default, metadata=metadata)


CLIP_MODES = ("entry", "token", "direction", "none")
OBJECTIVES = ("divergence", "sampled_token")
TOKEN_WEIGHTS = ("none", "position", "discrepancy", "contrastive")
TEACHER_KINDS = ("base", "live", "ema", "adapter", "model")
TEACHER_PREFIXES = ("none", "open_think", "empty_think")


@dataclass
class MethodArgs:
    """What the student is pulled towards, by how much, and when a run gives up."""

    # teacher
    teacher_thinking: bool = option(True, "Chat template's enable_thinking in the teacher prompt.")
    teacher_kind: str = option(
        "base",
        "Teacher weights: the initial policy, the live student, a moving average of it, a frozen adapter, or another model.",
        TEACHER_KINDS,
    )
    teacher_ema_decay: float = option(
        0.95,
        "Share of the old average kept per step (teacher_kind ema), of the effective weights; 0 would be live, 1 base.",
    )
    teacher_adapter: str | None = option(None, "Folder of the frozen adapter (teacher_kind adapter); unset = none.")
    teacher_model: str | None = option(
        None,
        "Hub id, folder or vLLM server (http://…) of the other model, same vocabulary (teacher_kind model); unset = none.",
    )
    teacher_prefix: str = option(
        "none",
        "Appended to the teacher prompt, so that both roles start at the same kind of token; none = off.",
        TEACHER_PREFIXES,
    )
    teacher_sees_problem: bool = option(True, "Show the problem to the teacher; false = the reference alone.")
    reason_first_tokens: int = option(
        0, "New tokens of an analysis that the teacher writes of the reference before it scores; 0 = off."
    )

    # objective
    objective: str = option(
        "divergence",
        "Full-vocabulary divergence, or the policy gradient on the sampled token (the published tinker loss).",
        OBJECTIVES,
    )
    beta: float = option(0.0, "0 = KL(teacher||student), 1 = KL(student||teacher), between = generalised JSD.")
    distill_temperature: float = option(1.0, "Temperature of both softmaxes in the loss.")
    entry_clip: float = option(math.inf, "Cap of one vocabulary entry (clip_mode entry) or token, in nats; inf = off.")
    clip_mode: str = option(
        "entry", "What entry_clip caps: entry, token, direction (scaled gradient), none.", CLIP_MODES
    )
    loss_top_k: int = option(0, "Vocabulary entries compared per token, the teacher's likeliest; 0 = all.")
    loss_tail: bool = option(True, "Count everything outside loss_top_k as one more entry; false = renormalise.")
    advantage_clip: float = option(
        math.inf, "Cap of a token's |teacher - student| log-probability (objective sampled_token), in nats; inf = off."
    )
    skip_first_tokens: int = option(0, "Completion tokens at the start that are not trained on; 0 = off.")
    loss_reduction: str = option(
        "token_mean",
        "Mean over all tokens of the step, or over each sequence's tokens and then over sequences.",
        ("token_mean", "sequence_mean"),
    )
    loss_backend: str = option("auto", "Implementation of the fused divergence.", ("auto", "torch", "triton"))
    logits_dtype: str = option("float32", "Precision of the logits in the loss.", ("float32", "bfloat16"))

    # token weights
    token_weight: str = option(
        "none", "Weight of a token's loss by opsd/token_weights.py; none = all tokens alike.", TOKEN_WEIGHTS
    )
    token_weight_floor: float = option(
        0.25, "Smallest weight (token_weight position, contrastive), 0 to 1; 1 would be all tokens alike."
    )
    token_weight_midpoint: float = option(
        0.3,
        "Relative position where the logistic is at its middle (token_weight position), fraction of the completion.",
    )
    token_weight_width: float = option(
        0.1, "Width of the logistic (token_weight position), fraction of the completion."
    )
    token_weight_gain: float = option(
        0.5, "Extra weight of a token before any discrepancy (token_weight discrepancy); 0 would be all tokens alike."
    )
    token_weight_scale: float = option(
        0.02, "Gap between right and wrong reference that counts as large (token_weight contrastive), in nats."
    )
    wrong_reference_seed: int = option(0, "Seed that pairs rows with wrong references (token_weight contrastive).")

    # averages and stopping rules
    wavg_last: int = option(0, "Average the adapter over the last N steps into adapter_wavg; 0 = off.")
    guard_min_length: float = option(
        0.0, "Stop when the mean completion length falls below this fraction of its start; 0 = off."
    )
    guard_min_entropy: float = option(
        0.0, "Stop when the student's entropy falls below this fraction of its start; 0 = off."
    )
    guard_max_divergence: float = option(
        math.inf, "Stop when the unclipped divergence rises above this multiple of its start; inf = off."
    )
    guard_window: int = option(5, "Steps that a guard averages over, at the start and now; needs a guard.")

    def check_method(self) -> None:
        """Raises ValueError for values without meaning, contradictions and parameters of modes that are off."""
        self._check_objective()
        self._check_token_weights()
        self._check_teacher()
        self._check_guards()

    def _inactive(self, names: tuple[str, ...], remedy: str) -> None:
        for own in fields(MethodArgs):
            value = getattr(self, own.name)
            check(own.name not in names or value == own.default, f"{own.name}={value} has no effect: {remedy}")

    def _check_objective(self) -> None:
        check(0 <= self.beta <= 1, f"beta={self.beta} must be in [0, 1]")
        check(
            self.distill_temperature > 0 and math.isfinite(self.distill_temperature),
            f"distill_temperature={self.distill_temperature} must be finite and > 0",
        )
        for name in ("entry_clip", "advantage_clip"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0 nats; use inf to disable")
        check(
            self.clip_mode != "none" or math.isinf(self.entry_clip),
            f"entry_clip={self.entry_clip} has no effect with clip_mode=none; remove one of the two",
        )
        check(
            self.loss_top_k >= 0, f"loss_top_k={self.loss_top_k} must be >= 0 entries; use 0 for the whole vocabulary"
        )
        check(
            self.skip_first_tokens >= 0,
            f"skip_first_tokens={self.skip_first_tokens} must be >= 0 tokens; use 0 for none",
        )
        if self.objective == "sampled_token":
            divergence_only = ("beta", "entry_clip", "clip_mode", "loss_top_k", "loss_tail", "loss_backend")
            self._inactive(divergence_only, "objective=sampled_token has no divergence; leave it at its default")
        else:
            self._inactive(("advantage_clip",), "it needs objective=sampled_token")
        if self.loss_top_k == 0:
            self._inactive(("loss_tail",), "it needs loss_top_k > 0")
        check(
            not (self.beta == 1 and self.loss_top_k and not self.loss_tail),
            f"loss_tail=false with beta=1 and loss_top_k={self.loss_top_k} is refused: without a tail the reverse KL rewards "
            "mass outside the top k; set loss_tail=true",
        )
        check(
            not (self.loss_backend == "triton" and (self.loss_top_k or self.logits_dtype != "float32")),
            "loss_backend=triton supports neither loss_top_k nor logits_dtype=bfloat16; set loss_backend=auto",
        )

    def _check_token_weights(self) -> None:
        parameters = {
            "token_weight_floor": ("position", "contrastive"),
            "token_weight_midpoint": ("position",),
            "token_weight_width": ("position",),
            "token_weight_gain": ("discrepancy",),
            "token_weight_scale": ("contrastive",),
            "wrong_reference_seed": ("contrastive",),
        }
        for name, modes in parameters.items():
            if self.token_weight not in modes:
                self._inactive((name,), f"it needs token_weight={' or '.join(modes)}")
        check(0 <= self.token_weight_floor < 1, f"token_weight_floor={self.token_weight_floor} must be in [0, 1)")
        check(
            0 <= self.token_weight_midpoint <= 1,
            f"token_weight_midpoint={self.token_weight_midpoint} must be in [0, 1]",
        )
        for name in ("token_weight_width", "token_weight_gain", "token_weight_scale"):
            value = getattr(self, name)
            check(0 < value < math.inf, f"{name}={value} must be finite and > 0; use token_weight=none for no weights")

    def _check_teacher(self) -> None:
        for kind, name in (("ema", "teacher_ema_decay"), ("adapter", "teacher_adapter"), ("model", "teacher_model")):
            if self.teacher_kind != kind:
                self._inactive((name,), f"it needs teacher_kind={kind}")
        check(
            0 < self.teacher_ema_decay < 1,
            f"teacher_ema_decay={self.teacher_ema_decay} must be in (0, 1); use teacher_kind=live for 0, base for 1",
        )
        for kind, name in (("adapter", "teacher_adapter"), ("model", "teacher_model")):
            check(
                self.teacher_kind != kind or bool(getattr(self, name)),
                f"teacher_kind={kind} needs {name}, the folder to load",
            )
        if is_address(self.teacher_model):
            self._check_teacher_server()
        check(
            not (self.teacher_kind == "model" and self.objective == "sampled_token"),
            "teacher_kind=model needs objective=divergence: the sampled-token loss uses one output projection for both roles",
        )
        check(
            self.reason_first_tokens >= 0,
            f"reason_first_tokens={self.reason_first_tokens} must be >= 0; use 0 to disable",
        )
        check(
            not (self.reason_first_tokens and self.teacher_kind != "base"),
            f"reason_first_tokens > 0 needs teacher_kind=base, not {self.teacher_kind}: the engine writes the analyses with the base model",
        )
        check(
            not (self.reason_first_tokens and self.token_weight == "contrastive"),
            "reason_first_tokens > 0 contradicts token_weight=contrastive, whose wrong references have no analysis; set one of them",
        )

    def _check_teacher_server(self) -> None:
        name = f"teacher_model={self.teacher_model} is a server, which returns its likeliest entries at temperature 1:"
        check_address("teacher_model", self.teacher_model)
        check(self.loss_top_k > 0, f"{name} loss_top_k={self.loss_top_k} must be > 0, at most its --max-logprobs")
        retempered = self.distill_temperature != 1 and self.loss_tail
        check(not retempered, f"{name} distill_temperature={self.distill_temperature} must be 1, or loss_tail=false")
        check(
            self.token_weight in ("none", "position"),
            f"{name} token_weight={self.token_weight} needs the teacher's own weights; use none or position",
        )

    def _check_guards(self) -> None:
        for name in ("guard_min_length", "guard_min_entropy"):
            value = getattr(self, name)
            check(0 <= value < 1, f"{name}={value} must be in [0, 1), a fraction of the start; use 0 to disable")
        check(
            self.guard_max_divergence > 1,
            f"guard_max_divergence={self.guard_max_divergence} must be > 1, a multiple of the start; use inf to disable",
        )
        check(self.guard_window > 0, f"guard_window={self.guard_window} must be > 0 steps")
        if not (self.guard_min_length or self.guard_min_entropy or math.isfinite(self.guard_max_divergence)):
            self._inactive(
                ("guard_window",), "no guard is on; set guard_min_length, guard_min_entropy or guard_max_divergence"
            )
        measured = self.guard_min_entropy or math.isfinite(self.guard_max_divergence)
        check(
            not (measured and self.objective == "sampled_token"),
            "guard_min_entropy and guard_max_divergence need objective=divergence: the sampled-token loss measures neither",
        )
