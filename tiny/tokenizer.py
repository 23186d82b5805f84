"""The tiny world's tokenizer: one token per piece of its texts and per fixed passage of `opsd/prompts.py`, single bytes for anything else.

Between `world.py` and `pretrain.py`. The prompts' English sentences would cost a small model most of its context, so each passage between
two placeholders is one token, taken from the prompt functions themselves. The fallback is byte-level, so any text round-trips.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opsd import prompts
from tiny import world

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
VOCAB_MULTIPLE = 64
MAX_LENGTH = 512

# Qwen3's switch: enable_thinking=false closes an empty block after the header; otherwise the prompt stops after the header.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def fixed_passages() -> list[str]:
    """Every passage that stands between the placeholders of the prompts, whatever their wording."""
    problem, context, analysis = "\x00problem\x00", "\x00context\x00", "\x00analysis\x00"
    turns = [
        prompts.student_messages(problem),
        prompts.evaluation_messages(problem),
        prompts.teacher_messages(problem, context),
        prompts.teacher_messages(problem, context, include_problem=False),
        prompts.reason_first_messages(problem, context, analysis),
        prompts.reason_first_messages(problem, context, analysis, include_problem=False),
    ]
    passages = {}
    for message in (message for messages in turns for message in messages):
        text = message["content"]
        for placeholder in (problem, context, analysis):
            text = text.replace(placeholder, "\x01")
        passages.update(dict.fromkeys(passage for passage in text.split("\x01") if passage))
    return list(passages)


def world_pieces() -> list[str]:
    """Every piece that a problem, a solution or a completion can contain."""
    table = dict.fromkeys(world.CHARMS, 0)
    moves = tuple((charm, index % 2 == 0) for index, charm in enumerate(world.CHARMS))
    problem = world.Problem(0, moves)
    pieces = (
        world.problem_pieces(problem) + world.solution_pieces(problem, table) + world.completion_pieces(problem, table)
    )
    return list(dict.fromkeys([*(str(mark) for mark in range(world.MARKS)), *pieces]))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level vocabulary of 256 without merges, then one added token per piece, passage and role; padded to a multiple of 64."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, IM_START, IM_END)])
    words = [THINK, END_THINK, "user\n", "assistant\n", "\n\n", *world_pieces(), *fixed_passages()]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in dict.fromkeys(words)])
    missing = -tokenizer.get_vocab_size() % VOCAB_MULTIPLE
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{i}|>", special=True, normalized=False) for i in range(missing)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=IM_END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
