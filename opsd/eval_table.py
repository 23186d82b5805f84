"""Results as a Markdown table, and in the JSON forms of lm-eval and lighteval for tables that people already have.

Reads result JSONs (`opsd-eval/1`). Every score carries its number of samples and both standard errors.
"""

from collections.abc import Callable, Sequence

SCHEMA = "opsd-eval/1"


def check_results(results: Sequence[dict]) -> None:
    """Raises ValueError for JSON that is not a result of this evaluator."""
    for result in results:
        if result.get("schema") != SCHEMA:
            raise ValueError(
                f"schema={result.get('schema')!r} must be {SCHEMA!r}; give the result.json of eval_aime.py"
            )


def results_table(results: Sequence[dict]) -> str:
    """One Markdown table per benchmark and sampling regime, since only rows of one table may be compared."""
    check_results(results)
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        key = (result["benchmark"]["sha256"], result["regime_hash"], result["grader_version"])
        groups.setdefault(key, []).append(result)
    return "\n\n".join(_group_table(group) for group in groups.values())


def _group_table(group: Sequence[dict]) -> str:
    first = group[0]
    regime = ", ".join(f"{k}={v}" for k, v in first["regime"].items() if k not in ("seed", "samples_per_problem"))
    sizes = sorted({result["statistics"]["k"] for result in group})
    half = max(1, sizes[0] // 2)
    header = [
        "result",
        f"avg@{'/'.join(map(str, sizes))}",
        "SE, same problems",
        "SE, new problems",
        f"pass@{half}",
        "maj",
        "samples",
    ]
    header += ["truncated", "no box", "tokens", "run seed"]
    rows = []
    for result in group:
        s = result["statistics"]
        scores = [
            s["avg_at_k"],
            s["standard_error_same_problems"],
            s["standard_error_new_problems"],
            s["pass_at_k"][str(half)],
        ]
        rows.append(
            [
                _cell(result["name"]),
                *map(_percent, [*scores, s["majority_at_k"][str(s["k"])]]),
                f"{s['samples']}/{s['expected_samples']}",
                *map(_percent, (s["truncation_rate"], s["no_box_rate"])),
                f"{s['mean_tokens']:.0f}",
                str(result["run_seed"]),
            ]
        )
    benchmark = (
        f"{first['benchmark']['name']} ({len(first['problems'])} problems, sha256 {first['benchmark']['sha256'][:12]})"
    )
    lines = [f"**{_cell(benchmark)}**, percent; {_cell(regime)}", "", "| " + " | ".join(header) + " |"]
    lines.append("|" + " --- |" + " ---: |" * (len(header) - 1))
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _cell(text: str) -> str:
    """One printable line that cannot end a table cell or start markup."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    for character in "\\|<>`*_[]":
        clean = (
            clean.replace(character, f"\\{character}")
            if character not in "<>"
            else clean.replace(character, f"&{'lg'[character == '>']}t;")
        )
    return clean


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def to_lm_eval(result: dict) -> dict:
    """The layout of lm-evaluation-harness's results JSON. Its `_stderr` convention is the error for new problems."""
    check_results([result])
    s, task = result["statistics"], result["benchmark"]["name"]
    metrics = {
        "alias": task,
        "avg_at_k,none": s["avg_at_k"],
        "avg_at_k_stderr,none": _or_na(s["standard_error_new_problems"]),
    }
    metrics["avg_at_k_stderr_same_problems,none"] = _or_na(s["standard_error_same_problems"])
    metrics |= {f"pass@{j},none": value for j, value in s["pass_at_k"].items() if value is not None}
    metrics |= {f"maj@{j},none": value for j, value in s["majority_at_k"].items() if value is not None}
    higher = {name.split(",")[0]: True for name in metrics if name != "alias" and "stderr" not in name}
    return {
        "results": {task: metrics},
        "group_subtasks": {task: []},
        "configs": {
            task: {
                "task": task,
                "repeats": s["k"],
                "num_fewshot": 0,
                "metadata": {"version": result["benchmark"]["sha256"]},
            }
        },
        "versions": {task: result["benchmark"]["sha256"][:12]},
        "n-shot": {task: 0},
        "higher_is_better": {task: higher},
        "n-samples": {task: {"original": s["problems"], "effective": s["problems_with_samples"]}},
        "config": {
            "model": result["engine"]["kind"],
            "model_args": _model_arguments(result),
            "gen_kwargs": result["regime"],
            "random_seed": result["run_seed"],
        },
        "git_hash": result["commit"],
    }


def to_lighteval(result: dict) -> dict:
    """The layout of lighteval's results JSON."""
    check_results([result])
    s, task = result["statistics"], f"opsd|{result['benchmark']['name']}|0"
    metrics = {f"avg@{s['k']}": s["avg_at_k"], f"avg@{s['k']}_stderr": _or_na(s["standard_error_new_problems"])}
    metrics |= {f"pass@{j}": value for j, value in s["pass_at_k"].items() if value is not None}
    metrics |= {f"maj@{j}": value for j, value in s["majority_at_k"].items() if value is not None}
    return {
        "config_general": {
            "model_name": result["name"],
            "model_config": {"model_name": _model_arguments(result)},
            "lighteval_sha": "opsd",
        },
        "results": {task: metrics, "all": metrics},
        "versions": {task: result["benchmark"]["sha256"][:12]},
        "config_tasks": {
            task: {
                "name": result["benchmark"]["name"],
                "num_samples": [s["k"]],
                "generation_parameters": result["regime"],
            }
        },
        "summary_tasks": {task: {"truncated": s["truncation_rate"], "mean_tokens": s["mean_tokens"]}},
        "summary_general": {"samples": s["samples"], "expected_samples": s["expected_samples"]},
    }


EXPORT_FORMS: dict[str, Callable[[dict], dict]] = {"lm-eval": to_lm_eval, "lighteval": to_lighteval}


def _model_arguments(result: dict) -> str:
    adapter = "" if result["adapter"] is None else f",lora_local_path={result['adapter']}"
    return f"pretrained={result['model']}{adapter}"


def _or_na(value: float | None) -> float | str:
    """lm-eval writes "N/A" for an error it cannot estimate."""
    return "N/A" if value is None else value
