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

from opsd import answer_shape, answer_text
from opsd.grading import BOX_POLICIES, compare_answers, extract_answer, grade, grader_version, is_correct
from opsd.grading_worker import WORKER, GradingWorker

REPO = Path(__file__).resolve().parents[1]
EXAMPLES = REPO.parent / "shared" / "data" / "grading_examples.jsonl"

RIGHT_INTEGERS = [
    ("25", "025"),
    ("0025", "25"),
    ("+25", "25"),
    ("-0", "0"),
    ("00", "0"),
    ("1{,}315", "1315"),
    ("1,315", "1315"),
    ("1\\,315", "1315"),
    ("10,\\!080", "10080"),
    ("$25$", "25"),
    ("25.", "25"),
    ("25.0", "25"),
    ("25^{\\circ}", "25"),
    ("25°", "25"),
    ("25\\%", "25"),
    ("\\text{025}", "25"),
    ("\\mathbf{025}", "25"),
    ("\\Large\\textbf{25}", "25"),
    ("\\bf 25", "25"),
    ("\\textcolor{red}{25}", "25"),
    ("\\$25", "25"),
    ("25\\,\\text{cm}^2", "25"),
    ("25 \\text{ square units}", "25"),
    ("25 paths", "25"),
    ("25个", "25"),
    ("２５", "25"),
    ("−25", "-25"),
    ("\\textbf{(C)}\\ 25", "25"),
    ("**25**", "25"),
    ("(25)", "25"),
    ("{ {25} }", "25"),
    ("\\text{Answer: } 25", "25"),
    ("\\text{The answer is 25}", "25"),
    ("25 \\pmod{1000}", "25"),
    ("5(5)", "25"),
    ("\\log_2 8", "3"),
    ("\\left|-25\\right|", "25"),
    ("25{^\\circ}", "25"),
    ("1e3", "1000"),
    ("\\left(25\\right)", "25"),
    ("25", 25),
    ("0", 0),
    ("m+n = 25", "25"),
    ("100m+n=345", "345"),
    ("m + n = 20+5 = 25", "25"),
    ("25=m+n", "25"),
    ("x=25", "25"),
    ("a+b=0", "0"),
    ("AB^2=25", "25"),
    ("\\text{Area} = 25", "25"),
    ("S_{10}=25", "25"),
    ("f(3)=25", "25"),
    ("|AB| = 25", "25"),
    ("\\angle ABC = 25^\\circ", "25"),
    ("\\frac{50}{2}", "25"),
    ("50/2", "25"),
    ("5^2", "25"),
    ("\\sqrt{625}", "25"),
    ("2.5\\times 10^1", "25"),
    ("2^{2^{3}}", "256"),
    ("5!", "120"),
    ("\\binom{10}{3}", "120"),
    ("-(-25)", "25"),
    ("9" * 1500, "9" * 1500),
]
WRONG_INTEGERS = [
    ("1{,}315", "315"),
    ("1\\,315", "315"),
    ("1 315", "1315"),
    ("12 345", "357"),
    ("−25", "25"),
    ("\\pm 25", "25"),
    ("25!", "25"),
    ("25x", "25"),
    ("25\\pi", "25"),
    ("25 pi", "25"),
    ("25\\text{ million}", "25"),
    ("25万", "25"),
    ("25_8", "25"),
    ("25_{8}", "21"),
    ("25 \\text{ or } 26", "25"),
    ("25, 26", "25"),
    ("25,26", "2526"),
    ("(25,26)", "25"),
    ("25 \\text{ and } 25", "25"),
    ("25\\text{ or more}", "25"),
    ("\\{25\\}", "25"),
    ("3x-y+13=0", "0"),
    ("3x-y=0", "0"),
    ("x+y=0", "0"),
    ("x-13=0", "0"),
    ("2x+3y=12", "12"),
    ("x^2+y^2=25", "25"),
    ("y=2x+25", "25"),
    ("x \\neq 25", "25"),
    ("ax+by=0", "0"),
    ("n=24, m+n=25", "25"),
    ("x \\ge 25", "25"),
    ("x>25", "25"),
    ("\\approx 25", "25"),
    ("\\frac{51}{2}", "25"),
    ("24.9999999999", "25"),
    ("2.94", "294"),
    ("29400", "294"),
    ("0.25", "25"),
    ("2500\\%", "25"),
    ("25\\frac{1}{2}", "25"),
    ("25^{\\text{th}}", "25"),
    ("25,0", "25"),
    ("1,23,456", "123456"),
    ("twenty-five", "25"),
    ("print(80)", "80"),
    ("None", "0"),
    ("25+0i", "25"),
    ("2.5 \\times 10^{2}", "25"),
]
RIGHT_EXPRESSIONS = [
    ("\\frac43", "\\frac{4}{3}"),
    ("4/3", "\\frac{4}{3}"),
    ("1.3333333", "\\frac43"),
    ("3\\frac12", "\\frac72"),
    ("\\sqrt{12}+1", "1+2\\sqrt3"),
    ("\\left(3,\\frac\\pi2\\right)", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("-q+p", "p - q"),
    ("(x-1)(x+1)", "x^2-1"),
    ("6-5i", "6 - 5i"),
    ("C", "\\text{(C)}"),
    ("\\textbf{(C)}\\ 45", "C"),
    ("evelyn", "\\text{Evelyn}"),
    ("\\text{No solution}", "\\text{no solution}"),
    ("-2 \\text{ and } 1", "1,-2"),
    ("70 \\text{ or } 110", "70,110"),
    ("x\\in[-2,7]", "[-2,7]"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(-\\infty,2)\\cup(3,\\infty)", "(-\\infty, 2) \\cup (3, \\infty)"),
    ("2x-y+3=0", "y=2x+3"),
    ("y=2x+3", "2x+3"),
    ("x=\\frac32", "\\frac32"),
    ("2516_{8}", "2516_8"),
    ("2516", "2516_8"),
    ("10", "10\\%"),
    ("0.1", "10\\%"),
    ("\\$18.90", "18.9"),
    ("\\frac32", "\\frac{3}{2}\\text{ hours}"),
    ("\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ("3.14159265", "\\pi"),
    ("4.49\\times10^{14}", "4.49e14"),
    ("\\sqrt[3]{2}", "2^{1/3}"),
    ("12:00", "12:00"),
    ("1 < x \\le 2", "(1,2]"),
    ("2, 3\\text{, and }4", "4,3,2"),
    ("x=1 \\text{ or } x=3", "1,3"),
    ("4^{504}\\cdot 2", "2^{1009}"),
    ("\\frac{(2n)!}{n!n!}", "\\binom{2n}{n}"),
    ("1+\\sqrt{19}, 1-\\sqrt{19}", "1 \\pm \\sqrt{19}"),
]
WRONG_EXPRESSIONS = [
    ("1.33", "\\frac43"),
    ("(\\pi/2,3)", "(3, \\frac{\\pi}{2})"),
    ("(1,2)", "(2,1)"),
    ("D", "C"),
    ("\\text{Angela}", "\\text{Evelyn}"),
    ("\\text{not even}", "\\text{even}"),
    ("1,2", "1,-2"),
    ("(-2,7)", "[-2,7]"),
    ("2x-y+4=0", "y=2x+3"),
    ("3x-y+13=0", "\\frac12"),
    ("2516_9", "2516_8"),
    ("1/2004!", "1/2006!"),
    ("12:00", "1:00"),
    ("6:15", "12:30"),
    ("f(x)=x", "f(n)=n"),
    ("k \\ge 3", "3"),
    ("2^{1008}", "2^{1009}"),
    ("n=2,3,4", "n=1,2,3"),
    ("2021", "\\pm 2021"),
    ("2=3", "5=7"),
    ("\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ("3.14", "\\pi"),
    ("60^\\circ", "\\frac{\\pi}{3}"),
]
RESPONSES = [
    ("\\boxed{840} and \\boxed{840}", "840", True, "int"),
    ("\\boxed{840} so \\boxed{004}", "4", True, "int"),
    ("\\boxed{44} then \\boxed{45", "44", False, "unterminated"),
    ("\\boxed{44} then \\boxed{}", "44", False, "empty"),
    ("\\boxed{44} then \\boxed{\\text{ }}", "44", False, "empty"),
    ("\\boxed{44} \\boxed", "44", False, "unterminated"),
    ("\\fbox{45}", "45", True, "int"),
    ("\\boxed 45", "45", True, "int"),
    ("\\boxed\n{45}", "45", True, "int"),
    ("\\\\boxed{45}", "45", True, "int"),
    ("\\boxed{\\boxed{45}}", "45", True, "int"),
    ("\\boxed{x=\\boxed{45}}", "45", True, "int"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}", True, "string"),
    ("use \\boxed notation: \\boxed{4}. As \\boxed says", "4", True, "int"),
    ("{\\boxed{45}", "45", True, "int"),
    ("Final Answer: **73**", "73", False, "no_box"),
    ("<think>\\boxed{45} so", "45", False, "no_box"),
    ("<think>x</think>\\boxed{45}", "45", True, "int"),
    ("x</think>\\boxed{45}", "45", True, "int"),
    ("<think>\\boxed{45}</think>The answer is 45.", "45", True, "int"),
    ("<think>x</think>\\boxed{45}<think>or \\boxed{46}", "45", True, "int"),
    ("<think>a <think> b</think>\\boxed{45}", "45", True, "int"),
    ("<think>\\boxed{5 </think> so \\boxed{7} }", "7", True, "int"),
    ("<think>\\boxed{5}</think> so \\boxed{5", "5", False, "unterminated"),
    ("", "45", False, "no_box"),
    (None, None, False, "no_box"),
    ("None", "None", False, "no_box"),
    ("\\boxed{None}", None, False, "no_reference"),
    ("\\boxed{45}", "\\boxed{45}", True, "int"),
    ("\\boxed{7^{7^{7^{7}}}}", "343", False, "too_large"),
    ("\\boxed{10**10**10}", "10", False, "too_large"),
    ("\\boxed{2**10}", "1024", True, "math-verify"),
    ("\\boxed{5*5}", "25", True, "math-verify"),
    ("\\boxed{2003^{2002^{2001}}}", "1", False, "too_large"),
    ("\\boxed{100000!}", "1", False, "too_large"),
    ("\\boxed{" + "(" * 500 + "x" + ")" * 500 + "}", "y", False, "too_large"),
]
HUGE = [
    "\\boxed{" * 150_000,
    "\\boxed " * 150_000,
    "{" * 1_000_000 + "\\boxed{5}",
    "\\boxed{" + "1" * 1_000_000 + "}",
    "\\boxed{" + "{" * 500_000 + "4" + "}" * 500_000 + "}",
    "<think>" * 100_000 + "\\boxed{4}",
    "\\" * 1_000_000,
    "\\boxed\\frac" * 90_000,
    "\\boxed{" + "aaaa " * 390 + "!}",
    "\\boxed{4" + "\\text{a} " * 240 + "!}",
]


def example_rows():
    return [json.loads(line) for line in EXAMPLES.read_text().splitlines()] if EXAMPLES.is_file() else []


@pytest.mark.skipif(not EXAMPLES.is_file(), reason="grading_examples.jsonl is not beside this checkout")
def test_shared_examples():
    wrong = [row["id"] for row in example_rows() if is_correct(row["response"], row["gold"]) != row["correct"]]
    assert wrong == []


@pytest.mark.parametrize(("answer", "gold"), RIGHT_INTEGERS + RIGHT_EXPRESSIONS)
def test_equal_answers(answer, gold):
    verdict = grade(f"Thus $\\boxed{{{answer}}}$.", gold)
    assert verdict.correct, verdict


@pytest.mark.parametrize(("answer", "gold"), WRONG_INTEGERS + WRONG_EXPRESSIONS)
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
