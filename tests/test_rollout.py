"""vLLM in this process, for real, on CPU: what it serves is what it was given, and its log-probabilities are the model's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from random_qwen3 import TARGETS, save_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from opsd.adapter import plain_names
from opsd.canary import Canary
from opsd.rollout import Rollout, SamplingSettings, VLLMEngine, in_order, vllm_lora_rank
from opsd.rollout_transformers import keep_top

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = SamplingSettings(1.1, 0.95, 20, 12)
PROMPTS = [[10 + i, 20, 30, 40 + i] for i in range(5)]
SEEDS = [7, 8, 9, 10, 11]
CANARY = list(range(10, 40))


@pytest.fixture(scope="module")
def eos_id(folder):
    return AutoTokenizer.from_pretrained(folder).eos_token_id


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / f"adapter-{seed}", folder, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def loaded(folder, eos_id):
    engine = VLLMEngine(
        str(folder), canary_ids=CANARY, eos_ids={eos_id}, max_model_len=64, dtype="float32", max_num_seqs=8,
        gpu_memory_utilization=0.1, max_lora_rank=4, lora_targets=TARGETS, enforce_eager=True,
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded):
    loaded.sync(None, step=0)
    loaded._canary = Canary()
    return loaded


@pytest.fixture(scope="module")
def reference(folder, adapters):
    """Log-probability of every sampled token under transformers, for the base (None) or an adapter."""
    models = {None: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()}
    for adapter in adapters:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        models[adapter] = PeftModel.from_pretrained(base, str(adapter)).eval()

    @torch.no_grad()
    def logps(rollout: Rollout, adapter, sampling=SAMPLING) -> torch.Tensor:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logits = models[adapter](ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / sampling.temperature
        processed = keep_top(logits, sampling.top_p, sampling.top_k).log_softmax(-1)
        return processed.gather(-1, torch.tensor(rollout.completion_ids)[:, None]).squeeze(-1)

    return logps


def completions(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.completion_ids for rollout in rollouts]


def test_log_probabilities_are_those_of_transformers(engine, adapters, reference):
    for adapter in (None, *adapters):
        engine.sync(adapter, step=1)
        for rollout in engine.generate(PROMPTS, SAMPLING, SEEDS):
            torch.testing.assert_close(
                torch.tensor(rollout.per_token_logps), reference(rollout, adapter), atol=2e-5, rtol=0
            )


def test_only_the_targeted_layers_pay_for_an_adapter(engine):
    kinds = {kind for kinds in engine._llm.apply_model(kinds_of_modules) for kind in kinds}
    adapted = {kind for kind in kinds if kind.endswith("WithLoRA")}
    assert adapted == {
        "MergedQKVParallelLinearWithLoRA",
        "MergedColumnParallelLinearWithLoRA",
        "RowParallelLinearWithLoRA",
    }


def kinds_of_modules(model) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


def test_targets_that_are_not_plain_names_are_left_to_vllm():
    assert plain_names(["q_proj", "o_proj"]) == ["o_proj", "q_proj"] and plain_names("q_proj") == ["q_proj"]
    assert plain_names("all-linear") is None and plain_names(["q_proj", "layers.0.mlp.up_proj"]) is None


def test_log_probabilities_tell_adapters_apart(engine, adapters, reference):
    engine.sync(adapters[0], step=1)
    rollouts = engine.generate(PROMPTS, SamplingSettings(1.0, 1.0, 0, 12), SEEDS)
    plain = SamplingSettings(1.0, 1.0, 0, 12)
    for other in (None, adapters[1]):
        gaps = [(torch.tensor(r.per_token_logps) - reference(r, other, plain)).abs().mean() for r in rollouts]
        assert min(gaps) > 0.1


def test_switching_between_adapters_and_the_base_is_exact(engine, adapters):
    first, second = adapters
    outputs = {}
    for served in (None, first, second, first, None, second, None):
        engine.sync(served, step=1)
        got = engine.generate(PROMPTS, SAMPLING, SEEDS)
        assert outputs.setdefault(served, got) == got
        assert engine.served == ("base model" if served is None else "adapter of step 1")
    assert len({tuple(completions(rollouts)) for rollouts in outputs.values()}) == 3


def test_seeds_reproduce_in_any_order_and_batch(engine, adapters):
    engine.sync(adapters[0], step=1)
    together = engine.generate(PROMPTS, SAMPLING, SEEDS)
    backwards = engine.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1])
    alone = [engine.generate([ids], SAMPLING, [seed])[0] for ids, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert completions(together) == completions(backwards[::-1]) == completions(alone)
    others = engine.generate(PROMPTS, SAMPLING, [seed + 100 for seed in SEEDS])
    assert completions(others) != completions(together)
    same_prompt = engine.generate([PROMPTS[0]] * 3, SAMPLING, [1, 2, 3])
    assert len(set(completions(same_prompt))) == 3


def test_requests_stream_as_they_finish(engine):
    lengths = [SamplingSettings(1.0, 1.0, 0, count, ignore_eos=True) for count in (12, 2, 6)]
    for index, sampling in enumerate(lengths):
        engine.submit(index, PROMPTS[index], sampling, seed=index)
    assert engine.pending == 3
    order = []
    while engine.pending:
        order += [key for key, _ in engine.poll()]
    assert order == [1, 2, 0]


def test_end_tokens_end_a_completion_and_are_kept(engine, eos_id):
    sampling = SamplingSettings(1.5, 1.0, 0, 40)
    rollouts = engine.generate([PROMPTS[0]] * 40, sampling, list(range(40)))
    stopped = [r for r in rollouts if r.finish_reason == "stop"]
    assert stopped and len(stopped) < 40
    for rollout in rollouts:
        assert rollout.truncated == (rollout.finish_reason == "length")
        assert (rollout.completion_ids[-1] == eos_id) == (not rollout.truncated)
        assert eos_id not in rollout.completion_ids[:-1]
        assert len(rollout.per_token_logps) == len(rollout.completion_ids)
    ignored = engine.generate([PROMPTS[0]] * 40, SamplingSettings(1.5, 1.0, 0, 40, ignore_eos=True), list(range(40)))
    assert {len(r.completion_ids) for r in ignored} == {40}
    assert any(eos_id in r.completion_ids for r in ignored)


def test_greedy_decoding(engine, reference):
    sampling = SamplingSettings(0.0, 1.0, 0, 8)
    once = engine.generate(PROMPTS, sampling, SEEDS)
    assert completions(once) == completions(engine.generate(PROMPTS, sampling, [0] * 5))


def test_the_canary_raises_when_old_weights_are_served(engine, adapters, tmp_path, monkeypatch):
    """The engine's LoRA requests all point at the first adapter, as if loading the next had silently failed."""
    import vllm.lora.request

    real = vllm.lora.request.LoRARequest
    monkeypatch.setattr(
        vllm.lora.request, "LoRARequest", lambda name, number, path: real(name, number, str(adapters[0]))
    )
    changed = []
    for number in range(Canary.PATIENCE + 1):
        target = tmp_path / str(number)
        target.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (target / name).write_bytes((adapters[0] / name).read_bytes())
        data = bytearray((target / "adapter_model.safetensors").read_bytes())
        data[-4] ^= number  # another adapter by its bytes
        (target / "adapter_model.safetensors").write_bytes(bytes(data))
        changed.append(target)
    with pytest.raises(
        RuntimeError, match=f"not changed over {Canary.PATIENCE} changed adapters.*step {Canary.PATIENCE}"
    ):
        for step, adapter in enumerate(changed):
            engine.sync(adapter, step)


