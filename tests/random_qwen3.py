"""A random Qwen3 model of a few thousand parameters with a word tokenizer and a chat template, saved as a normal folder, for tests."""

import string
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token per printable character plus the boxes of small numbers, so that a random model sometimes answers."""
    boxes = [f"\\boxed{{{n}}}" for n in range(4)]
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocabulary = {token: i for i, token in enumerate(SPECIAL + boxes + characters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    tokenizer.add_tokens(["<think>", "</think>", *boxes])
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = False,
) -> Path:
    """Writes model and tokenizer to `folder`. The end token and the boxes are likely enough to be seen within 24 tokens."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, model_folder: Path, *, seed: int = 1, rank: int = 4, scale: float = 0.3) -> Path:
    """Writes a LoRA adapter with non-zero B matrices, large enough to change what the model samples."""
    torch.manual_seed(seed)
    base = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=scale)
    model.save_pretrained(folder)
    return folder
