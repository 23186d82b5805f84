"""The runner with a fake engine: resume after kills, growth, refusals, a dying engine, several engines. No model is loaded."""

import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from opsd.args import EvalRegime
from opsd.benchmarks import Benchmark, Problem, content_sha256
from opsd.eval_args import device_groups
from opsd.eval_pool import EngineDied, EnginePool
from opsd.eval_result import build_result, headline, regrade
from opsd.eval_runner import missing_requests, run_plan
from opsd.eval_setup import Plan, Target
from opsd.eval_store import SampleStore
from opsd.eval_worker import EngineSettings, Request
from opsd.grading import grader_version
from opsd.rollout import SamplingSettings, derive_seed
from opsd.runinfo import read_jsonl

WORKER = (sys.executable, str(Path(__file__).parent / "fake_engine.py"))


class Digits:
    """Decodes token 7 as a boxed answer, everything else as a digit."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is False
        return "".join("\\boxed{7}" if i == 7 else str(i) for i in ids)


def make_plan(folder: Path, *, adapters: tuple[str | None, ...] = (None,), count: int = 5, **changes) -> Plan:
    regime = EvalRegime(**({"samples_per_problem": 4, "max_new_tokens": 6} | changes))
    problems = tuple(Problem(f"p{n}", f"What is {n}?", str(n)) for n in range(5, 5 + count))
    benchmark = Benchmark("fake", "nowhere", problems, count, content_sha256(problems), None)
    sampling = SamplingSettings(regime.temperature, regime.top_p, regime.top_k, regime.max_new_tokens)
    settings = EngineSettings("fake", "model", "float32", 64, 4, sampling, (1, 2), (99,), 0, None)
    targets = []
    for adapter in adapters:
        manifest = {
            "schema": "opsd-eval-manifest/1",
            "name": adapter or "base",
            "model": "model",
            "model_sha256": "m",
            "adapter": adapter,
            "adapter_sha256": adapter and f"sha of {adapter}",
            "benchmark": benchmark.record(),
            "regime": dataclasses.asdict(regime),
            "regime_hash": "h",
            "run_seed": regime.seed,
            "engine": {"kind": "fake", "dtype": "float32", "ignore_eos": False, "load_format": "auto"},
            "prompt": "What is 5?",
            "prompts_sha256": "p",
            "text_prefix": "",
            "problems": [dataclasses.asdict(p) for p in problems],
            "commit": None,
            "dirty": None,
            "versions": {},
            "hardware": {},
            "grader_version": grader_version(),
            "training": None,
        }
        targets.append(Target(folder / (adapter or ""), adapter and Path(adapter), manifest, 1.0 if adapter else 0.0))
    prompt_ids = [[n, n + 1] for n in range(count)]
    return Plan(benchmark, regime, Digits(), None, 0, prompt_ids, "", settings, targets)


def run(plan: Plan, groups=(None,), resume: bool = True, **variables: str) -> list[Path]:
    return run_plan(plan, resume=resume, groups=list(groups), environment=dict(os.environ) | variables, command=WORKER)


def by_key(folder: Path) -> dict:
    samples = read_jsonl(folder / "samples.jsonl")
    keyed = {(s["problem_id"], s["sample_index"]): s for s in samples}
    assert len(keyed) == len(samples)
    return keyed


def without_engine(samples: dict) -> dict:
    return {key: {k: v for k, v in s.items() if k != "engine"} for key, s in samples.items()}


def test_every_sample_is_there_once_graded_and_seeded(tmp_path):
    plan = make_plan(tmp_path)
    assert run(plan) == [tmp_path]
    samples = by_key(tmp_path)
    assert set(samples) == {(f"p{n}", i) for n in range(5, 10) for i in range(4)}
    for (problem_id, index), sample in samples.items():
        assert sample["seed"] == derive_seed(42, problem_id, index)
        assert sample["truncated"] == (sample["finish_reason"] == "length") == (sample["token_count"] == 6)
        assert sample["correct"] == ("boxed" in sample["text"] and problem_id == "p7")
        assert sample["extracted"] == ("7" if "boxed" in sample["text"] else None)
        assert sample["engine"] == "fake, engine 0 (CPU)" and sample["adapter"] is None
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["schema"] == "opsd-eval/1" and [p["n"] for p in result["problems"]] == [4] * 5
    assert [p["correct"] for p in result["problems"]] == [
        sum(samples[p["id"], i]["correct"] for i in range(4)) for p in result["problems"]
    ]
    assert "FAKE avg@4 = " in headline(result) and "20/20 samples" in headline(result)


def test_several_engines_share_the_queue(tmp_path):
    run(make_plan(tmp_path / "one"))
    run(make_plan(tmp_path / "three"), groups=("0", "1", "2"), FAKE_SECONDS="0.01")
    one, three = by_key(tmp_path / "one"), by_key(tmp_path / "three")
    assert without_engine(one) == without_engine(three)
    assert {s["engine"] for s in three.values()} == {f"fake, engine {n} (GPU {n})" for n in range(3)}


def test_one_load_serves_several_adapters(tmp_path):
    folders = run(make_plan(tmp_path, adapters=("checkpoint-1", "checkpoint-2")))
    assert folders == [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    assert (tmp_path / "engines" / "engine-0.log").read_text().count("is loaded") == 1
    assert {s["adapter"] for s in by_key(folders[1]).values()} == {"checkpoint-2"}


def test_nothing_missing_starts_no_engine(tmp_path):
    run(make_plan(tmp_path))
    first = (tmp_path / "result.json").read_text()
    run_plan(make_plan(tmp_path), resume=True, groups=[None], environment={}, command=("/nonexistent",))
    assert (tmp_path / "result.json").read_text() == first


def test_growing_generates_only_the_difference(tmp_path):
    run(make_plan(tmp_path))
    before = by_key(tmp_path)
    grown = make_plan(tmp_path, samples_per_problem=6)
    assert [r.key[1] for r in missing_requests(grown, list(before.values()))] == [4] * 5 + [5] * 5
    run(grown)
    after = by_key(tmp_path)
    assert len(after) == 30 and all(after[key] == sample for key, sample in before.items())
    with pytest.raises(ValueError, match="samples_per_problem=4 is less than the 6"):
        run(make_plan(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.5}, "temperature is 1.0 there and 0.5 now"),
        ({"seed": 7}, "seed is 42 there and 7 now"),
        ({"max_new_tokens": 5}, "max_new_tokens is 6 there and 5 now"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is auto there and fp8 now"),
        ({"count": 4}, "the benchmark's content is"),
    ],
)
def test_another_regime_is_refused(tmp_path, change, message):
    run(make_plan(tmp_path))
    samples = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(ValueError) as error:
        run(make_plan(tmp_path, **change))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "samples.jsonl").read_bytes() == samples


def test_another_adapter_or_model_is_refused_and_resume_can_be_off(tmp_path):
    run(make_plan(tmp_path))
    plan = make_plan(tmp_path)
    for name, label in (("model_sha256", "the model's content"), ("adapter_sha256", "the adapter's content")):
        target = dataclasses.replace(plan.targets[0], manifest=plan.targets[0].manifest | {name: "other"})
        with pytest.raises(ValueError, match=f"{label} is .* now; give another output_dir"):
            run(dataclasses.replace(plan, targets=[target]))
    with pytest.raises(ValueError, match="20 samples and resume=false"):
        run(plan, resume=False)


def test_a_torn_last_line_is_sampled_again(tmp_path):
    run(make_plan(tmp_path))
    whole = by_key(tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run(make_plan(tmp_path))
    assert without_engine(by_key(tmp_path)) == without_engine(whole)


def test_samples_leave_the_process_at_once_and_reach_the_disk_every_second(tmp_path, monkeypatch):
    synced, clock = [], [100.0]
    monkeypatch.setattr("opsd.eval_store.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("opsd.runinfo.os.fsync", synced.append)
    with SampleStore(tmp_path) as store:
        store.open({}, resume=True)
        synced.clear()
        for index in range(6):
            store.add({"problem_id": "p", "sample_index": index})
            assert len(read_jsonl(tmp_path / "samples.jsonl")) == index + 1  # what a kill of this process leaves
            clock[0] += 0.4
        assert len(synced) == 2
    assert len(synced) == 3  # the end of the evaluation waits for the disk


def test_a_folder_is_written_by_one_process(tmp_path):
    with SampleStore(tmp_path), pytest.raises(ValueError, match="is being written by another process"):
        SampleStore(tmp_path).__enter__()


def test_a_dead_engine_is_named_with_its_log_and_what_was_finished_stays(tmp_path):
    with pytest.raises(EngineDied) as error:
        run(make_plan(tmp_path), FAKE_DIE_AFTER="8")
    text = str(error.value)
    assert "engine 0 (CPU) was killed by SIGKILL" in text and "fake engine runs out of memory" in text
    assert "8 of 20 samples are kept in" in text and len(by_key(tmp_path)) == 8
    run(make_plan(tmp_path))
    assert len(by_key(tmp_path)) == 20


def test_an_engine_that_does_not_serve_the_adapter_is_an_error(tmp_path):
    plan = make_plan(tmp_path, adapters=("checkpoint-1",))
    with pytest.raises(RuntimeError, match="answers as the base model does although adapter=checkpoint-1 is not zero"):
        run(plan, FAKE_DEAF="1")
    zero = dataclasses.replace(plan.targets[0], norm=0.0)
    run(dataclasses.replace(plan, targets=[zero]), FAKE_DEAF="1")


def test_an_engine_that_cannot_start_is_named(tmp_path):
    failing = (sys.executable, "-c", "raise SystemExit('no such GPU')")
    with pytest.raises(EngineDied, match="engine 0 .CPU. ended with exit code 1; .*\n.*no such GPU"):
        run_plan(make_plan(tmp_path), resume=True, groups=[None], environment=dict(os.environ), command=failing)


def count_lines(folder: Path) -> int:
    path = folder / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_three_times_and_resumed_gives_the_same_samples(tmp_path):
    run(make_plan(tmp_path / "whole", samples_per_problem=12))
    generator = random.Random(0)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                run(make_plan(tmp_path / "killed", samples_per_problem=12), FAKE_SECONDS="0.03")
            finally:
                os._exit(0)
        wanted = count_lines(tmp_path / "killed") + generator.randrange(1, 12)
        while count_lines(tmp_path / "killed") < wanted:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    interrupted = len(read_jsonl(tmp_path / "killed" / "samples.jsonl"))
    assert 0 < interrupted < 60
    run(make_plan(tmp_path / "killed", samples_per_problem=12))
    assert without_engine(by_key(tmp_path / "killed")) == without_engine(by_key(tmp_path / "whole"))
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("killed", "whole")]
    assert results[0] == results[1]


def test_a_result_does_not_depend_on_the_order_of_finishing(tmp_path):
    plan = make_plan(tmp_path, samples_per_problem=14, count=2)
    run(plan)
    samples = list(by_key(tmp_path).values())
    for number, sample in enumerate(samples):  # three answers, so that majorities depend on which samples are drawn
        sample |= {"extracted": str(number % 3), "correct": number % 3 == 1, "reason": "int"}
    manifest = plan.targets[0].manifest
    shuffled = random.Random(1).sample(samples, len(samples))
    assert build_result(manifest, shuffled) == build_result(manifest, samples)


def test_regrade_follows_the_samples_and_the_policy(tmp_path):
    run(make_plan(tmp_path))
    before = json.loads((tmp_path / "result.json").read_text())
    path = tmp_path / "samples.jsonl"
    lines = [json.loads(line) | {"text": "<think> \\boxed{7}"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert regrade(path, "outside_unfinished_think") == tmp_path
    assert json.loads((tmp_path / "result.json").read_text())["statistics"]["avg_at_k"] == 0
    regrade(path, "anywhere")
    after = json.loads((tmp_path / "result.json").read_text())
    assert [p["correct"] for p in after["problems"]] == [0, 0, 4, 0, 0]
    assert after["regime"]["box_policy"] == "anywhere" and after["regime_hash"] != before["regime_hash"]
    with pytest.raises(FileNotFoundError, match="is not an existing samples.jsonl"):
        regrade(tmp_path / "result.json", "anywhere")


def test_a_kill_while_grading_again_is_made_up_for(tmp_path, monkeypatch):
    run(make_plan(tmp_path))
    truth = read_jsonl(tmp_path / "samples.jsonl")
    monkeypatch.setattr("opsd.eval_runner.regrade_samples", interrupted)
    other = make_plan(tmp_path, box_policy="anywhere")
    with pytest.raises(KeyboardInterrupt):
        run(other)
    monkeypatch.undo()
    seen = []
    monkeypatch.setattr("opsd.eval_runner.regrade_samples", lambda samples, *_: seen.append(len(samples)) or samples)
    run(other)
    assert seen == [len(truth)]  # graded again, although the manifest was the new one already
    run(other)
    assert len(seen) == 1

    monkeypatch.setattr("opsd.eval_store.write_jsonl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regrade(tmp_path / "samples.jsonl", "outside_unfinished_think")
    assert json.loads((tmp_path / "manifest.json").read_text())["grader_version"] == "being graded again"
    monkeypatch.undo()
    regrade(tmp_path / "samples.jsonl")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["grader_version"] == grader_version()
    assert manifest["regime"]["box_policy"] == "outside_unfinished_think"  # none was given: the manifest's stays


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": None}, "line 1 has no text of type str"),
        ({"token_count": None}, "line 1 has no token_count of type int"),
        ({"correct": "yes"}, "line 1 has no correct of type bool"),
        ({"sample_index": True}, "line 1 has no sample_index of type int"),
        (
            {"problem_id": "other"},
            "line 1 is sample 0 of problem other, which is none of the evaluation's 5 problems x 4 samples",
        ),
        ({"sample_index": 99}, "line 1 is sample 99"),
    ],
)
def test_damaged_samples_are_named_by_their_line(tmp_path, change, message):
    run(make_plan(tmp_path))
    samples = sorted(read_jsonl(tmp_path / "samples.jsonl"), key=lambda s: (s["problem_id"], s["sample_index"]))
    for damaged, expected in (
        ([samples[0] | change, *samples[1:]], message),
        ([*samples, samples[0]], "stands there twice"),
    ):
        (tmp_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in damaged))
        for again in (lambda: run(make_plan(tmp_path)), lambda: regrade(tmp_path / "samples.jsonl")):
            with pytest.raises(ValueError, match=expected):
                again()


def test_a_large_queue_with_large_answers_does_not_block(tmp_path):
    settings = dataclasses.replace(
        make_plan(tmp_path).settings, sampling=SamplingSettings(1.0, 1.0, 0, 3000), max_num_seqs=300
    )
    requests = [Request((f"p{n}", 0), tuple(range(2000)), n) for n in range(900)]
    with EnginePool(settings, [None], tmp_path, dict(os.environ), WORKER) as pool:
        pool.serve(None)
        keys = [done.request.key for done in pool.run(requests) if done is not None]
    assert sorted(keys) == sorted(r.key for r in requests)


def test_device_groups():
    assert device_groups({}, [], 1) == [None]
    assert device_groups({}, ["a", "b", "c", "d"], 1) == ["0", "1", "2", "3"]
    assert device_groups({"CUDA_VISIBLE_DEVICES": "4,6"}, ["a"] * 8, 2) == ["4,6"]
    assert device_groups({"CUDA_VISIBLE_DEVICES": ""}, ["a"], 1) == [None]
    with pytest.raises(ValueError, match="tensor_parallel_size=2 must divide the 3 visible GPUs"):
        device_groups({}, ["a"] * 3, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs GPUs"):
        device_groups({}, [], 2)
