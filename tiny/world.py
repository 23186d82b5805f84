"""Problems of the tiny world, their reference solutions and their rows; everything follows from one seed. First file of `tiny/`.

A pin stands on a ruler with the marks 0 to 99. Every charm moves it by a fixed number of marks, and that table is nowhere in the
problem: a solver has to know it. The pretrained model knows most charms and has seen only contradictions about the others
(pretrain.py), so it solves the problems without an unknown charm: about half. The reference solution states each charm's value, so
its content is what the unaided model lacks, in independent pieces: each value can be looked up whatever was written before.
Sums are not taken modulo anything: a model this small learns ordinary addition in 200 steps and modular addition in thousands.
Texts are built from pieces, and each piece is one token (tokenizer.py).
"""

import random
from dataclasses import dataclass

MARKS = 100
VALUES = range(1, 10)
STARTS = range(46, 54)  # far enough from both ends for five charms of any value
CHARMS = tuple(f"{consonant}{vowel}x" for consonant in "BDFGKLMNPRST" for vowel in "aeio")
UNKNOWN = 8
MOVES = (3, 4, 5)  # charms in a problem that passes the filter, is in the benchmark, or is pretrained on
EASY_MOVES = (1, 2)  # their traces are short, so the filter drops them
TRACE_SCALE = (
    40  # `generated_token_count` per word of the trace: synthetic, so that the published threshold of 2,000 fits
)
ROWS, PASSING_SHARE, EASY_SHARE = 3000, 0.35, 0.4  # the rest has an answer that is not an integer
BENCHMARK_ROWS, HELDOUT_ROWS = 30, 500
SYSTEM = "Think about the problem first, then give the solution."
_BEGIN, _END = "<|begin_of_{}|>", "<|end_of_{}|>"


@dataclass(frozen=True)
class Problem:
    """`moves` are (charm, to the right) pairs with distinct charms."""

    start: int
    moves: tuple[tuple[str, bool], ...]

    @property
    def charms(self) -> frozenset[str]:
        return frozenset(charm for charm, _ in self.moves)


def make_table(seed: int) -> tuple[dict[str, int], frozenset[str]]:
    """(marks by which each charm moves the pin; the charms that the pretrained model does not know)."""
    rng = random.Random(f"table-{seed}")
    table = {charm: rng.choice(VALUES) for charm in CHARMS}
    return table, frozenset(rng.sample(CHARMS, UNKNOWN))


def sample_problem(rng: random.Random, lengths: tuple[int, ...] = MOVES) -> Problem:
    charms = rng.sample(CHARMS, rng.choice(lengths))
    return Problem(rng.choice(STARTS), tuple((charm, rng.random() < 0.5) for charm in charms))


def move(position: int, value: int, right: bool) -> int:
    return position + value if right else position - value


def final_mark(problem: Problem, values: dict[str, int]) -> int:
    position = problem.start
    for charm, right in problem.moves:
        position = move(position, values[charm], right)
    return position


def problem_pieces(problem: Problem) -> list[str]:
    pieces = ["A pin stands on a ruler at mark ", str(problem.start), ". Move it "]
    for charm, right in problem.moves:
        pieces += ["right by " if right else "left by ", charm, ", "]
    return [*pieces[:-1], ". Where does it end?"]


def solution_pieces(problem: Problem, values: dict[str, int]) -> list[str]:
    """The reference: values and result, in other words than a completion's, without the marks between."""
    pieces = []
    for charm, _ in problem.moves:
        pieces += [charm, " moves ", str(values[charm]), ", "]
    return [*pieces[:-1], ". So the answer is \\boxed{", str(final_mark(problem, values)), "}."]


def completion_pieces(problem: Problem, values: dict[str, int]) -> list[str]:
    """What the model writes: one step per charm, computed from the values written, then the box (the end token is not a piece)."""
    pieces, position = [], problem.start
    for charm, right in problem.moves:
        position = move(position, values[charm], right)
        pieces += [charm, " is ", str(values[charm]), ", right to " if right else ", left to ", str(position), ". "]
    return [*pieces, "The answer is \\boxed{", str(position), "}."]


VALUE_OFFSET, STEP_PIECES = 2, 6  # the value of step i is piece i * STEP_PIECES + VALUE_OFFSET of a completion


