"""Token weights by hand-computed values, and what each does to a run: which direction, and that none of it depends on batching."""

import math

import pytest
import torch
from test_trainer import adapter_state, examples, losses, make_trainer

from opsd.token_weights import contrastive_weights, discrepancy_weights, position_weights, relative_positions


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_positions_are_relative_to_their_own_completion():
    torch.testing.assert_close(
        relative_positions([2, 1, 4]), torch.tensor([0.25, 0.75, 0.5, 0.125, 0.375, 0.625, 0.875])
    )


def test_position_weights_are_the_published_logistic():
    got = position_weights(relative_positions([4]), 0.25, 0.3, 0.1)
    want = [0.25 + 0.75 * logistic((x - 0.3) / 0.1) for x in (0.125, 0.375, 0.625, 0.875)]
    torch.testing.assert_close(got, torch.tensor(want))
    assert (got.diff() > 0).all()  # later tokens weigh more


def test_discrepancy_weights_by_hand():
    gaps = torch.tensor([1.0, 0.0, 3.0, 2.0, 2.0])
    got = discrepancy_weights(gaps, [3, 2], 0.5)
    torch.testing.assert_close(got, torch.tensor([1.5, 1 + 0.5 * 0.75, 1 + 0.5 * 0.75, 1.5, 1.25]))
    assert (got[:3].diff() <= 0).all()  # earlier tokens weigh more
    torch.testing.assert_close(discrepancy_weights(torch.zeros(2), [2], 0.5), torch.tensor([1.5, 1.5]))


def test_contrastive_weights_by_hand():
    right, wrong = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0, -1.98, -3.0])
    got = contrastive_weights(right, wrong, 0.25, 0.02)
    torch.testing.assert_close(got, torch.tensor([0.25, 0.25 + 0.75 * math.tanh(1.0), 1.0]))


def with_wrong_references(rows: list[dict]) -> list[dict]:
    shifted = rows[1:] + rows[:1]
    return [
        row | {"negative_teacher_prompt_ids": other["teacher_prompt_ids"]}
        for row, other in zip(rows, shifted, strict=True)
    ]


@pytest.mark.parametrize("token_weight", ["position", "discrepancy", "contrastive"])
def test_weighted_gradients_do_not_depend_on_micro_batches(folder, tokenizer, tmp_path, token_weight):
    options = dict(rows=with_wrong_references(examples()), max_steps=1, optim="sgd", max_grad_norm=0.0)
    plain = make_trainer(folder, tokenizer, tmp_path, **options)
    options["token_weight"] = token_weight
    if token_weight == "contrastive":
        options["token_weight_scale"] = (
            2.0  # between references, a random model's gaps are hundreds of times the published scale
        )
    whole = make_trainer(folder, tokenizer, tmp_path, **options)
    split = make_trainer(folder, tokenizer, tmp_path, **options, per_device=2, accumulation=4, packed=False)
    for trainer in (plain, whole, split):
        trainer.train()
    assert losses(split)[0] == pytest.approx(losses(whole)[0], rel=1e-5)
    for name, value in adapter_state(whole).items():
        torch.testing.assert_close(adapter_state(split)[name], value, rtol=1e-5, atol=1e-6)
    assert losses(whole)[0] != pytest.approx(losses(plain)[0], rel=1e-2)
    means = [row["loss/token_weight"] for row in whole.state.log_history if "loss/token_weight" in row]
    assert 0.25 < means[0] < 1.5
    # the logged divergence stays the plain one
    divergence = [[r["loss/divergence"] for r in t.state.log_history if "loss/divergence" in r] for t in (plain, whole)]
    assert divergence[0] == pytest.approx(divergence[1], rel=1e-6)


def test_a_wrong_reference_equal_to_the_right_one_leaves_the_floor(folder, tokenizer, tmp_path):
    rows = [row | {"negative_teacher_prompt_ids": row["teacher_prompt_ids"]} for row in examples()]
    plain = make_trainer(folder, tokenizer, tmp_path, rows=rows, max_steps=1)
    floor = make_trainer(folder, tokenizer, tmp_path, rows=rows, max_steps=1, token_weight="contrastive")
    plain.train(), floor.train()
    assert losses(floor)[0] == pytest.approx(0.25 * losses(plain)[0], rel=1e-5)
