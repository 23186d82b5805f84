"""Invented samples and results for the tests of evaluation, comparison and report."""

import random

from opsd.evaluation import build_statistics, count_by_problem

REGIME = {"seed": 42, "samples_per_problem": 12, "temperature": 1.0, "top_p": 1.0, "kv_cache_dtype": "auto"}


def make_problems(count: int) -> list[dict]:
    return [{"id": str(i), "problem": f"Problem {i}", "answer": str(i)} for i in range(count)]


def make_sample(problem_id: str, index: int, correct: bool, **changes) -> dict:
    return {
        "problem_id": problem_id,
        "sample_index": index,
        "seed": 1000 + index,
        "text": f"completion {problem_id} {index}",
        "token_count": 100,
        "finish_reason": "stop",
        "truncated": False,
        "correct": correct,
        "extracted": problem_id if correct else "-1",
        "reason": "int",
        "engine": "transformers",
        "adapter": None,
    } | changes


def make_samples(rates: list[float], n: int, seed: int) -> list[dict]:
    """`n` samples per problem, each right with its problem's rate; one in twenty of the wrong ones is cut off."""
    generator = random.Random(seed)
    samples = []
    for i, rate in enumerate(rates):
        for j in range(n):
            correct = generator.random() < rate
            cut = not correct and generator.random() < 0.05
            changes = (
                {"truncated": True, "finish_reason": "length", "extracted": None, "reason": "no_box"} if cut else {}
            )
            length = 8192 if cut else int(200 + 4000 * generator.random() ** 2 + 2000 * (1 - rate))
            samples.append(make_sample(str(i), j, correct, text=f"{seed}-{i}-{j}", token_count=length, **changes))
    return samples


def make_result(name: str, samples: list[dict], problems: int, n: int, **changes) -> dict:
    listed = make_problems(problems)
    return {
        "schema": "opsd-eval/1",
        "name": name,
        "model": "model",
        "model_sha256": "model",
        "adapter": name,
        "adapter_sha256": name,
        "benchmark": {"name": "aime24", "sha256": "0" * 64, "problems": problems},
        "regime": REGIME | {"samples_per_problem": n},
        "regime_hash": "1" * 16,
        "engine": {"kind": "vllm", "dtype": "bfloat16", "ignore_eos": False, "load_format": "auto"},
        "prompts_sha256": "2" * 64,
        "commit": "abc",
        "dirty": False,
        "versions": {"torch": "2.13.0"},
        "hardware": {},
        "grader_version": "grader/1",
        "run_seed": 42,
        "training": None,
        "problems": count_by_problem(samples, listed),
        "statistics": build_statistics(samples, listed, n),
    } | changes


def u_shaped_rates(problems: int, seed: int) -> list[float]:
    """Success rates of a typical contest set: some problems nearly always solved, some nearly never."""
    generator = random.Random(seed)
    return [generator.betavariate(0.25, 0.22) for _ in range(problems)]
