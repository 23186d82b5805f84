"""Times the fused loss beside its floor, the published arithmetic and Liger, with peak memory and gradient error.

    python bench/loss.py --output results/bench_loss.json
    python bench/loss.py --tokens 131072 --only triton_f32

Each row is one loss with its backward pass to the student's hidden states, from hidden states `(N, H)` of both roles and
one projection `(V, H)`. It is timed in turns with the floor: the three matrix products alone (6 N H V operations), bf16
in and out, chunk by chunk. Peak memory is above the inputs, gradient included. The gradient error is against float64 on
`--error-tokens` tokens.
Synthetic logits: standard deviation 5, the teacher's hidden states 0.1 of a standard deviation from the student's.
A peer that cannot clamp is timed without the clamp and its gradient compared with the unclamped one.
"""

import argparse
import functools
import importlib.util
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from opsd.fused_divergence import closed_form, fused_generalized_jsd
from opsd.runinfo import git_state, hardware, package_versions, write_json

TEMPERATURE = 1.1
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def ours(backend, logits_dtype, chunk_size, student, teacher, weight, beta, entry_clip):
    settings = {"beta": beta, "temperature": TEMPERATURE, "entry_clip": entry_clip}
    return fused_generalized_jsd(
        student,
        teacher,
        weight,
        None,
        backend=backend,
        logits_dtype=DTYPES[logits_dtype],
        chunk_size=chunk_size,
        **settings,
    )[0]


def published(upcast, student, teacher, weight, beta, entry_clip):
    """Full tensors, everything in the logits' dtype (bf16, or upcast to float32 after the projection)."""
    logits = F.linear(student, weight)
    with torch.no_grad():
        teacher_logits = F.linear(teacher, weight)
    if upcast:
        logits, teacher_logits = logits.float(), teacher_logits.float()
    log_probs = (logits / TEMPERATURE).log_softmax(-1)
    teacher_log_probs = (teacher_logits / TEMPERATURE).log_softmax(-1)
    if beta == 0.0:
        entries = F.kl_div(log_probs, teacher_log_probs, reduction="none", log_target=True)
    elif beta == 1.0:
        entries = F.kl_div(teacher_log_probs, log_probs, reduction="none", log_target=True)
    else:
        parts = torch.stack([log_probs + math.log(1 - beta), teacher_log_probs + math.log(beta)])
        mixture = parts.logsumexp(0)
        teacher_part = F.kl_div(mixture, teacher_log_probs, reduction="none", log_target=True)
        entries = beta * teacher_part + (1 - beta) * F.kl_div(mixture, log_probs, reduction="none", log_target=True)
    return entries.clamp(max=entry_clip).sum() / student.shape[0]


def liger_chunked(student, teacher, weight, beta, entry_clip):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=TEMPERATURE)
    labels = torch.zeros(student.shape[0], dtype=torch.long, device=student.device)
    return loss(student, weight, teacher, weight, labels)


def liger_triton(student, teacher, weight, beta, entry_clip):
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=beta, temperature=TEMPERATURE)(student, weight, teacher, weight, None)


def candidates(device: torch.device, chunk_size: int | None) -> dict:
    """Name -> (loss function, can clamp)."""
    found = {}
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        found |= {f"triton_{name}": (functools.partial(ours, "triton", name, chunk_size), True) for name in DTYPES}
    found |= {f"torch_{name}": (functools.partial(ours, "torch", name, chunk_size), True) for name in DTYPES}
    found |= {"published_bf16": (functools.partial(published, False), True)}
    found |= {"published_upcast": (functools.partial(published, True), True)}
    if importlib.util.find_spec("liger_kernel") is not None:
        found |= {"liger_chunked": (liger_chunked, False), "liger_triton": (liger_triton, False)}
    return found


def make_inputs(tokens: int, hidden: int, vocab_size: int, device: torch.device, seed: int = 0):
    generator = torch.Generator(device).manual_seed(seed)
    student = torch.randn(tokens, hidden, generator=generator, device=device)
    teacher = student + 0.1 * torch.randn(tokens, hidden, generator=generator, device=device)
    weight = torch.randn(vocab_size, hidden, generator=generator, device=device) * (5 / hidden**0.5)
    return student.bfloat16(), teacher.bfloat16(), weight.bfloat16()


