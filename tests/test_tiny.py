"""The tiny world: its rows, tokenizer, pretraining samples and cache. The gates themselves are measured at every build (tiny/build.py)."""

import dataclasses
import json
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd import prompts
from tiny import build, measure, pretrain, tokenizer, world

SEED = 5
COLUMNS = [
    "source", "problem", "solution", "messages", "system", "conversations", "generated_token_count", "correct",
    "Question", "COT_Reason", "Answer"
]  # fmt: skip
SHORT = pretrain.PretrainSettings(steps=2, unaided_batch=3, aided_batch=3, warmup_steps=1, threads=1)


@pytest.fixture(scope="module")
def rows():
    return world.make_rows(SEED)


@pytest.fixture(scope="module")
def words():
    return tokenizer.build_tokenizer()


def passes_filter(row):
    return bool(re.fullmatch(r"-?\d{1,6}", row["Answer"])) and row["generated_token_count"] >= 2000


def test_rows_follow_from_the_seed(rows):
    assert world.make_rows(SEED) == rows
    assert world.make_rows(SEED + 1)[0] != rows[0]


def test_rows_have_the_columns_of_the_real_dataset_and_a_third_passes_the_published_filter(rows):
    train, swapped, _, _ = rows
    assert len(train) == len(swapped) == world.ROWS
    assert all(list(row) == COLUMNS for row in train + swapped)
    assert sum(passes_filter(row) for row in train) == round(world.ROWS * world.PASSING_SHARE)
    dropped = [row for row in train if not passes_filter(row)]
    assert any(row["generated_token_count"] < 2000 and row["Answer"].isdigit() for row in dropped)
    assert any("frac" in row["Answer"] for row in dropped) and any(row["Answer"] == "" for row in dropped)


def test_answers_agree_with_an_independent_solver(rows):
    table, _ = world.make_table(SEED)
    train, _, benchmark, heldout = rows
    cases = [(r["problem"], r["Answer"]) for r in train if passes_filter(r)] + [
        (r["problem"], r["answer"]) for r in benchmark + heldout
    ]
    for text, answer in cases:
        mark = int(re.search(r"at mark (\d+)\.", text)[1])
        for way, charm in re.findall(r"(right|left) by (\w+)", text):
            mark += table[charm] * (1 if way == "right" else -1)
        assert str(mark) == answer


def test_the_solution_states_every_value_and_the_answer(rows):
    table, _ = world.make_table(SEED)
    for row in (row for row in rows[0] if passes_filter(row)):
        stated = dict(re.findall(r"(\w+) moves (\d+)", row["solution"]))
        assert stated == {charm: str(table[charm]) for charm in world.parse_problem(row["problem"]).charms}
        assert row["solution"].endswith(f"\\boxed{{{row['Answer']}}}.")


def test_a_swapped_solution_shares_no_charm_with_its_problem(rows):
    train, swapped, _, _ = rows
    for row, other in zip(train, swapped, strict=True):
        assert {k: v for k, v in row.items() if k != "solution"} == {k: v for k, v in other.items() if k != "solution"}
        if passes_filter(row):
            stated = set(re.findall(r"(\w+) moves", other["solution"]))
            assert stated and not stated & world.parse_problem(row["problem"]).charms


def test_benchmark_has_the_aime_schema_is_balanced_and_is_not_trained_on(rows):
    train, _, benchmark, heldout = rows
    _, unknown = world.make_table(SEED)
    assert [list(row) for row in benchmark] == [["id", "problem", "answer"]] * 30
    assert len(heldout) == world.HELDOUT_ROWS and len({row["id"] for row in benchmark + heldout}) == 530
    assert sum(bool(world.parse_problem(row["problem"]).charms & unknown) for row in benchmark) == 15
    trained = {row["problem"] for row in train}
    tested = [row["problem"] for row in benchmark + heldout]
    assert not trained & set(tested) and len(set(tested)) == 530


def test_parse_problem_inverts_the_text():
    rng = random.Random(0)
    for _ in range(200):
        problem = world.sample_problem(rng, (1, 2, 3, 4, 5))
        assert world.parse_problem("".join(world.problem_pieces(problem))) == problem


