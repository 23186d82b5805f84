"""Grader: the shared examples, adversarial answers of every known kind, bounds on time and memory, threads and forks."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from grading_cases import HUGE, RESPONSES, RIGHT_EXPRESSIONS, RIGHT_INTEGERS, WRONG_EXPRESSIONS, WRONG_INTEGERS
from grading_variants import RIGHT_VARIANTS, WRONG_VARIANTS

from opsd import answer_shape, answer_text, args
from opsd.grading import (
    BOX_POLICIES,
    DEFAULT_BOX_POLICY,
    _compare,
    compare_answers,
    extract_answer,
    grade,
    grader_version,
    is_correct,
)
from opsd.grading_worker import WORKER, GradingWorker

REPO = Path(__file__).resolve().parents[1]
EXAMPLES = REPO.parent / "shared" / "data" / "grading_examples.jsonl"


def example_rows():
    return [json.loads(line) for line in EXAMPLES.read_text().splitlines()] if EXAMPLES.is_file() else []


@pytest.mark.skipif(not EXAMPLES.is_file(), reason="grading_examples.jsonl is not beside this checkout")
def test_shared_examples():
    wrong = [row["id"] for row in example_rows() if is_correct(row["response"], row["gold"]) != row["correct"]]
    assert wrong == []


@pytest.mark.parametrize(("answer", "gold"), RIGHT_INTEGERS + RIGHT_EXPRESSIONS + RIGHT_VARIANTS)
def test_equal_answers(answer, gold):
    verdict = grade(f"Thus $\\boxed{{{answer}}}$.", gold)
    assert verdict.correct, verdict


@pytest.mark.parametrize(("answer", "gold"), WRONG_INTEGERS + WRONG_EXPRESSIONS + WRONG_VARIANTS)
def test_different_answers(answer, gold):
    verdict = grade(f"Thus $\\boxed{{{answer}}}$.", gold)
    assert not verdict.correct, verdict


@pytest.mark.parametrize(("response", "gold", "correct", "reason"), RESPONSES)
def test_which_box_decides(response, gold, correct, reason):
    verdict = grade(response, gold)
    assert (verdict.correct, verdict.reason) == (correct, reason), verdict


def test_box_policies():
    unfinished = "<think>so \\boxed{45}"
    finished = "<think>so \\boxed{45}</think> done"
    found = {
        policy: (is_correct(unfinished, "45", box_policy=policy), is_correct(finished, "45", box_policy=policy))
        for policy in BOX_POLICIES
    }
    assert found == {"outside_unfinished_think": (False, True), "after_think": (False, False), "anywhere": (True, True)}
    with pytest.raises(ValueError, match="box_policy='first' must be one of"):
        grade("\\boxed{1}", "1", box_policy="first")


def test_truncated_flag_is_recorded_and_never_changes_the_verdict():
    assert grade("\\boxed{5}", "5", truncated=True).correct
    assert grade("\\boxed{5}", "5", truncated=True).truncated


def test_extracted_text_is_kept():
    assert extract_answer("a \\boxed{ \\frac{1}{2} } b") == "\\frac{1}{2}"
    assert extract_answer("\\boxed{}") is None and extract_answer("\\boxed{1") is None and extract_answer(None) is None


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_huge_responses_return_quickly(text):
    start = time.process_time()
    assert not is_correct(text, "45")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("space", ["$", "\\,", "\\ ", "~", "\\quad "])
def test_reading_an_answer_full_of_spaces_is_linear(space):
    start = time.process_time()
    assert not compare_answers("x=" + space * (1980 // len(space)) + "}", "\\frac12")[0]
    assert time.process_time() - start < 2


def test_long_answers_are_not_kept(monkeypatch):
    before = _compare.cache_info().currsize
    assert compare_answers("1" * 3000, "2") == (False, "too_large")
    assert _compare.cache_info().currsize == before


def test_an_interrupted_comparison_leaves_no_reply_for_the_next(monkeypatch):
    worker = GradingWorker()
    assert worker.compare("\\frac12", "\\frac24", integer=False).correct

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("opsd.grading_worker.select.select", interrupted)
        worker.compare("\\frac12", "\\frac36", integer=False)
    assert not worker.compare("\\frac12", "\\frac35", integer=False).correct
    assert worker.compare("\\frac12", "\\frac48", integer=False).correct
    worker.close()


def test_expensive_answers_are_killed_from_any_thread_and_the_next_one_is_graded():
    verdicts = {}

    def work(name, answer, gold):
        verdicts[name] = compare_answers(answer, gold)

    jobs = [
        ("slow", "(x+y+z+w)^{900}", "\\frac12"),
        ("fine", "\\frac{3}{6}", "\\frac12"),
        ("integer", "\\frac{630}{2}", "315"),
    ]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {"slow": (False, "timeout"), "fine": (True, "math-verify"), "integer": (True, "math-verify")}
    assert time.monotonic() - start < 60


def test_worker_survives_being_killed_and_closing():
    worker = GradingWorker()
    assert worker.compare("\\frac12", "0.5", integer=False).correct
    worker._process.kill()
    worker._process.wait()
    assert worker.compare("\\frac12", "0.5", integer=False).correct
    worker.close()
    worker.close()
    assert worker._process is None


def _grade_in_fork(queue):
    queue.put((compare_answers("\\frac{7}{14}", "\\frac12"), WORKER._process.pid))


def test_a_forked_process_gets_its_own_worker():
    assert compare_answers("\\frac{4}{8}", "\\frac12")[0]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_grade_in_fork, args=(queue,))
    with WORKER._lock:  # as when another thread is in the middle of a comparison
        child.start()
    verdict, pid = queue.get(timeout=60)
    child.join()
    assert verdict == (True, "math-verify") and pid != WORKER._process.pid
    assert compare_answers("\\frac{5}{10}", "\\frac12")[0]


def test_worker_memory_is_limited():
    limits = {}
    assert WORKER.compare("\\frac12", "0.5", integer=False).correct
    for line in Path(f"/proc/{WORKER._process.pid}/limits").read_text().splitlines():
        limits[line[:25].strip()] = line[26:].split()[0]
    assert int(limits["Max address space"]) == 1 << 30
    assert 0 < int(limits["Max cpu time"]) < 100


def test_model_text_is_never_executed(tmp_path):
    marker = tmp_path / "executed"
    assert not is_correct(f"\\boxed{{__import__('os').system('touch {marker}')}}", "\\frac12")
    WORKER.compare("\\frac12", f"__import__('os').system('touch {marker}')", integer=False)
    WORKER.compare("1", f"open('{marker}','w')", integer=True)
    assert not marker.exists()


def test_unit_words_and_shapes():
    assert answer_text.strip_unit("\\frac32\\text{ hours}") == "\\frac32"
    assert answer_text.strip_unit("3\\text{ million}") == "3\\text{ million}"
    assert answer_text.strip_unit("2x") == "2x"
    assert answer_shape.value_of_assignment("m+n = 20+25 = 45") == "45"
    assert answer_shape.value_of_assignment("3x-y+13 = 0") is None
    assert answer_shape.is_too_large("9^{9^{9}}") and not answer_shape.is_too_large("2^{10}")


def test_imports_without_torch_and_names_its_version():
    code = (
        "import sys, opsd.grading; print(*[m for m in ('torch', 'vllm', 'transformers', 'sympy') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert "math-verify/" in grader_version()


def test_no_text_makes_the_grader_raise():
    generator = random.Random(0)
    pieces = [
        *"0123456789+-*/^_=(){}[]|,.:;!%$ '\"<>&xnAC\n~²×十\ud800",
        "\\frac",
        "\\text{",
        "\\boxed{",
        "^\\circ",
        "\\sqrt",
        " or ",
        "\\\\",
        "**",
    ]
    for _ in range(1500):
        text = "".join(generator.choice(pieces) for _ in range(generator.randrange(1, 25)))
        grade(f"\\boxed{{{text}", "25")
        grade(f"\\boxed{{{text}}}", "25" if generator.random() < 0.9 else "\\frac12")


def test_the_regime_offers_every_policy_and_the_same_default():
    assert args.BOX_POLICIES == tuple(BOX_POLICIES)
    assert args.EvalRegime().box_policy == DEFAULT_BOX_POLICY
