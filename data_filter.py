"""Entry point: raw rows -> the rows that look like the target benchmark, verbatim and in order, with counts per rule.

    python data_filter.py --input rows.jsonl --output kept.jsonl --report counts.json --plot lengths.png

Reads .jsonl, .json, .parquet or a saved `datasets` folder, writes JSON lines. `opsd_train.py` applies the same rules.
"""

import argparse
import logging
from pathlib import Path

from opsd.benchmarks import load_benchmark
from opsd.entry import exit_on_bad_input
from opsd.filter_output import AfterFilter, write_rows
from opsd.filter_report import LengthHistogram, table
from opsd.filters import FilterRules, read_pass_rates
from opsd.overlap import BenchmarkIndex
from opsd.row_filter import RowFilter, kept_rows
from opsd.rows import iter_rows
from opsd.runinfo import sha256_file, write_json

NEEDS = {
    "benchmark_overlap": "benchmark",
    "min_pass_rate": "pass_rates",
    "max_pass_rate": "pass_rates",
    "seed": "sample",
    "weights": "target_answers",
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other bad input: in one line."""

    def error(self, message: str):
        raise ValueError(f"{message}; see python data_filter.py --help")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; options that would have no effect are refused."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--input", type=Path, required=True, help="rows to read")
    add("--output", type=Path, required=True, help="kept rows, .jsonl")
    add("--report", type=Path, required=True, help="counts per rule, .json")
    add("--plot", type=Path, help="histogram of trace lengths with the cut, .png")
    add("--on_bad_row", choices=("error", "drop"), default="error", help="unreadable rows: stop, or drop and count")
    rules = parser.add_argument_group("rules, in the order of application")
    add = rules.add_argument
    add("--sources", nargs="+", default=[], help="allowed values of `source`; not given = all")
    add(
        "--answer_pattern",
        default=r"-?\d{1,6}",
        help="for the whole Answer, ASCII digits; '' = off (default %(default)s)",
    )
    add("--min_trace_tokens", type=int, default=2000, help="least generated_token_count; 0 = off (default %(default)s)")
    add("--max_trace_tokens", type=int, help="largest generated_token_count; not given = off")
    add(
        "--recompute_tokens",
        metavar="TOKENIZER",
        help="count COT_Reason with this tokenizer where the count is missing",
    )
    add("--drop_leaked", action="store_true", help="drop problems that contain their solution")
    add("--privileged_column", default="solution", help="what --drop_leaked looks for (default %(default)s)")
    add("--pass_rates", type=Path, help="per-sample JSONL of eval_aime.py on the rows' problems; not given = off")
    add("--min_pass_rate", type=float, help="least share of correct samples, 0-1; 0 = off")
    add("--max_pass_rate", type=float, help="largest share of correct samples, 0-1; 1 = off")
    add("--benchmark", help="drop copies of its problems; a file or a name that eval_aime.py knows; not given = off")
    add("--benchmark_overlap", type=float, help="share of a problem's 8-word runs that makes a copy; default 0.5")
    add("--drop_duplicates", action="store_true", help="keep the first of rows with the same normalised problem")
    after = parser.add_argument_group("after filtering")
    add = after.add_argument
    add("--target_answers", help="weight rows so that answers are distributed as in this benchmark, a file or a name")
    add("--weights", type=Path, help="write each kept row's weight as JSONL")
    add("--sample", type=int, help="keep N rows, drawn without replacement, by weight if weighted; not given = all")
    add("--seed", type=int, help="seed of --sample; default 0")
    add("--benchmark_output", type=Path, help="also write the output rows as id, problem, answer, for eval_aime.py")
    words: list[str] = []
    for word in argv:  # a pattern may begin with a minus, which argparse would take for an option
        if words[-1:] == ["--answer_pattern"]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    args = parser.parse_args(words)
    if args.recompute_tokens and not (args.min_trace_tokens or args.max_trace_tokens):
        raise ValueError(f"recompute_tokens={args.recompute_tokens} needs --min_trace_tokens or --max_trace_tokens")
    for name, switch in NEEDS.items():
        if vars(args)[name] is not None and vars(args)[switch] is None:
            raise ValueError(f"{name}={vars(args)[name]} needs --{switch}; add it or leave --{name} out")
    if args.target_answers and (args.weights is None) == (args.sample is None):
        raise ValueError("target_answers needs --weights (to write them) or --sample (to use them), one of the two")
    if args.output.suffix != ".jsonl" or args.output.resolve() == args.input.resolve():
        raise ValueError(f"output={args.output} must be another file than the input and end in .jsonl")
    if args.plot and args.plot.suffix != ".png":
        raise ValueError(f"plot={args.plot} must end in .png")
    return args


def build_filter(args: argparse.Namespace) -> RowFilter:
    """The rules that the command line asks for, with the files they need read."""
    index = None
    if args.benchmark:
        problems = {problem.id: problem.problem for problem in load_benchmark(args.benchmark).problems}
        index = BenchmarkIndex(problems, 0.5 if args.benchmark_overlap is None else args.benchmark_overlap)
    low, high = args.min_pass_rate, args.max_pass_rate
    rules = FilterRules(
        answer_pattern=args.answer_pattern,
        min_trace_tokens=args.min_trace_tokens,
        max_trace_tokens=args.max_trace_tokens,
        sources=tuple(args.sources),
        drop_leaked=args.drop_leaked,
        drop_duplicates=args.drop_duplicates,
        privileged_column=args.privileged_column,
        benchmark=index,
        pass_rates=read_pass_rates(args.pass_rates) if args.pass_rates else None,
        pass_rate_range=(0.0 if low is None else low, 1.0 if high is None else high),
    )
    text_columns = ("problem", "Answer") if args.benchmark_output else ()
    return RowFilter(rules, text_columns, token_counter(args.recompute_tokens) if args.recompute_tokens else None)


def token_counter(tokenizer_path: str):
    """A function text -> number of tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"recompute_tokens={tokenizer_path} is no tokenizer: {error}") from error
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def main(argv: list[str]) -> None:
    args = parse(argv)
    row_filter, lengths = build_filter(args), LengthHistogram()
    after = AfterFilter(args.target_answers, args.weights, args.sample, args.seed or 0, args.benchmark_output)
    read = lengths.watch_read(iter_rows(args.input, field="input"))
    kept = kept_rows(read, row_filter, on_bad_row=args.on_bad_row, origin=f"input={args.input}")
    written = write_rows(lengths.watch_kept(kept), args.output, after)
    if args.plot:
        lengths.plot(args.plot, args.min_trace_tokens, args.max_trace_tokens)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = {"settings": settings, **row_filter.report(), **written, "output_sha256": sha256_file(args.output)}
    write_json(args.report, report)
    if not report["written"]:
        logging.getLogger("data_filter").warning("no row passed; %s is empty", args.output)
    print(table(report))


if __name__ == "__main__":
    exit_on_bad_input(main)
