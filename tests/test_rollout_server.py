"""Rollouts from vLLM servers: the protocol on a fake server (fast), the same on the real vLLM server on CPU (slow)."""

import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from fake_vllm_server import KEY, FakeVLLM
from random_qwen3 import save_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

import opsd.rollout_server
import opsd.server_process
import opsd.vllm_client
from opsd.canary import Canary
from opsd.entry import library_environment
from opsd.model import load_config
from opsd.rollout import EngineDied, SamplingSettings
from opsd.rollout_server import ServerEngine
from opsd.server_process import StartedServer, server_command, start_server
from opsd.teacher_server import TeacherServer

SAMPLING = SamplingSettings(1.1, 0.95, 20, 12)
PROMPTS = [[10 + i, 20, 30, 40 + i] for i in range(6)]
SEEDS = list(range(100, 106))
CANARY = list(range(10, 30))


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / f"adapter-{seed}", folder, seed=seed) for seed in (1, 2, 3, 4, 5, 6, 7)]


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(opsd.vllm_client, "WAITS_S", (0.01, 0.02))
    started = [FakeVLLM(), FakeVLLM()]
    yield started
    for server in started:
        server.stop()


def connect(servers, **options) -> ServerEngine:
    defaults = dict(api_key=KEY, canary_ids=CANARY, eos_ids={2}, max_model_len=64)
    return ServerEngine([server.url for server in servers], **(defaults | options))


def test_adapters_are_served_by_every_server_and_change_the_output(servers, adapters):
    engine = connect(servers)
    base = engine.generate(PROMPTS, SAMPLING, SEEDS)
    engine.sync(adapters[0], step=1)
    first = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert engine.served == "adapter of step 1"
    engine.sync(adapters[1], step=2)
    second = engine.generate(PROMPTS, SAMPLING, SEEDS)
    engine.sync(None, step=3)
    assert engine.generate(PROMPTS, SAMPLING, SEEDS) == base
    for left, right, same in zip(base, first, second, strict=True):
        assert len({left.completion_ids, right.completion_ids, same.completion_ids}) == 3
    assert all(not server.adapters for server in servers)  # what is not served any more is taken off


def test_prompts_are_spread_and_carry_every_setting(servers):
    connect(servers).generate(PROMPTS, SamplingSettings(1.1, 0.95, 20, 12, ignore_eos=True), SEEDS)
    for number, server in enumerate(servers):
        bodies = [body for body in server.asked("/v1/completions") if body["max_tokens"] == 12]
        assert sorted(body["prompt"] for body in bodies) == PROMPTS[number::2]
        for body in bodies:
            assert (body["temperature"], body["top_p"], body["top_k"], body["ignore_eos"]) == (1.1, 0.95, 20, True)
            assert body["stop_token_ids"] == [] and body["repetition_penalty"] == 1.0
            assert body["seed"] == SEEDS[PROMPTS.index(body["prompt"])]
    connect(servers[:1]).generate(PROMPTS, SAMPLING, SEEDS)
    assert servers[0].asked("/v1/completions")[-1]["stop_token_ids"] == [2]


def test_a_busy_server_is_asked_again(servers):
    engine = connect(servers)
    expected = engine.generate(PROMPTS, SAMPLING, SEEDS)
    servers[0].failures = 2
    assert engine.generate(PROMPTS, SAMPLING, SEEDS) == expected


