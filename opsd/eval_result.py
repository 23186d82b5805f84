"""One result JSON (schema `opsd-eval/1`) out of a manifest and its graded samples, and grading samples again.

Between eval_runner.py and everything that reads results: comparison.py, eval_table.py, report.py.
"""

import dataclasses
import logging
import sys
from pathlib import Path

from tqdm import tqdm

from opsd.args import EvalRegime
from opsd.eval_args import regime_hash
from opsd.eval_store import MANIFEST, RESULT, SAMPLES, SampleStore, check_samples, read_record
from opsd.evaluation import build_statistics, count_by_problem, describe
from opsd.grading import grade, grader_version
from opsd.runinfo import read_jsonl, write_json

logger = logging.getLogger(__name__)

RESULT_SCHEMA = "opsd-eval/1"
FROM_MANIFEST = (
    "name", "model", "model_sha256", "adapter", "adapter_sha256", "benchmark", "regime", "regime_hash", "run_seed", "engine", "prompt",
    "prompts_sha256", "commit", "dirty", "versions", "hardware", "grader_version", "training",
)  # fmt: skip


def build_result(manifest: dict, samples: list[dict]) -> dict:
    """The result record. It does not depend on the order in which samples finished."""
    problems = manifest["problems"]
    order = {problem["id"]: position for position, problem in enumerate(problems)}
    samples = sorted(samples, key=lambda s: (order[s["problem_id"]], s["sample_index"]))
    return {
        "schema": RESULT_SCHEMA,
        **{name: manifest[name] for name in FROM_MANIFEST},
        "problems": count_by_problem(samples, problems),
        "statistics": build_statistics(samples, problems, manifest["regime"]["samples_per_problem"]),
    }


def headline(result: dict) -> str:
    """The line that `eval_aime.py` ends with."""
    return f"{result['name']}: " + describe(result["statistics"], name=result["benchmark"]["name"].upper())


def grade_sample(text: str, answer: str, finish_reason: str, text_prefix: str, box_policy: str) -> dict:
    """The graded part of a sample's record. `text_prefix` is a thinking block that the prompt has opened."""
    verdict = grade(text_prefix + text, answer, truncated=finish_reason == "length", box_policy=box_policy)
    return {"correct": verdict.correct, "extracted": verdict.extracted, "reason": verdict.reason}


def regrade_samples(samples: list[dict], manifest: dict, box_policy: str) -> list[dict]:
    """The samples under new grades."""
    answers = {problem["id"]: problem["answer"] for problem in manifest["problems"]}
    return [
        s | grade_sample(s["text"], answers[s["problem_id"]], s["finish_reason"], manifest["text_prefix"], box_policy)
        for s in tqdm(samples, desc="grading", unit="completion", file=sys.stderr)
    ]


def regrade(samples_path: Path, box_policy: str | None = None) -> Path:
    """Grades a samples.jsonl again without generating; rewrites it, its manifest and its result. Returns the folder.

    `box_policy` None: the policy that the samples were graded by.
    """
    samples_path = Path(samples_path)
    folder = samples_path.parent
    if samples_path.name != SAMPLES or not samples_path.is_file():
        raise FileNotFoundError(f"regrade={samples_path} is not an existing {SAMPLES}; give the one of an output_dir")
    with SampleStore(folder) as store:
        manifest = read_record(folder / MANIFEST)
        samples = read_jsonl(samples_path)
        check_samples(samples, manifest, samples_path)
        if not samples:
            raise ValueError(f"regrade={samples_path} holds no finished sample; evaluate first")
        box_policy = box_policy or manifest["regime"]["box_policy"]
        graded = regrade_samples(samples, manifest, box_policy)
        changed = sum(old["correct"] != new["correct"] for old, new in zip(samples, graded, strict=True))
        logger.info("%s: %d of %d verdicts changed", samples_path, changed, len(samples))
        regime = dataclasses.replace(EvalRegime(**manifest["regime"]), box_policy=box_policy)
        manifest |= {
            "regime": dataclasses.asdict(regime),
            "regime_hash": regime_hash(regime),
            "grader_version": grader_version(),
        }
        store.write_manifest(manifest, graded=False)  # a kill in between leaves samples that are graded again
        store.replace_samples(graded)
        store.write_manifest(manifest, graded=True)
        write_json(folder / RESULT, build_result(manifest, graded))
    return folder
