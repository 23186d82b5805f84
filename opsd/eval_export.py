"""A result in the form of other evaluators' JSON files, so that it fits into tables people have already.

The standard error is the one for new problems: both tools state that one (standard deviation of the problems' means over the root of their
number), whatever they call it. What has no place in their form stands under `opsd`.
"""

from pathlib import Path

from opsd.eval_store import RESULT, read_record
from opsd.runinfo import write_json


def export_result(folder: Path, style: str) -> Path:
    """Writes `<folder>/<style>.json` from the folder's result.json and returns its path."""
    result = read_record(Path(folder) / RESULT)
    record = {"lm-eval": as_lm_eval, "lighteval": as_lighteval}[style](result)
    path = Path(folder) / f"{style}.json"
    write_json(path, record)
    return path


def _scores(result: dict) -> dict[str, tuple[float, float | None]]:
    """Metric -> (score, standard error for new problems)."""
    statistics = result["statistics"]
    k = statistics["k"]
    scores = {f"avg@{k}": (statistics["avg_at_k"], statistics["standard_error_new_problems"])}
    scores |= {f"pass@{j}": (v, None) for j, v in statistics["pass_at_k"].items() if v is not None and int(j) > 1}
    scores |= {f"maj@{j}": (v, None) for j, v in statistics["majority_at_k"].items() if v is not None and int(j) > 1}
    return scores


def _rest(result: dict) -> dict:
    names = (
        "schema",
        "name",
        "adapter_sha256",
        "regime",
        "regime_hash",
        "grader_version",
        "versions",
        "commit",
        "dirty",
    )
    return {name: result[name] for name in names} | {
        "benchmark": result["benchmark"],
        "statistics": result["statistics"],
    }


def _generation(result: dict) -> dict:
    regime = result["regime"]
    return {
        "do_sample": regime["temperature"] > 0,
        "temperature": regime["temperature"],
        "top_p": regime["top_p"],
        "top_k": regime["top_k"],
        "max_gen_toks": regime["max_new_tokens"],
    }


def as_lm_eval(result: dict) -> dict:
    """The layout of EleutherAI/lm-evaluation-harness: `results[task]["metric,filter"]` and `..._stderr`; N/A where it has none."""
    task = result["benchmark"]["name"]
    scores = {"alias": task}
    for metric, (value, error) in _scores(result).items():
        scores[f"{metric},none"] = value
        scores[f"{metric}_stderr,none"] = "N/A" if error is None else error
    adapter = f",lora_local_path={result['adapter']}" if result["adapter"] else ""
    problems = result["benchmark"]["problems"]
    return {
        "results": {task: scores},
        "group_subtasks": {task: []},
        "configs": {
            task: {
                "task": task,
                "dataset_path": result["benchmark"]["source"],
                "output_type": "generate_until",
                "repeats": result["regime"]["samples_per_problem"],
                "num_fewshot": 0,
                "generation_kwargs": _generation(result),
            }
        },
        "versions": {task: result["benchmark"]["sha256"][:12]},
        "n-shot": {task: 0},
        "higher_is_better": {task: dict.fromkeys(_scores(result), True)},
        "n-samples": {task: {"original": result["benchmark"]["rows"], "effective": problems}},
        "config": {
            "model": result["engine"]["kind"],
            "model_args": f"pretrained={result['model']}{adapter},dtype={result['engine']['dtype']}",
            "random_seed": result["run_seed"],
            "limit": None if problems == result["benchmark"]["rows"] else problems,
        },
        "git_hash": result["commit"],
        "transformers_version": result["versions"].get("transformers"),
        "model_name": result["name"],
        "opsd": _rest(result),
    }


def as_lighteval(result: dict) -> dict:
    """The layout of huggingface/lighteval: `results["suite|task|shots"]` with a mean over tasks under `all`."""
    task = f"opsd|{result['benchmark']['name']}|0"
    scores = {}
    for metric, (value, error) in _scores(result).items():
        scores[metric] = value
        if error is not None:
            scores[f"{metric}_stderr"] = error
    return {
        "config_general": {
            "model_name": result["name"],
            "model_config": {
                "model_name": result["model"],
                "adapter": result["adapter"],
                "dtype": result["engine"]["dtype"],
                "generation_parameters": _generation(result) | {"seed": result["run_seed"]},
            },
            "max_samples": result["benchmark"]["problems"],
        },
        "results": {task: scores, "all": dict(scores)},
        "versions": {task: result["benchmark"]["sha256"][:12]},
        "config_tasks": {
            task: {
                "name": result["benchmark"]["name"],
                "hf_repo": result["benchmark"]["source"],
                "num_samples": [result["regime"]["samples_per_problem"]],
                "effective_num_docs": result["benchmark"]["problems"],
                "original_num_docs": result["benchmark"]["rows"],
            }
        },
        "opsd": _rest(result),
    }