def timed(runs, device: torch.device, repeats: int) -> list[list[float]]:
    """Milliseconds of each run, taken in turns after a warm-up: a GPU slows down as it heats up, so only times that were
    taken beside each other compare."""
    times = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, taken in zip(runs, times, strict=True):
            synchronize(device)
            started = time.perf_counter()
            run()
            synchronize(device)
            if repeat > 0:
                taken.append(1000 * (time.perf_counter() - started))
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def floor_run(student, teacher, weight, chunk_size=2048):
    """The three products of every chunk, into reused buffers."""
    logits = torch.empty(chunk_size, weight.shape[0], dtype=weight.dtype, device=weight.device)
    gradient = torch.randn(logits.shape, device=weight.device).mul_(1e-3).to(weight.dtype)
    out = torch.empty_like(student)

    def run():
        for start in range(0, student.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            count = student[rows].shape[0]
            torch.mm(student[rows], weight.t(), out=logits[:count])
            torch.mm(teacher[rows], weight.t(), out=logits[:count])
            torch.mm(gradient[:count], weight, out=out[rows])

    return run


def gradient_error(loss_function, student, teacher, weight, beta, entry_clip) -> dict[str, float]:
    """Relative error and 1 - cosine of the hidden states' gradient against float64."""
    student = student.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss_function(student, teacher, weight, beta, entry_clip), student)
    wide = weight.double()
    logits, teacher_logits = (hidden.detach().double() @ wide.t() / TEMPERATURE for hidden in (student, teacher))
    *_, reference = closed_form(logits, teacher_logits, beta, entry_clip, "entry")
    reference = reference @ wide / (TEMPERATURE * student.shape[0])
    got = got.double()
    relative = ((got - reference).norm() / reference.norm()).item()
    cosine = F.cosine_similarity(got.flatten(), reference.flatten(), dim=0).item()
    return {"gradient_relative_error": relative, "gradient_cosine": cosine}


def measure(loss_function, inputs, beta, entry_clip, repeats) -> dict[str, float]:
    """Median milliseconds of the loss and of the floor beside it, and GiB above the inputs."""
    student, teacher, weight = inputs
    student = student.clone().requires_grad_()

    def run():
        torch.autograd.grad(loss_function(student, teacher, weight, beta, entry_clip), student)

    row = {}
    run()
    if student.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    floor = floor_run(student.detach(), teacher, weight)
    floor_times, times = timed([floor, run], student.device, repeats)
    row |= {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    row["floor_ms"] = statistics.median(floor_times)
    return row | {"x_floor": row["ms"] / row["floor_ms"]}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--entry-clip", type=float, default=0.05, help="nats; inf = off")
    parser.add_argument("--chunk-size", type=int, help="tokens a chunk of ours; unset = the default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--error-tokens", type=int, default=512)
    parser.add_argument("--only", nargs="+", help="rows to measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    rows = []
    sys.stdout.write(
        f"{'tokens':>7} {'beta':>5} {'row':<17} {'ms':>9} {'floor':>8} {'x floor':>8} {'peak GiB':>9}  error\n"
    )
    for tokens in args.tokens:
        inputs = make_inputs(tokens, args.hidden, args.vocab_size, device)
        sample = make_inputs(args.error_tokens, args.hidden, args.vocab_size, device, seed=1)
        for beta in args.beta:
            for name, (loss_function, clamps) in candidates(device, args.chunk_size).items():
                if args.only and name not in args.only:
                    continue
                clip = args.entry_clip if clamps else math.inf
                row = {"tokens": tokens, "beta": beta, "row": name, "clamped": clamps and clip < math.inf}
                try:
                    row |= measure(loss_function, inputs, beta, clip, args.repeats)
                    row |= gradient_error(loss_function, *sample, beta, clip)
                except torch.cuda.OutOfMemoryError:
                    row["error"] = "out of memory"
                add_row(rows, row)
    if args.output is not None:
        shape = {"hidden": args.hidden, "vocab_size": args.vocab_size, "entry_clip": str(args.entry_clip)}
        shape |= {"temperature": TEMPERATURE, "error_tokens": args.error_tokens, "repeats": args.repeats}
        record = {"command": ["python", "bench/loss.py", *argv], "git": git_state(), "hardware": hardware()}
        write_json(args.output, record | {"packages": package_versions(), "shape": shape, "rows": rows})


def add_row(rows: list[dict], row: dict) -> None:
    """Keep the row and print it."""
    rows.append(row)
    text = f"{row['tokens']:>7} {row['beta']:>5} {row['row']:<17}"
    if "ms" in row:
        text += f" {row['ms']:>9.1f} {row['floor_ms']:>8.1f} {row['x_floor']:>8.2f}"
    if "peak_gib" in row:
        text += f" {row['peak_gib']:>9.2f}"
    if "gradient_relative_error" in row:
        text += f"  {row['gradient_relative_error']:.4f} (cosine {row['gradient_cosine']:.6f})"
    sys.stdout.write(text + (f"  {row['error']}" if "error" in row else "") + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