def test_the_canary_accepts_what_did_not_change_and_what_did(engine, adapters):
    for step in range(2 * Canary.PATIENCE):
        engine.sync(adapters[0], step)  # equal weights may give equal output
    for step in range(2 * Canary.PATIENCE):
        engine.sync(adapters[step % 2], step)
    assert len(engine.canary_logps) == len(CANARY) - 1


def test_an_answer_to_another_prompt_is_an_error(engine, monkeypatch):
    real = engine._to_rollout
    monkeypatch.setattr(engine, "_to_rollout", lambda prompt_ids, output: real(prompt_ids[::-1], output))
    with pytest.raises(RuntimeError, match="prompt ids differ"):
        engine.generate(PROMPTS[:1], SAMPLING, SEEDS[:1])


def test_broken_adapters_never_reach_the_engine(engine, adapters, tmp_path):
    engine.sync(adapters[0], step=1)
    before = completions(engine.generate(PROMPTS, SAMPLING, SEEDS))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_bytes((adapters[1] / "adapter_config.json").read_bytes())
    (broken / "adapter_model.safetensors").write_bytes((adapters[1] / "adapter_model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        engine.sync(broken, step=2)
    assert engine.served == "adapter of step 1"
    assert completions(engine.generate(PROMPTS, SAMPLING, SEEDS)) == before


def test_an_adapter_of_higher_rank_is_refused_by_name(engine, folder, tmp_path):
    adapter = save_adapter(tmp_path / "rank16", folder, rank=16)
    with pytest.raises(ValueError, match="rank 16 is greater than max_lora_rank 8"):
        engine.sync(adapter, step=1)


def test_ranks_are_rounded_up_to_what_vllm_reserves():
    assert [vllm_lora_rank(r) for r in (1, 8, 9, 64, 300)] == [8, 8, 16, 64, 320]
    with pytest.raises(ValueError, match="lora_r=513 must be at most 512"):
        vllm_lora_rank(513)


def test_streams_are_collected_whole():
    rollouts = [Rollout((1,), (2,), (0.0,), "stop"), Rollout((3,), (4,), (0.0,), "stop")]
    assert in_order(iter([(1, rollouts[1]), (0, rollouts[0])]), 2) == rollouts
    with pytest.raises(RuntimeError, match="answered twice"):
        in_order(iter([(0, rollouts[0]), (0, rollouts[0])]), 2)
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        in_order(iter([(0, rollouts[0])]), 2)


TWO = """
import json, os, sys
from opsd.entry import library_environment
for key, value in library_environment(1).items():
    os.environ.setdefault(key, value)
import torch
import torch.distributed as dist
from opsd.rollout import SamplingSettings, VLLMEngine
dist.init_process_group("gloo")
rank = dist.get_rank()
model, *adapters = sys.argv[1:]
engine = VLLMEngine(
    model, canary_ids=list(range(10, 30)), eos_ids={2}, max_model_len=64, dtype="float32", max_num_seqs=8,
    gpu_memory_utilization=0.1, max_lora_rank=4, enforce_eager=True,
)
outputs = []
for step, adapter in enumerate(adapters):
    engine.sync(adapter, step)
    count = 2 + 3 * rank  # different work on every process
    rollouts = engine.generate([[10, 20, 30]] * count, SamplingSettings(1.1, 0.95, 20, 8), list(range(count)))
    outputs.append([r.completion_ids for r in rollouts][:2])
    total = torch.tensor(1.0)
    dist.all_reduce(total)  # the trainer's own collectives go on beside the engines
    outputs.append(total.item())
engine.close()
print("RESULT", json.dumps(outputs))
"""


@pytest.mark.slow
def test_one_engine_in_each_of_two_training_processes(folder, adapters, engine, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    run = subprocess.run(
        [*command, str(folder), *map(str, adapters)],
        capture_output=True, text=True, timeout=600, env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    results = [json.loads(line.split("RESULT ")[1]) for line in run.stdout.splitlines() if "RESULT " in line]
    assert run.returncode == 0 and len(results) == 2, run.stderr[-3000:]
    assert results[0] == results[1]
    alone = []
    for step, adapter in enumerate(adapters):
        engine.sync(adapter, step)
        rollouts = engine.generate([[10, 20, 30]] * 2, SamplingSettings(1.1, 0.95, 20, 8), [0, 1])
        alone += [[list(r.completion_ids) for r in rollouts], 2.0]
    assert results[0] == alone
