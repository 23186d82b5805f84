"""Training examples: prompts of both roles from rows, limits that never cut, bad rows counted and named."""

import json
import pathlib

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opsd import prompts
from opsd.args import DataArgs
from opsd.data import load_rows, load_training_examples, wrong_references

SAMPLES = pathlib.Path(__file__).parent.parent.parent / "shared" / "data"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"no sample rows in {SAMPLES}")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, Qwen3's switch: lossless, so prompts can be read back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, name_or_path="bytes")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_row(index: int, **changes) -> dict:
    row = {
        "source": "olympiads",
        "problem": f"What is {index} + 0?",
        "solution": f"Adding nothing leaves \\boxed{{{index}}}.",
        "COT_Reason": f"Long thoughts about {index}.",
        "generated_token_count": 3000,
        "Answer": str(index),
    }
    return row | changes


def write_rows(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(tokenizer, train_file: str, *, student=False, teacher=True, more: dict | None = None, **fields):
    args = DataArgs(train_file=train_file, **fields)
    return load_training_examples(args, tokenizer, student_thinking=student, teacher_thinking=teacher, **(more or {}))


def dropped(counts: dict) -> dict[str, int]:
    return {rule["rule"]: rule["dropped"] for rule in counts["rules"]}


def test_examples_hold_the_rendered_prompts_of_both_roles(tmp_path, tokenizer):
    rows = [make_row(n) for n in range(300)]
    examples, counts = load(tokenizer, write_rows(tmp_path / "rows.jsonl", rows))
    assert examples.column_names == ["example_id", "prompt_ids", "teacher_prompt_ids"]
    assert (len(examples), counts["examples"], counts["rows"], counts["kept"]) == (300, 300, 300, 300)
    for index in (0, 127, 128, 299):
        row, example = rows[index], examples[index]
        assert example["example_id"] == str(index + 1)
        student = prompts.student_messages(row["problem"])
        assert example["prompt_ids"] == prompts.render_ids(tokenizer, student, enable_thinking=False)
        teacher = prompts.teacher_messages(row["problem"], row["solution"])
        assert example["teacher_prompt_ids"] == prompts.render_ids(tokenizer, teacher, enable_thinking=True)
    assert counts["longest_prompt_ids"] == max(map(len, examples["prompt_ids"]))
    other = load(tokenizer, write_rows(tmp_path / "other.jsonl", rows[::-1]))[1]
    assert counts["examples_sha256"] != other["examples_sha256"]


def test_privileged_text_reaches_the_teacher_only(tmp_path, tokenizer):
    rows = [
        make_row(n, solution=f"secret {n}", COT_Reason=f"secret thought {n}", Answer=f"secret {n}") for n in range(5)
    ]
    for column in ("solution", "COT_Reason"):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        examples, _ = load(tokenizer, path, privileged_column=column, more={"wrong_reference_seed": 0})
        for row, example in zip(rows, examples, strict=True):
            assert "secret" not in tokenizer.decode(example["prompt_ids"])
            assert f"\n{row[column]}\n" in tokenizer.decode(example["teacher_prompt_ids"])


def test_wrong_reference_differs_from_the_right_one(tmp_path, tokenizer):
    rows = [make_row(n, solution=f"same {n // 2}") for n in range(6)]
    examples, _ = load(tokenizer, write_rows(tmp_path / "rows.jsonl", rows), more={"wrong_reference_seed": 1})
    for row, example in zip(rows, examples, strict=True):
        text = tokenizer.decode(example["negative_teacher_prompt_ids"])
        assert row["problem"] in text and row["solution"] not in text and "same " in text


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=20), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_wrong_references_are_always_wrong(contexts, seed):
    if len(set(contexts)) == 1:
        with pytest.raises(ValueError, match="at least two different"):
            wrong_references(contexts, seed)
        return
    wrong = wrong_references(contexts, seed)
    assert wrong == wrong_references(contexts, seed)
    assert all(contexts[other] != context for other, context in zip(wrong, contexts, strict=True))


def test_reference_only_teacher_and_prefix(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [make_row(41)])
    more = {"teacher_sees_problem": False, "teacher_prefix": "open_think"}
    examples, _ = load(tokenizer, path, more=more)
    text = tokenizer.decode(examples[0]["teacher_prompt_ids"])
    assert "What is 41" not in text and "\\boxed{41}" in text and text.endswith("<|assistant|>\n<think>\n")
    assert tokenizer.decode(examples[0]["prompt_ids"]).endswith("</think>\n\n")


