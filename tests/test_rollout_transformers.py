"""The engine without vLLM: its completions depend on the request alone, and its filters are vLLM's."""

import pytest
import torch
from peft import PeftModel
from random_qwen3 import save_adapter
from transformers import AutoModelForCausalLM

from opsd.rollout import SamplingSettings
from opsd.rollout_transformers import TransformersEngine, keep_top

SAMPLING = SamplingSettings(1.1, 0.95, 20, 10)
PROMPTS = [[10 + i] * (1 + 3 * i) for i in range(5)]
SEEDS = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / f"adapter-{seed}", folder, seed=seed) for seed in (1, 2)]


@pytest.fixture
def engine(folder, tokenizer):
    return TransformersEngine.from_pretrained(
        str(folder), dtype="float32", device="cpu", eos_ids={tokenizer.eos_token_id}, pad_id=tokenizer.pad_token_id
    )


def completions(rollouts):
    return [rollout.completion_ids for rollout in rollouts]


def test_a_completion_depends_on_its_request_alone(engine, folder, tokenizer):
    together = engine.generate(PROMPTS, SAMPLING, SEEDS)
    alone = [engine.generate([ids], SAMPLING, [seed])[0] for ids, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert completions(together) == completions(alone)
    pairs = TransformersEngine.from_pretrained(
        str(folder), dtype="float32", device="cpu", eos_ids={tokenizer.eos_token_id}, pad_id=3, batch_size=2
    )
    assert completions(pairs.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1])) == completions(together)[::-1]
    assert completions(engine.generate(PROMPTS, SAMPLING, SEEDS[::-1])) != completions(together)
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left.per_token_logps, right.per_token_logps, atol=1e-5, rtol=0)


def test_log_probabilities_are_the_models(engine, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for rollout in engine.generate(PROMPTS, SAMPLING, SEEDS):
        with torch.no_grad():
            logits = model(torch.tensor([rollout.prompt_ids + rollout.completion_ids])).logits[0]
        logits = logits[len(rollout.prompt_ids) - 1 : -1] / SAMPLING.temperature
        log_probs = keep_top(logits, SAMPLING.top_p, SAMPLING.top_k).log_softmax(-1)
        expected = log_probs.gather(-1, torch.tensor(rollout.completion_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(rollout.per_token_logps), expected, atol=1e-5, rtol=0)


def test_adapters_change_the_output_and_switching_back_is_exact(engine, adapters):
    outputs = {}
    for served in (None, *adapters, adapters[0], None):
        engine.sync(served, step=1)
        got = completions(engine.generate(PROMPTS, SAMPLING, SEEDS))
        assert outputs.setdefault(served, got) == got
    assert len(set(map(tuple, outputs.values()))) == 3


def test_a_live_engine_samples_from_the_weights_of_the_moment(folder, adapters, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapters[0]))
    model.train()
    engine = TransformersEngine(model, eos_ids={tokenizer.eos_token_id}, pad_id=tokenizer.pad_token_id, live=True)
    engine.sync(adapters[1], step=3)  # nothing to load: the model is the trainer's
    before = completions(engine.generate(PROMPTS, SAMPLING, SEEDS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
    assert completions(engine.generate(PROMPTS, SAMPLING, SEEDS)) != before
    assert model.training and engine.served == "the trainer's own weights at step 3"


def test_end_tokens(engine, tokenizer):
    eos = tokenizer.eos_token_id
    sampling = SamplingSettings(1.5, 1.0, 0, 40)
    rollouts = engine.generate([PROMPTS[0]] * 40, sampling, list(range(40)))
    assert 0 < sum(r.finish_reason == "stop" for r in rollouts) < 40
    for rollout in rollouts:
        assert (rollout.completion_ids[-1] == eos) == (not rollout.truncated)
        assert eos not in rollout.completion_ids[:-1]
    ignored = engine.generate([PROMPTS[0]] * 40, SamplingSettings(1.5, 1.0, 0, 40, ignore_eos=True), list(range(40)))
    assert {len(r.completion_ids) for r in ignored} == {40} and {r.finish_reason for r in ignored} == {"length"}
    assert any(eos in r.completion_ids for r in ignored)


def test_greedy_decoding_takes_the_most_likely_token(engine, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rollout = engine.generate([PROMPTS[2]], SamplingSettings(0.0, 1.0, 0, 6), [0])[0]
    with torch.no_grad():
        logits = model(torch.tensor([rollout.prompt_ids + rollout.completion_ids])).logits[0]
    assert logits[len(PROMPTS[2]) - 1 : -1].argmax(-1).tolist() == list(rollout.completion_ids)


def test_requests_of_different_settings_are_answered_one_batch_each(engine):
    engine.submit("a", PROMPTS[0], SamplingSettings(1.0, 1.0, 0, 3, ignore_eos=True), 1)
    engine.submit("b", PROMPTS[1], SamplingSettings(1.0, 1.0, 0, 5, ignore_eos=True), 2)
    engine.submit("c", PROMPTS[2], SamplingSettings(1.0, 1.0, 0, 3, ignore_eos=True), 3)
    answered = [[(key, len(r.completion_ids)) for key, r in engine.poll()] for _ in range(2)]
    assert answered == [[("a", 3), ("c", 3)], [("b", 5)]] and engine.pending == 0


def test_merged_weights_are_not_put_into_the_trainers_model(folder, adapters, tokenizer, engine):
    live = TransformersEngine(None, eos_ids={1}, pad_id=0, live=True)
    with pytest.raises(RuntimeError, match="its own copy"):
        live.load_weights([], step=1)
    engine.sync(adapters[0], step=1)
    with pytest.raises(RuntimeError, match="its own copy"):
        engine.load_weights([], step=1)


@pytest.mark.parametrize("top_k", [0, 1, 5, 33, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_the_filters_are_vllms(top_k, top_p):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)) * 3
    k = torch.full((50,), min(top_k, 33) or 33, dtype=torch.int32)
    p = torch.full((50,), top_p)
    expected = apply_top_k_top_p_pytorch(logits.clone(), k if top_k else None, p if top_p < 1 else None)
    torch.testing.assert_close(keep_top(logits, top_p, top_k), expected, atol=0, rtol=0)