def test_every_piece_and_every_passage_of_the_prompts_is_one_token(words):
    for text in tokenizer.world_pieces() + tokenizer.fixed_passages():
        assert len(words.encode(text)) == 1, text
    assert len(words) % 64 == 0 and words.vocab_size <= len(words)
    assert sorted(words.get_vocab().values()) == list(range(len(words)))


def test_joined_pieces_encode_to_the_pieces_tokens(words, rows):
    table, _ = world.make_table(SEED)
    for row in rows[3][:50]:
        problem = world.parse_problem(row["problem"])
        for pieces in (
            world.problem_pieces(problem), world.solution_pieces(problem, table), world.completion_pieces(problem, table)
        ):  # fmt: skip
            assert words.encode("".join(pieces)) == [words.encode(piece)[0] for piece in pieces]


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text):
    assert _words().decode(_words().encode(text)) == text


def _words(cache=[]):  # noqa: B006 - hypothesis refuses function-scoped fixtures; one tokenizer is enough
    if not cache:
        cache.append(tokenizer.build_tokenizer())
    return cache[0]


def test_chat_template_has_the_thinking_switch_of_qwen3(words):
    prompts.check_thinking_switch(words, student_thinking=False, teacher_thinking=True)
    messages = prompts.student_messages("1 + 1")
    on = prompts.render_text(words, messages, enable_thinking=True)
    assert on.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompts.render_text(words, messages, enable_thinking=False) == on + "<think>\n\n</think>\n\n"
    assert words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == on


def test_prompts_are_short_and_decode_to_their_text(words, rows):
    row = next(row for row in rows[0] if passes_filter(row))
    for messages in (
        prompts.student_messages(row["problem"]),
        prompts.teacher_messages(row["problem"], row["solution"]),
    ):
        ids = prompts.render_ids(words, messages, enable_thinking=False)
        assert len(ids) <= 60
        assert words.decode(ids) == prompts.render_text(words, messages, enable_thinking=False)


def test_pretraining_prompts_are_the_rendered_prompts(words):
    maker = pretrain.SampleMaker(words, SEED, pretrain.PretrainSettings())
    for draw, make in ((maker.unaided, "unaided"), (maker.aided, "aided")):
        for _ in range(40):
            ids, labels = draw()
            prompt_length = labels.count(pretrain.IGNORED)
            text = words.decode(ids[:prompt_length])
            assert words.encode(text) == ids[:prompt_length]
            problem = re.search(r"A pin.*end\?", text)[0]
            context = re.search(r"\n(\w+ moves .*)\n\[end", text)
            messages = [
                prompts.teacher_messages(problem, context[1]) if make == "aided" else None,
                prompts.student_messages(problem),
                prompts.evaluation_messages(problem),
            ]
            rendered = [prompts.render_ids(words, m, enable_thinking=t) for m in messages if m for t in (True, False)]
            assert ids[:prompt_length] in rendered


def test_pretraining_never_states_a_fixed_value_for_an_unknown_charm(words):
    maker = pretrain.SampleMaker(words, SEED, pretrain.PretrainSettings())
    table, unknown = world.make_table(SEED)
    right = {True: [0, 0], False: [0, 0]}
    for draw in [maker.unaided] * 1500 + [maker.aided] * 1500:
        ids, labels = draw()
        text = words.decode(ids)
        for charm, value in re.findall(r"(\w+) (?:is|turns) (\d+)", text):
            right[charm in unknown][0] += int(value) == table[charm]
            right[charm in unknown][1] += 1
    assert right[True][0] / right[True][1] == pytest.approx(1 / 9, abs=0.03)
    assert right[False][0] / right[False][1] > 0.5


def test_with_a_reference_the_labels_follow_it_and_the_marks_follow_what_is_written(words):
    maker = pretrain.SampleMaker(words, SEED, pretrain.PretrainSettings(other_reference=0.0))
    differ = 0
    for _ in range(200):
        ids, labels = maker.aided()
        start = labels.count(pretrain.IGNORED)
        prompt, written, labelled = words.decode(ids[:start]), words.decode(ids[start:]), words.decode(labels[start:])
        stated = dict(re.findall(r"(\w+) moves (\d+)", prompt))
        assert dict(re.findall(r"(\w+) is (\d+)", labelled)) == stated
        mark = int(re.search(r"at mark (\d+)\.", prompt)[1])
        for value, way, shown in re.findall(r"is (\d+), (right|left) to (\d+)\.", written):
            mark += int(value) * (1 if way == "right" else -1)
            assert int(shown) == mark
        assert labelled.endswith(f"\\boxed{{{mark}}}.<|im_end|>")
        differ += written != labelled
    assert 60 < differ < 140


