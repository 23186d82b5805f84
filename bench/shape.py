"""A Qwen3-1.7B-shaped model with random weights, a word tokenizer and rows of fixed lengths: real speed without real weights.

python -m bench.shape --output_dir /tmp/shape
"""

import argparse
import json
import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from opsd.entry import exit_on_bad_input
from opsd.runinfo import write_jsonl

logger = logging.getLogger(__name__)

EMBEDDING_SCALE = 5.0  # logits with a standard deviation of about 4.5, so that sampling is not uniform
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant "
    "{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<unk>"]


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words `w0`, `w1`, … and the chat markers; any other word is `<unk>`."""
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {f"w{index}": index for index in range(len(SPECIAL), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


def build_shape(folder: Path, *, seed: int, device: str, layers: int = 28) -> Path:
    """Writes the model folder; the same seed gives the same weights on the same device kind."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def write_rows(path: Path, *, rows: int, problem_tokens: int, solution_tokens: tuple[int, int], seed: int) -> Path:
    """Training rows whose problems have `problem_tokens` words and whose solutions have a length drawn from the range."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(len(SPECIAL), 150000, (count,), generator=generator).tolist())

    low, high = solution_tokens
    lengths = torch.randint(low, high + 1, (rows,), generator=generator).tolist()
    records = [
        {"problem": words(problem_tokens), "solution": words(n), "Answer": "1", "generated_token_count": 2000}
        for n in lengths
    ]
    write_jsonl(path, records)
    return path


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    build_shape(arguments.output_dir / "model", seed=arguments.seed, device=device)
    write_rows(
        arguments.output_dir / "train.jsonl",
        rows=400,
        problem_tokens=180,
        solution_tokens=(350, 350),
        seed=arguments.seed,
    )
    logging.basicConfig(level=logging.INFO)
    logger.info("%s: %s", arguments.output_dir, json.dumps({"device": device}))


if __name__ == "__main__":
    exit_on_bad_input(main)