def make_rows(seed: int) -> tuple[list[dict], list[dict], list[dict], list[dict]]:
    """(training rows, the same rows with another problem's solution, benchmark, held-out problems); problem texts are disjoint."""
    table, unknown = make_table(seed)
    rng = random.Random(f"rows-{seed}")
    used: set[Problem] = set()
    passing, easy = round(ROWS * PASSING_SHARE), round(ROWS * EASY_SHARE)
    benchmark = _benchmark(rng, unknown, used)
    heldout = [_fresh(rng, MOVES, used) for _ in range(HELDOUT_ROWS)]
    problems = [_fresh(rng, MOVES, used) for _ in range(passing)]
    easy_problems = [sample_problem(rng, EASY_MOVES) for _ in range(easy)]
    rows = [_row(problem, table) for problem in problems + easy_problems]
    swapped = [_swap(problem, rows[i], problems, table, rng) for i, problem in enumerate(problems + easy_problems)]
    others = [_row_without_integer(rng, table) for _ in range(ROWS - len(rows))]
    order = rng.sample(range(ROWS), ROWS)
    rows, swapped = rows + others, swapped + others
    return (
        [rows[i] for i in order],
        [swapped[i] for i in order],
        [_benchmark_row(f"tiny-{i:02d}", problem, table) for i, problem in enumerate(benchmark)],
        [_benchmark_row(f"heldout-{i:03d}", problem, table) for i, problem in enumerate(heldout)],
    )


def solution_with(problem: Problem, table: dict[str, int]) -> str:
    return "".join(solution_pieces(problem, table))


def parse_problem(text: str) -> Problem:
    """The inverse of `problem_pieces`, for measurements on rows."""
    head, _, tail = text.partition(". Move it ")
    start = int(head.rsplit(" ", 1)[1])
    steps = tail.partition(". Where")[0].split(", ")
    return Problem(start, tuple((step.rsplit(" ", 1)[1], step.startswith("right")) for step in steps))


def _fresh(rng: random.Random, lengths: tuple[int, ...], used: set[Problem]) -> Problem:
    while (problem := sample_problem(rng, lengths)) in used:
        pass
    used.add(problem)
    return problem


def _benchmark(rng: random.Random, unknown: frozenset[str], used: set[Problem]) -> list[Problem]:
    """Half with an unknown charm, half without: 30 problems drawn freely would have a base level of 0.5 +- 0.09."""
    chosen: list[Problem] = []
    for wanted in (True, False) * (BENCHMARK_ROWS // 2):
        while bool((problem := _fresh(rng, MOVES, used)).charms & unknown) != wanted:
            pass
        chosen.append(problem)
    return chosen


def _swap(problem: Problem, row: dict, pool: list[Problem], table: dict[str, int], rng: random.Random) -> dict:
    """`row` with the solution of a problem that shares no charm with it: the reference holds nothing of use."""
    while (other := rng.choice(pool)).charms & problem.charms:
        pass
    return {**row, "solution": solution_with(other, table)}


def _benchmark_row(name: str, problem: Problem, table: dict[str, int]) -> dict:
    return {"id": name, "problem": "".join(problem_pieces(problem)), "answer": str(final_mark(problem, table))}


def _row(problem: Problem, table: dict[str, int]) -> dict:
    position = problem.start
    trace = [f"Okay, the pin stands at {position} and I have to follow the moves one after the other."]
    for charm, right in problem.moves:
        before, position = position, move(position, table[charm], right)
        way = "right" if right else "left"
        trace.append(f"{charm} moves it {way} by {table[charm]}, so it goes from {before} to {position}.")
    return _columns(
        "".join(problem_pieces(problem)), solution_with(problem, table), str(position), " ".join(trace), "math"
    )


def _row_without_integer(rng: random.Random, table: dict[str, int]) -> dict:
    """Rows whose `Answer` is a fraction, a list of charms, or empty; their traces are long enough."""
    first, second = rng.sample(CHARMS, 2)
    kind = rng.choices(("fraction", "names", "empty"), weights=(60, 39, 1))[0]
    if kind == "fraction":
        problem = f"What is the ratio of the move of {first} to the move of {second}, as a fraction?"
        answer = f"\\frac{{{table[first]}}}{{{table[second]}}}"
    elif kind == "names":
        problem = f"Which of {first} and {second} move the pin by more than 3 marks?"
        answer = ", ".join(charm for charm in (first, second) if table[charm] > 3) or "\\text{none}"
    else:
        problem, answer = f"Show that {first} and {second} move the pin.", ""
    facts = f"{first} moves {table[first]}, {second} moves {table[second]}."
    box = f" So the answer is \\boxed{{{answer}}}." if answer else ""
    trace = " ".join([f"Okay, let me check the two charms again. {facts}"] * 5)
    return _columns(problem, facts + box, answer, trace, "olympiads")


def _columns(problem: str, solution: str, answer: str, trace: str, source: str) -> dict:
    question = f"Return your final response within \\boxed{{}}. {problem}"
    reply = "\n\n".join(
        [
            _BEGIN.format("thought"),
            trace,
            _END.format("thought"),
            _BEGIN.format("solution"),
            solution,
            _END.format("solution"),
        ]
    )
    return {
        "source": source,
        "problem": problem,
        "solution": solution,
        "messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": solution}],
        "system": SYSTEM,
        "conversations": [{"from": "user", "value": question}, {"from": "assistant", "value": reply}],
        "generated_token_count": TRACE_SCALE * len(trace.split()),
        "correct": True,
        "Question": question,
        "COT_Reason": trace,
        "Answer": answer,
    }
