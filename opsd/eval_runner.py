"""Runs a plan: asks the engines for what is missing, grades and stores every completion as it finishes, writes result.json.

Between eval_setup.py, eval_pool.py, eval_store.py and eval_result.py. Every sample's seed is derived from the run seed, the
problem's id and the sample's index, so it depends neither on the number of engines nor on where a run was interrupted.
"""

import logging
import sys
import time
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from opsd.eval_pool import EngineDied, EnginePool
from opsd.eval_result import build_result, grade_sample, regrade_samples
from opsd.eval_setup import Plan, Target
from opsd.eval_store import RESULT, SAMPLES, SampleStore, same_rules
from opsd.eval_worker import Finished, Request
from opsd.rollout import derive_seed
from opsd.runinfo import write_json

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0


def missing_requests(plan: Plan, samples: list[dict]) -> list[Request]:
    """The (problem, sample) pairs that are not among `samples`, one round over all problems after the other."""
    done = {(s["problem_id"], s["sample_index"]) for s in samples}
    seed = plan.regime.seed
    return [
        Request((problem.id, index), tuple(ids), derive_seed(seed, problem.id, index))
        for index in range(plan.regime.samples_per_problem)
        for problem, ids in zip(plan.benchmark.problems, plan.prompt_ids, strict=True)
        if (problem.id, index) not in done
    ]


class Progress:
    """The bar: completions, tokens a second, running avg@k, truncated share, time left."""

    def __init__(self, name: str, samples: list[dict], total: int):
        self._live = sys.stderr.isatty()  # in a log file, one line now and then
        self._bar = tqdm(
            total=total,
            initial=len(samples),
            desc=name,
            unit="completion",
            dynamic_ncols=True,
            mininterval=0.1 if self._live else LOG_SECONDS,
        )
        self._scores: dict[str, list[bool]] = defaultdict(list)
        self._truncated = 0
        self._tokens = 0
        self._started = time.monotonic()
        for sample in samples:
            self._count(sample)

    def add(self, sample: dict, decoding: float) -> None:
        self._count(sample)
        self._tokens += sample["token_count"]
        self._show(decoding)
        self._bar.update()

    def idle(self, decoding: float) -> None:
        """Keeps the bar alive while nothing finishes; `decoding`: tokens a second that the engines report."""
        if self._live:
            self._show(decoding)
            self._bar.refresh()

    def _count(self, sample: dict) -> None:
        self._scores[sample["problem_id"]].append(sample["correct"])
        self._truncated += sample["truncated"]

    def _show(self, decoding: float) -> None:
        rate = decoding or self._tokens / max(time.monotonic() - self._started, 1e-9)
        parts = [f"{rate:,.0f} tokens/s"]
        done = sum(map(len, self._scores.values()))
        if done:
            mean = sum(sum(scores) / len(scores) for scores in self._scores.values()) / len(self._scores)
            parts += [f"avg {100 * mean:.1f} %", f"truncated {100 * self._truncated / done:.1f} %"]
        self._bar.set_postfix_str(", ".join(parts), refresh=False)

    def close(self) -> None:
        self._bar.close()


def run_plan(
    plan: Plan, *, resume: bool, groups: list[str | None], environment: dict[str, str], command=None
) -> list[Path]:
    """Makes every target's result.json, with one load of the engines for all of them. Returns the folders.

    Raises EngineDied when an engine ends early; what was finished until then stays in samples.jsonl.
    """
    pool = None
    folders = []
    try:
        for target in plan.targets:
            with SampleStore(target.folder) as store:
                _open(store, plan, target, resume)
                requests = missing_requests(plan, store.samples)
                if requests and pool is None:
                    logs = Path(target.folder if len(plan.targets) == 1 else target.folder.parent) / "engines"
                    pool = EnginePool(plan.settings, groups, logs, environment, *([command] if command else []))
                if requests:
                    pool.serve(target.adapter_dir, must_differ=target.norm > 0)
                    _sample(plan, target, store, pool, requests)
                write_json(target.folder / RESULT, build_result(target.manifest, store.samples))
            folders.append(target.folder)
    finally:
        if pool is not None:
            pool.close()
    return folders


def _open(store: SampleStore, plan: Plan, target: Target, resume: bool) -> None:
    """Takes over finished samples; those graded by other rules are graded again."""
    before = store.open(target.manifest, resume=resume)
    if not store.samples:
        return
    logger.info("%s: resuming with %d finished samples", target.folder, len(store.samples))
    if not same_rules(before, target.manifest):
        logger.info("%s: grading rules have changed, grading again", target.folder)
        store.replace_samples(regrade_samples(store.samples, target.manifest, plan.regime.box_policy))
        store.write_manifest(target.manifest, graded=True)


def _sample(plan: Plan, target: Target, store: SampleStore, pool: EnginePool, requests: list[Request]) -> None:
    answers = {problem.id: problem.answer for problem in plan.benchmark.problems}
    before, started = len(store.samples), time.monotonic()
    progress = Progress(target.manifest["name"], store.samples, len(store.samples) + len(requests))
    try:
        for finished in pool.run(requests):
            if finished is None:
                progress.idle(pool.tokens_per_second())
                continue
            sample = _record(plan, target, finished, answers[finished.request.key[0]])
            store.add(sample)
            progress.add(sample, pool.tokens_per_second())
    except EngineDied as error:
        total = len(plan.benchmark.problems) * plan.regime.samples_per_problem
        raise EngineDied(
            f"{error}\n{len(store.samples)} of {total} samples are kept in {target.folder / SAMPLES}; run the same command "
            "to go on with the rest"
        ) from None
    finally:
        progress.close()
    fresh = store.samples[before:]
    store.add_run(
        {
            "engines": len(pool),
            "load_seconds": pool.load_seconds,
            "sampling_seconds": time.monotonic() - started,
            "samples": len(fresh),
            "tokens": sum(sample["token_count"] for sample in fresh),
        }
    )


def _record(plan: Plan, target: Target, finished: Finished, answer: str) -> dict:
    ids = list(finished.completion_ids)
    ended = finished.finish_reason == "stop" and ids and ids[-1] in plan.settings.eos_ids
    text = plan.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
    problem_id, index = finished.request.key
    return {
        "problem_id": problem_id,
        "sample_index": index,
        "seed": finished.request.seed,
        "text": text,
        "token_count": len(ids),
        "finish_reason": finished.finish_reason,
        "truncated": finished.finish_reason == "length",
        **grade_sample(text, answer, finished.finish_reason, plan.text_prefix, plan.regime.box_policy),
        "engine": f"{plan.settings.kind}, {finished.engine}",
        "adapter": target.manifest["adapter"],
    }