def test_a_server_that_stays_away_is_named(servers, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("starting\nout of memory on GPU 1\n")

    class Gone:
        pid = 1

        def poll(self):
            return -9

    engine = connect(servers, started=[StartedServer(servers[1].url, Gone(), log)])
    servers[1].drop_after = 1
    with pytest.raises(
        EngineDied, match=r"(?s)127.0.0.1.*resume from the last checkpoint.*exit code -9.*out of memory on GPU 1"
    ):
        engine.generate(PROMPTS, SAMPLING, SEEDS)


def test_a_silent_server_is_found_by_its_health(servers, monkeypatch):
    monkeypatch.setattr(opsd.rollout_server, "HEALTH_EVERY_S", 0.05)
    engine = connect(servers)
    servers[0].silent = True
    with pytest.raises(EngineDied, match="does not answer health checks"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)


def test_answers_that_do_not_belong_to_the_question_are_errors(servers, adapters):
    engine = connect(servers)
    servers[0].other_prompt = True
    with pytest.raises(RuntimeError, match="prompt ids differ"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    servers[0].other_prompt = False
    servers[1].finish_reason = "abort"
    with pytest.raises(RuntimeError, match="finish_reason='abort'"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    servers[1].finish_reason = "stop"
    engine.sync(adapters[0], step=1)
    servers[0].adapters.clear()  # somebody else took the adapter off: never the base instead
    with pytest.raises(RuntimeError, match="does not exist"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)


def test_the_canary_finds_a_server_that_ignores_adapters(servers, adapters):
    engine = connect(servers)
    engine.sync(None, step=0)
    servers[1].deaf = True
    with pytest.raises(RuntimeError, match=f"not changed over {Canary.PATIENCE} changed adapters"):
        for step, adapter in enumerate(adapters):
            engine.sync(adapter, step)


def test_two_processes_with_equal_adapters_share_one_name(servers, adapters):
    left, right = connect(servers), connect(servers)
    left.sync(adapters[0], 1)
    right.sync(adapters[0], 1)
    assert len(servers[0].adapters) == 1
    left.sync(adapters[1], 2)
    right.sync(adapters[1], 2)  # the name of step 1 is gone already
    assert len(servers[0].adapters) == 1
    left.close()
    right.close()
    assert not servers[0].adapters


def test_unusable_servers_are_refused_by_name(servers, adapters):
    with pytest.raises(ValueError, match="OPSD_VLLM_API_KEY"):
        connect(servers, api_key="wrong")
    with pytest.raises(ValueError, match="max_model_len=128, and 500 tokens are needed"):
        connect(servers, max_model_len=500)
    servers[1].processed = False
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        connect(servers)
    servers[1].processed = True
    engine = connect(servers)
    servers[0].runtime_lora = False
    with pytest.raises(RuntimeError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        engine.sync(adapters[0], 1)


def test_the_key_is_required_and_not_on_the_command_line(tmp_path):
    options = dict(dtype="float32", max_model_len=128, max_num_seqs=8, max_lora_rank=4)
    with pytest.raises(ValueError, match="OPSD_VLLM_API_KEY"):
        start_server("m", 1, api_key="", log=tmp_path / "log", environment={}, **options)
    command = server_command("m", 1, **options)
    assert not any("key" in word for word in command)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--max-lora-rank") + 1] == "8"
    assert command[command.index("--tensor-parallel-size") + 1] == "1"
    shared = server_command("m", 1, tensor_parallel_size=4, **options)
    assert shared[shared.index("--tensor-parallel-size") + 1] == "4"
    with pytest.raises(ValueError, match="tensor_parallel_size=0 must be >= 1"):
        server_command("m", 1, tensor_parallel_size=0, **options)


def test_the_command_for_users_becomes_the_server(monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda *arguments: became.append(arguments))
    words = "--model m --port 8001 --max_model_len 3072 --max_lora_rank 64 --tensor_parallel_size 2".split()
    with pytest.raises(ValueError, match="OPSD_VLLM_API_KEY is not set"):
        opsd.server_process.main(words)
    monkeypatch.setenv("OPSD_VLLM_API_KEY", "secret")
    opsd.server_process.main(words)
    ((program, command, environment),) = became
    assert program == command[0] and "secret" not in " ".join(command)
    assert environment["VLLM_API_KEY"] == "secret" and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    options = dict(dtype="bfloat16", max_model_len=3072, max_num_seqs=256, max_lora_rank=64, tensor_parallel_size=2)
    assert command == server_command("m", 8001, **options)


def check_teacher_scores(url: str, folder: Path, tokenizer) -> None:
    """The real server as a teacher: the likeliest entries and their log-probabilities are those of transformers."""
    vocab_size = load_config(str(folder)).vocab_size
    teacher = TeacherServer(url, KEY, 5, vocab_size, tokenizer)
    completions = [[10, 11, 12], [9]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, completion, found in zip(PROMPTS, completions, teacher.score(PROMPTS[:2], completions), strict=False):
        with torch.no_grad():
            logps = model(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        torch.testing.assert_close(found.logps, logps.topk(5, dim=-1).values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logps.gather(-1, found.ids), found.logps, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_real_server(folder, adapters, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ) | library_environment(1) | {"HF_HUB_OFFLINE": "1"}
    started = start_server(
        str(folder), port, api_key=KEY, log=tmp_path / "server.log", environment=environment, dtype="float32",
        max_model_len=64, max_num_seqs=8, max_lora_rank=4, enforce_eager=True,
    )  # fmt: skip
    try:
        started.wait_until_ready(300)
        options = dict(canary_ids=CANARY, eos_ids={tokenizer.eos_token_id}, max_model_len=64, started=[started])
        with pytest.raises(ValueError, match="OPSD_VLLM_API_KEY"):
            ServerEngine([started.url], api_key="wrong", **options)
        engine = ServerEngine([started.url], api_key=KEY, **options)
        base = engine.generate(PROMPTS, SAMPLING, SEEDS)
        engine.sync(adapters[0], step=1)
        first = engine.generate(PROMPTS, SAMPLING, SEEDS)
        engine.sync(adapters[0], step=1)  # as a second training process would
        passing = shutil.copytree(adapters[1], tmp_path / "passing")
        engine.sync(passing, step=2)
        shutil.rmtree(passing)  # as the trainer does: the folder is needed while it is loaded, not longer
        second = engine.generate(PROMPTS, SAMPLING, SEEDS)
        engine.sync(adapters[0], step=3)
        assert engine.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1]) == first[::-1]
        engine.sync(None, step=4)
        assert engine.generate(PROMPTS, SAMPLING, SEEDS) == base
        assert len({tuple(r.completion_ids for r in rollouts) for rollouts in (base, first, second)}) == 3
        assert all(len(r.per_token_logps) == len(r.completion_ids) for r in first)
        check_teacher_scores(started.url, folder, tokenizer)

        started.process.kill()
        with pytest.raises(EngineDied, match=rf"{started.url}.*resume from the last checkpoint.*exit code -9"):
            engine.generate(PROMPTS, SAMPLING, SEEDS)
    finally:
        started.stop()
