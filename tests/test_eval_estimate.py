"""The estimate against a measured run, and the shapes that adapters are held to."""

import pytest
from transformers import Qwen3Config

from opsd.eval_estimate import describe, estimate, gpu_memory_bytes, known_bandwidth, kv_bytes_per_token, linear_shapes

H200 = "NVIDIA H200, 143771 MiB"
QWEN3_1_7B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


def cost(new_tokens: int = 4096, **changes):
    settings = {
        "parameters": 1_720_000_000,
        "dtype_bytes": 2,
        "kv_bytes": 114_688,
        "sequences": 360,
        "prompt_tokens": 200,
        "max_num_seqs": 512,
        "engines": 1,
        "gpus_per_engine": 1,
        "gpu_bytes": gpu_memory_bytes(H200),
        "memory_utilization": 0.92,
        "bandwidth": known_bandwidth(H200),
    }
    return estimate(new_tokens=new_tokens, **(settings | changes))


def test_the_measured_run_is_met():
    assert kv_bytes_per_token(QWEN3_1_7B, 2) == 114_688 and kv_bytes_per_token(QWEN3_1_7B, 1) == 57_344
    assert cost().seconds == pytest.approx(108.1, rel=0.05)  # 360 sequences to 4,096 tokens on one H200
    assert cost().concurrency == 360


def test_what_costs_more_and_what_less():
    assert cost(8192).seconds > 3.5 * cost().seconds
    assert cost(engines=4).seconds < cost().seconds / 3
    assert cost(kv_bytes=57_344).seconds < 0.6 * cost().seconds
    assert cost(38_912).concurrency < 100
    assert cost(gpu_bytes=None, bandwidth=None).seconds is None


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="one sequence of 39112 tokens needs 4.2 GiB of KV cache, and .* raise tensor"):
        cost(38_912, gpu_bytes=8 * 2**30)


def test_gpus_are_told_apart():
    assert known_bandwidth("NVIDIA H200, 1 MiB") == 4.8e12 and known_bandwidth("NVIDIA H20, 1 MiB") == 4.0e12
    assert known_bandwidth("NVIDIA L40S, 1 MiB") == 0.864e12 and known_bandwidth("NVIDIA L4, 1 MiB") == 0.3e12
    assert known_bandwidth("NVIDIA GeForce GT 710, 1 MiB") is None


def test_shapes_without_memory():
    shapes, parameters = linear_shapes(QWEN3_1_7B)
    assert shapes["model.layers.27.mlp.down_proj"] == (2048, 6144)
    assert shapes["model.layers.0.self_attn.k_proj"] == (1024, 2048)
    assert 1.70e9 < parameters < 1.75e9


def test_the_text_names_engine_memory_and_time():
    text = describe({"to the limit": cost()}, 1, H200)
    assert "360 completions on 1 engine (NVIDIA H200" in text and "112.0 KiB a token" in text and "about 2 min" in text
    assert "time unknown" in describe({"x": cost(gpu_bytes=None, bandwidth=None)}, 1, None)
