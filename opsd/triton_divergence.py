"""The fused loss's pass over all chunks with the Triton kernel, for CUDA devices.

Measured on an H200 (H 2048, V 151,936, float32 logits, beta 0; results/bench_loss.json): the two sweeps move their bytes at
97% of the GPU's copy bandwidth, and the three matrix products take 1.05 times what they take with bf16 logits. Running the
sweeps of a chunk beside the products of the next, on 12 to 24 multiprocessors that cuBLAS was told to leave free, was
slower than one after the other (63 to 95 against 60 ms): so few multiprocessors do not reach the memory bandwidth.
"""

import math

import torch
from triton.runtime.interpreter import InterpretedFunction

from .divergence import STATISTICS
from .divergence_kernel import CLIP_CODES, COLUMNS, divergence_rows
from .projection import ProjectionGradients

# Fastest of about 60 shapes on an H200, by (bytes per logit, is it a mixture). A warp's 16-byte accesses have to fit into
# LANES (32 threads x num_warps x entries in 16 bytes), or Triton sums over UNROLL through shared memory, ten times slower.
LAUNCH = {
    (4, False): {"LANES": 1024, "UNROLL": 8, "BLOCK": 8192, "num_warps": 8, "maxnreg": 128},
    (4, True): {"LANES": 2048, "UNROLL": 2, "BLOCK": 8192, "num_warps": 16, "maxnreg": 64},
    (2, False): {"LANES": 1024, "UNROLL": 4, "BLOCK": 2048, "num_warps": 4, "maxnreg": 128},
    (2, True): {"LANES": 4096, "UNROLL": 2, "BLOCK": 8192, "num_warps": 16, "maxnreg": 128},
}
FEW_LANES = 12  # up to so many lanes are visited one by one, more in one masked sweep


def check_triton(student, teacher, settings, device) -> None:
    """Raise `ValueError` for what this backend does not do."""
    if device.type != "cuda" and not isinstance(divergence_rows, InterpretedFunction):
        raise ValueError(f"backend='triton' needs a CUDA device, not device={device}; use backend='torch'")
    refused = {
        f"top_k={settings.top_k}": settings.top_k is not None,
        "lm_head_bias": student.bias is not None or teacher.bias is not None,
        f"softcap={student.softcap}": student.softcap is not None,
        f"logits_dtype={student.logits_dtype}": student.logits_dtype == torch.float64,
    }
    for name, present in refused.items():
        if present:
            raise ValueError(f"{name} is not supported by backend='triton'; use backend='torch' or 'auto'")


def triton_pass(student, teacher, student_hidden, teacher_hidden, settings, chunk_size, token_weights, wants):
    """As `fused_divergence.torch_pass`."""
    check_triton(student, teacher, settings, student_hidden.device)
    tokens, vocab_size = student_hidden.shape[0], student.weight.shape[0]
    device = student_hidden.device
    chunk_size = min(chunk_size, max(tokens, 1))
    logits = torch.empty(2, chunk_size, vocab_size, dtype=student.logits_dtype, device=device)
    gradient_dtype = student.operand_dtype
    gradient = torch.empty(chunk_size if wants else 0, vocab_size, dtype=gradient_dtype, device=device)
    columns = torch.empty(tokens, COLUMNS, dtype=torch.float32, device=device)
    gradients = ProjectionGradients(student, student_hidden, wants)
    for start in range(0, tokens, chunk_size):
        rows = slice(start, start + chunk_size)
        count = min(chunk_size, tokens - start)
        student_logits = student.product(student_hidden[rows], out=logits[0, :count])
        teacher_logits = teacher.product(teacher_hidden[rows], out=logits[1, :count])
        divergence_rows[(count,)](
            student_logits,
            teacher_logits,
            gradient,
            columns[rows],
            count,
            vocab_size,
            logits.stride(1),
            gradient.stride(0),
            student.logit_scale / settings.temperature / math.log(2.0),
            settings.entry_clip / math.log(2.0),
            settings.beta,
            KIND=0 if settings.beta == 0.0 else 1 if settings.beta == 1.0 else 2,
            CLIP=CLIP_CODES[settings.clip_mode],
            WRITE_GRADIENT=bool(wants),
            FEW=FEW_LANES,
            DEPTH=256,
            **LAUNCH[logits.element_size(), 0.0 < settings.beta < 1.0],
        )
        if wants:
            gradients.add(rows, gradient[:count], token_weights)
    token_loss = columns[:, 0]
    loss = (token_loss if token_weights is None else token_loss * token_weights).sum()
    sums = columns.sum(0)
    count = torch.full((), float(tokens), device=device)  # not torch.tensor, whose copy would wait for the GPU
    found = {
        "tokens": count,
        "entries": count * vocab_size,
        "divergence_sum": sums[1],
        "clipped_entries": sums[2],
        "clipped_tokens": sums[3],
        "student_entropy_sum": sums[4],
        "teacher_entropy_sum": sums[5],
        "teacher_top_k_mass_sum": count,
        "student_top_k_mass_sum": count,
    }
    return loss, torch.stack([found[name] for name in STATISTICS]), gradients