def test_overlong_prompts_stop_or_are_dropped_but_never_cut(tmp_path, tokenizer):
    rows = [make_row(1), make_row(2, problem="long " * 100), make_row(3), make_row(4, solution="s" * 900), make_row(5)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    limits = {"max_prompt_length": 300, "max_teacher_prompt_length": 900}
    with pytest.raises(
        ValueError, match=r"max_prompt_length=300 tokens is exceeded by prompt_ids of 1 of 5 rows \(rows 2;"
    ):
        load(tokenizer, path, **limits)
    examples, counts = load(tokenizer, path, overlong="drop", **limits)
    assert examples["example_id"][:] == ["1", "3", "5"]
    assert {name: count["rows"] for name, count in counts["overlong"].items()} == {
        "prompt_ids": 1,
        "teacher_prompt_ids": 2,
    }
    assert counts["overlong"]["teacher_prompt_ids"]["first_rows"] == [2, 4] and counts["examples"] == 3
    with pytest.raises(ValueError, match="all 5 prompts are too long"):
        load(tokenizer, path, overlong="drop", max_prompt_length=10)


def test_a_limit_equal_to_the_length_keeps_the_prompt_whole(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [make_row(1)])
    whole, counts = load(tokenizer, path)
    lengths = counts["longest_prompt_ids"], counts["longest_teacher_prompt_ids"]
    again, _ = load(tokenizer, path, max_prompt_length=lengths[0], max_teacher_prompt_length=lengths[1])
    assert again[0] == whole[0]
    with pytest.raises(ValueError, match="max_teacher_prompt_length"):
        load(tokenizer, path, max_prompt_length=lengths[0], max_teacher_prompt_length=lengths[1] - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solution": ""}, "row 2: no text in column 'solution'"),
        ({"solution": None}, "row 2: no text in column 'solution'"),
        ({"problem": "  "}, "row 2: no text in column 'problem'"),
        ({"problem": 7}, "row 2: no text in column 'problem'"),
        ({"solution": "half \ud83d"}, "row 2: half of a surrogate pair in column 'solution'"),
    ],
)
def test_rows_without_usable_text_stop_or_are_counted(tmp_path, tokenizer, change, message):
    path = write_rows(tmp_path / "rows.jsonl", [make_row(1), make_row(2, **change), make_row(3)])
    with pytest.raises(ValueError, match=message):
        load(tokenizer, path)
    examples, counts = load(tokenizer, path, on_bad_row="drop")
    assert examples["example_id"][:] == ["1", "3"] and dropped(counts)["bad_row"] == 1
    assert counts["rules"][0]["first_rows"] == [2]


def test_a_bad_row_that_the_filter_drops_anyway_stops_nothing(tmp_path, tokenizer):
    rows = [make_row(1), make_row(2, solution=None, Answer="x")]
    examples, counts = load(tokenizer, write_rows(tmp_path / "rows.jsonl", rows), answer_pattern=r"\d")
    assert len(examples) == 1 and dropped(counts) == {"bad_row": 0, "answer_missing": 0, "answer_pattern": 1}


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "dataset"])
def test_a_missing_column_is_named_in_every_format(tmp_path, tokenizer, form):
    rows = [{"problem": "P", "Answer": "1"}, {"problem": "Q", "Answer": "2"}]
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        write_rows(path, rows)
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    with pytest.raises(ValueError, match=r"row 1, 2: no column 'solution' \(its columns: .*problem") as caught:
        load(tokenizer, str(path))
    assert f"train_file={path}" in str(caught.value)


@pytest.mark.parametrize("form", ["json", "parquet", "dataset"])
def test_every_format_gives_the_examples_of_jsonl(tmp_path, tokenizer, form):
    rows = [make_row(n) for n in range(300)]
    path = tmp_path / f"rows.{form}"
    if form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    fields = {"answer_pattern": r"\d{1,2}", "min_trace_tokens": 2000}
    expected, expected_counts = load(tokenizer, write_rows(tmp_path / "rows.jsonl", rows), **fields)
    examples, counts = load(tokenizer, str(path), **fields)
    assert examples.to_dict() == expected.to_dict() and counts == expected_counts and len(examples) == 100


def test_a_folder_of_splits_names_them(tmp_path, tokenizer):
    split = datasets.Dataset.from_list([make_row(1)])
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match="holds the splits train, test"):
        load(tokenizer, str(tmp_path / "both"))


def test_only_the_first_rows_that_pass_are_used(tmp_path, tokenizer):
    rows = [make_row(n, generated_token_count=n * 1000) for n in range(8)] + [make_row(9, solution=None)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    examples, counts = load(tokenizer, path, min_trace_tokens=3000, max_train_rows=2)
    assert examples["example_id"][:] == ["4", "5"] and counts["rows"] == 5
    with pytest.raises(ValueError, match="row 9"):
        load(tokenizer, path, min_trace_tokens=3000)


def test_no_row_left_names_the_rules(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [make_row(1, generated_token_count=None), make_row(2, Answer="x")])
    with pytest.raises(ValueError, match="2 read, dropped answer_pattern=1, trace_tokens_missing=1; loosen the rule"):
        load(tokenizer, path, answer_pattern=r"\d", min_trace_tokens=2000)


def test_modes_are_checked_before_any_row_is_read(tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, name_or_path="plain")
    plain.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="ignores enable_thinking"):
        load(plain, "absent.jsonl")


def test_absent_rows_are_named(tokenizer, monkeypatch):
    with pytest.raises(FileNotFoundError, match="train_file=absent.jsonl does not exist"):
        load(tokenizer, "absent.jsonl")


@pytest.mark.parametrize("error", [ConnectionError("no route\nsecond line"), ValueError('Unknown split "x".')])
def test_a_hub_that_does_not_answer_is_one_clear_line(tokenizer, monkeypatch, error):
    def refuse(name, split):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        FileNotFoundError, match="dataset_name=who/what, dataset_split=train cannot be loaded"
    ) as caught:
        load_rows(DataArgs(dataset_name="who/what"))
    assert "\n" not in str(caught.value) and "give train_file" in str(caught.value)


def test_hub_rows_go_the_same_way(tokenizer, monkeypatch):
    hub = datasets.Dataset.from_list([make_row(n) for n in range(3)])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {("who/what", "train"): hub}[name, split])
    rows, counts = load_rows(DataArgs(dataset_name="who/what", answer_pattern="[12]"))
    assert [row.number for row in rows] == [2, 3] and counts["kept"] == 2


@needs_samples
def test_real_rows_become_examples(tokenizer):
    path = str(SAMPLES / "olympiad_rows_300.jsonl")
    fields = {"max_prompt_length": 4000, "max_teacher_prompt_length": 20000, "overlong": "drop"}
    examples, counts = load(tokenizer, path, answer_pattern=r"-?\d{1,6}", **fields)
    assert (
        counts["kept"]
        == 154
        == len(examples) + len({row for count in counts["overlong"].values() for row in count["first_rows"]})
    )
