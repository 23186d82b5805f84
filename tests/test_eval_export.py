"""Exports keep the numbers and name them as the other tools do."""

import json

import pytest

from opsd.eval_export import export_result

STATISTICS = {
    "k": 4,
    "avg_at_k": 0.5,
    "standard_error_new_problems": 0.125,
    "standard_error_same_problems": 0.05,
    "pass_at_k": {"1": 0.5, "2": 0.75, "4": None},
    "majority_at_k": {"1": 0.5, "2": 0.5, "4": 0.6},
}
RESULT = {
    "schema": "opsd-eval/1",
    "name": "before",
    "model": "m",
    "adapter": "run/adapter",
    "adapter_sha256": "a",
    "benchmark": {"name": "aime24", "sha256": "5c959d2270f526ea", "problems": 10, "rows": 30, "source": "file"},
    "regime": {"samples_per_problem": 4, "temperature": 1.0, "top_p": 0.95, "top_k": 0, "max_new_tokens": 64},
    "regime_hash": "h",
    "run_seed": 42,
    "engine": {"kind": "vllm", "dtype": "bfloat16"},
    "grader_version": "g",
    "versions": {"transformers": "5"},
    "commit": "c",
    "dirty": False,
    "statistics": STATISTICS,
}


def exported(tmp_path, style: str) -> dict:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    path = export_result(tmp_path, style)
    assert path.name == f"{style}.json"
    return json.loads(path.read_text())


def test_lm_eval(tmp_path):
    record = exported(tmp_path, "lm-eval")
    scores = record["results"]["aime24"]
    assert scores["avg@4,none"] == 0.5 and scores["avg@4_stderr,none"] == 0.125
    assert scores["pass@2,none"] == 0.75 and scores["pass@2_stderr,none"] == "N/A" and "pass@4,none" not in scores
    assert record["n-samples"]["aime24"] == {"original": 30, "effective": 10} and record["config"]["limit"] == 10
    assert record["config"]["model_args"] == "pretrained=m,lora_local_path=run/adapter,dtype=bfloat16"
    assert record["opsd"]["statistics"] == STATISTICS


def test_lighteval(tmp_path):
    record = exported(tmp_path, "lighteval")
    scores = record["results"]["opsd|aime24|0"]
    assert scores["avg@4"] == 0.5 and scores["avg@4_stderr"] == 0.125 and scores["maj@4"] == 0.6
    assert record["results"]["all"] == scores
    assert record["config_general"]["model_config"]["generation_parameters"]["top_p"] == 0.95


def test_without_a_result_there_is_nothing_to_export(tmp_path):
    with pytest.raises(FileNotFoundError, match="result.json does not exist"):
        export_result(tmp_path, "lm-eval")