def test_pretraining_is_bitwise_repeatable_and_leaves_the_random_state_alone(words):
    before = torch.get_rng_state()
    first, second = (pretrain.pretrain(words, SEED, SHORT).state_dict() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = pretrain.pretrain(words, SEED + 1, SHORT).state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_right_padding_does_not_change_the_loss(words):
    maker = pretrain.SampleMaker(words, SEED, pretrain.PretrainSettings())
    model = pretrain.make_model(words, SEED)
    samples = [maker.aided() for _ in range(4)]
    together, count = pretrain.completion_loss(model, *pretrain.collate(samples, words.pad_token_id))
    alone = [pretrain.completion_loss(model, *pretrain.collate([sample], words.pad_token_id)) for sample in samples]
    assert count == sum(number for _, number in alone)
    torch.testing.assert_close(together, sum(loss for loss, _ in alone), rtol=1e-5, atol=1e-3)


def test_model_is_a_qwen3_of_half_a_million_parameters(words):
    model = pretrain.make_model(words, SEED)
    assert model.config.model_type == "qwen3" and 400_000 < model.num_parameters() < 600_000
    assert model.config.vocab_size == len(words)


def test_sampling_with_the_cache_equals_sampling_without(words):
    model = pretrain.pretrain(words, SEED, SHORT)
    prompt_ids = [words.encode(text) for text in ("A pin", "Where does", "Bax")]
    sampled = measure.sample(model, prompt_ids, 0.0, torch.Generator())
    for prompt, completion in zip(prompt_ids, sampled, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + measure.MAX_NEW_TOKENS and (
            not ids[len(prompt) :] or ids[-1] != words.eos_token_id
        ):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert ids[len(prompt) :] == completion


def test_a_world_that_misses_its_gates_is_an_error_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "HELDOUT_ROWS", 6)
    with pytest.raises(RuntimeError, match=r"privileged_sampled=0\.\d+ must be in"):
        build.build_tiny_world(tmp_path, SEED, SHORT)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_world_is_reused_and_any_setting_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "HELDOUT_ROWS", 6)
    monkeypatch.setattr(build, "check_gates", lambda measured: None)
    monkeypatch.setattr(build.measure, "measure", lambda *_: {name: 0.5 for name in [*build.GATES, "swapped_sampled"]})
    folder = build.build_tiny_world(tmp_path, SEED, SHORT)
    assert sorted(path.name for path in folder.iterdir()) == [
        "benchmark.jsonl", "heldout.jsonl", "model", "train.jsonl", "train_swapped.jsonl", "world.json"
    ]  # fmt: skip
    assert set(build.GATES) <= set(json.loads((folder / "world.json").read_text())["measured"])
    monkeypatch.setattr(build.pretrain, "pretrain", None)  # a second build would fail
    assert build.build_tiny_world(tmp_path, SEED, SHORT) == folder
    longer = dataclasses.replace(SHORT, steps=3)
    assert build.world_digest(SEED, SHORT) != build.world_digest(SEED, longer) != build.world_digest(SEED + 1, longer)


def test_gates_name_what_was_missed():
    fine = {name: (low + high) / 2 for name, (low, high) in build.GATES.items()}
    build.check_gates(fine)
    with pytest.raises(RuntimeError, match=r"swapped_gain=0\.200 must be in \[-1\.0, 0\.05\]"):
        build.check_gates(fine | {"swapped_gain": 0.2})


def test_summary_states_n_and_the_standard_error_of_every_accuracy(tmp_path):
    record = {"seed": 3, "parameters": 5, "unknown": [], "settings": {}, "versions": {}, "heldout_problems": 400}
    record |= {
        "pretraining_seconds": 1.0,
        "total_seconds": 2.0,
        "measured": {"a_sampled": 0.5, "b_greedy": 0.9, "teacher_p_mark": 0.99},
    }
    (tmp_path / "world.json").write_text(json.dumps(record))
    written = build.summary([tmp_path])["worlds"][0]
    assert written["n"] == 400 and written["standard_error"] == {"a_sampled": 0.025, "b_greedy": 0.015}
