"""Batches: alignment of both roles, no prediction from padding, and results that do not depend on how sequences are batched."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opsd.attention import NAME as VARLEN
from opsd.attention import flash_attention_3, varlen_attention
from opsd.batch import Layout, build_inputs, split_micro_batches
from opsd.hidden_tap import HiddenTap
from opsd.rollout import Rollout

PAD = 0
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 5]]
COMPLETIONS = [[20, PAD, 2], [21], [22, 23, 24, 25, 2], [2]]  # completions contain the pad and the end token


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def completion_hidden(model, prompts, completions, layout) -> torch.Tensor:
    model.set_attn_implementation(VARLEN if layout.packed else "sdpa")
    inputs = build_inputs(prompts, completions, layout)
    tap = HiddenTap(model)
    with torch.no_grad(), tap.selecting(inputs.keep):
        hidden = model(**inputs.forward, use_cache=False).logits
    model.lm_head.forward = tap._project
    return hidden


def alone(model) -> torch.Tensor:
    """Each sequence by itself, straight from the definition: token t is predicted at the position before it."""
    model.set_attn_implementation("sdpa")
    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
        rows.append(hidden[len(prompt) - 1 : -1])
    return torch.cat(rows)


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_of_mixed_lengths_equals_each_row_alone(model, packed):
    hidden = completion_hidden(model, PROMPTS, COMPLETIONS, Layout(packed=packed, pad_id=PAD))
    torch.testing.assert_close(hidden, alone(model), rtol=1e-5, atol=1e-5)


def test_position_gap_changes_only_rows_shorter_than_the_longest_prompt(model):
    hidden = completion_hidden(model, PROMPTS, COMPLETIONS, Layout(packed=False, pad_id=PAD, position_gap=True))
    reference = alone(model)
    lengths = [len(c) for c in COMPLETIONS]
    for row, (got, expected) in enumerate(zip(hidden.split(lengths), reference.split(lengths), strict=True)):
        torch.testing.assert_close(
            got[0], expected[0], rtol=1e-5, atol=1e-5
        )  # from the last real prompt token, never a pad
        moved = len(PROMPTS[row]) < max(map(len, PROMPTS)) and lengths[row] > 1
        assert (not torch.allclose(got[1:], expected[1:], atol=1e-3)) == moved


def test_positions_are_contiguous_and_no_kept_position_is_padding():
    for layout in (Layout(packed=True, pad_id=PAD), Layout(packed=False, pad_id=PAD)):
        inputs = build_inputs(PROMPTS, COMPLETIONS, layout)
        ids = inputs.forward["input_ids"].flatten()
        positions = inputs.forward["position_ids"].flatten()
        kept = inputs.keep.tolist()
        assert len(kept) == sum(map(len, COMPLETIONS))
        expected_ids = [token for p, c in zip(PROMPTS, COMPLETIONS, strict=True) for token in [p[-1], *c[:-1]]]
        assert ids[kept].tolist() == expected_ids
        expected_positions = [len(p) - 1 + t for p, c in zip(PROMPTS, COMPLETIONS, strict=True) for t in range(len(c))]
        assert positions[kept].tolist() == expected_positions


def test_padded_masks_come_from_lengths_not_from_ids():
    inputs = build_inputs(PROMPTS, COMPLETIONS, Layout(packed=False, pad_id=PAD))
    lengths = [len(p) + len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert inputs.forward["attention_mask"].sum(-1).tolist() == lengths  # the pad token inside a completion counts


def test_empty_sequences_are_refused_by_number():
    with pytest.raises(ValueError, match="sequence 1 has 1 prompt and 0 completion tokens"):
        build_inputs([[1], [2]], [[3], []], Layout(packed=True, pad_id=PAD))


def rollout(length: int) -> Rollout:
    return Rollout((1, 2), tuple(range(3, 3 + length)), (0.0,) * length, "stop")


def test_micro_batches_are_balanced_and_complete():
    lengths = [100, 1, 1, 1, 100, 1, 1, 1]
    examples = [{"example_id": str(i), "teacher_prompt_ids": [1]} for i in range(8)]
    groups = split_micro_batches(examples, [rollout(n) for n in lengths], 2)
    assert [sum(map(len, g.completions)) for g in groups] == [103, 103]
    assert sorted(e["example_id"] for g in groups for e in g.examples) == [str(i) for i in range(8)]
    assert all(len(g.examples) == 4 for g in groups)


def test_micro_batches_refuse_a_remainder():
    with pytest.raises(ValueError, match="3 rollouts do not divide into 2"):
        split_micro_batches([{"teacher_prompt_ids": [1]}] * 3, [rollout(1)] * 3, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_there_is_no_flash_attention_3():
    assert flash_attention_3() is None


@pytest.mark.gpu
def test_attention_without_gradients_is_attention_with_them():
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [700, 33, 1, 290]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (16, 8, 8)
    )

    def attend():
        return varlen_attention(
            None, query, key, value, None, scaling=128**-0.5, cu_seq_lens_q=bounds, max_length_q=max(lengths)
        )[0]

    with torch.no_grad():
        teacher = attend()
    torch.testing.assert_close(teacher, attend(), atol=1e-2, rtol=1e-2)
