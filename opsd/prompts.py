"""All prompt text and its rendering to token ids: the only place where the words of a prompt stand.

Between `data.py` (rows) and `rollout.py` / `trainer.py` (token ids); evaluation and the baselines call the same
functions. The student (arXiv 2601.18734) sees the problem; the teacher sees the problem and the privileged context;
the evaluation prompt is the student's without the `Problem: ` label, as published. Imports neither torch nor
transformers: a tokenizer is passed in, and used through its call, `apply_chat_template`, `chat_template` and
`name_or_path` only.
"""

import re

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

PROBLEM_LABEL = "Problem: "
REFERENCE_INTRO = "Here is a reference solution to this problem."
REFERENCE_ONLY_INTRO = "Here is a reference solution to a problem that is not shown."
REFERENCE_BEGIN = "[begin reference solution]"
REFERENCE_END = "[end reference solution]"
TRANSITION = (
    "Study the reference solution until you understand why each step holds, then put it aside. Do not copy or restate "
    "it: solve the problem yourself, in your own way, and derive the answer from your own reasoning."
)
ANALYSIS_REQUEST = (
    "Before you solve anything, explain to yourself how the reference solution works: its key idea, and why each step "
    "holds. Write notes only; do not solve the problem yet."
)

TEACHER_PREFIXES = ("none", "open_think", "empty_think")

# A tag with its closing form, as chat templates spell it: <think></think>, [THINK][/THINK], <|think|><|/think|>.
_OPEN_TAG = r"(?P<open>[<\[]\|?(?P<name>[\w-]+)\|?[>\]])"
_CLOSE_TAG = r"(?P<close>[<\[]\|?/(?P=name)\|?[>\]])"
_EMPTY_BLOCK_AT_END = re.compile(_OPEN_TAG + r"\s*" + _CLOSE_TAG + r"\s*\Z")
_OPEN_BLOCK_AT_END = re.compile(
    r"(?P<open>[<\[]\|?(?!end)[\w-]*(?:think|thought|reason)[\w-]*\|?[>\]])\s*\Z", re.IGNORECASE
)


def student_messages(problem: str) -> list[dict]:
    """What the student sees in training: label, problem, instruction; nothing privileged can be passed in."""
    return _user_turn(PROBLEM_LABEL + _text(problem, "problem"), INSTRUCTION)


def evaluation_messages(problem: str, *, problem_prefix: bool = False) -> list[dict]:
    """The evaluation prompt; `problem_prefix=True` makes it equal to the student's training prompt."""
    if problem_prefix:
        return student_messages(problem)
    return _user_turn(_text(problem, "problem"), INSTRUCTION)


def teacher_messages(problem: str, privileged_context: str, *, include_problem: bool = True) -> list[dict]:
    """What the teacher sees; `include_problem=False` is the reference-only teacher, which gets no problem statement."""
    return _user_turn(*_reference(problem, privileged_context, include_problem), TRANSITION, INSTRUCTION)


def analysis_messages(problem: str, privileged_context: str, *, include_problem: bool = True) -> list[dict]:
    """`reason_first`, turn one: the teacher is asked for its own analysis of the solution."""
    return _user_turn(*_reference(problem, privileged_context, include_problem), ANALYSIS_REQUEST)


def reason_first_messages(
    problem: str, privileged_context: str, analysis: str, *, include_problem: bool = True
) -> list[dict]:
    """`reason_first`, the scoring prompt: turn one, the teacher's `analysis` as its turn, then transition and task."""
    return [
        *analysis_messages(problem, privileged_context, include_problem=include_problem),
        {"role": "assistant", "content": _text(analysis, "analysis")},
        *_user_turn(TRANSITION, INSTRUCTION),
    ]


def render_text(tokenizer, messages: list[dict], *, enable_thinking: bool, prefix: str = "") -> str:
    """The prompt as the model sees it, generation prompt included: for logs; the engine gets `render_ids`."""
    return _apply_template(tokenizer, messages, enable_thinking=enable_thinking) + prefix


def render_ids(tokenizer, messages: list[dict], *, enable_thinking: bool, prefix: str = "") -> list[int]:
    """Token ids of the prompt, ending where the completion starts.

    `prefix` is text that the role has "already written" (see `teacher_prefix_text`); it becomes part of the prompt.
    """
    return render_ids_batch(tokenizer, [messages], enable_thinking=enable_thinking, prefix=prefix)[0]


def render_ids_batch(
    tokenizer, conversations: list[list[dict]], *, enable_thinking: bool, prefix: str = ""
) -> list[list[int]]:
    """`render_ids` of several prompts in one call, which a fast tokenizer spreads over the cores."""
    texts = [render_text(tokenizer, turns, enable_thinking=enable_thinking, prefix=prefix) for turns in conversations]
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def check_thinking_switch(tokenizer, student_thinking: bool, teacher_thinking: bool) -> None:
    """Refuse thinking modes that the tokenizer's chat template cannot render.

    Three kinds of template exist: with the `enable_thinking` switch (Qwen3), without it and never thinking (SmolLM2),
    and without it and always opening the thinking block (R1-distill). Only the first can give the roles two modes.
    """
    probe = student_messages("1 + 1")
    on = render_text(tokenizer, probe, enable_thinking=True)
    off = render_text(tokenizer, probe, enable_thinking=False)
    modes = f"student_thinking={_flag(student_thinking)}, teacher_thinking={_flag(teacher_thinking)}"
    where = f"chat template of {_name(tokenizer)}"
    if (not student_thinking or not teacher_thinking) and _OPEN_BLOCK_AT_END.search(off):
        raise ValueError(
            f"{modes}: the {where} opens a thinking block by itself even with enable_thinking=false; "
            "ask for thinking in both roles, or use a template that closes the block"
        )
    if on != off:
        return
    if student_thinking != teacher_thinking:
        raise ValueError(
            f"{modes}: the {where} ignores enable_thinking, so both roles would get the same mode; "
            "give both roles the same value, or use a tokenizer whose template has the switch"
        )
    if student_thinking and not _OPEN_BLOCK_AT_END.search(on):
        raise ValueError(
            f"{modes}: the {where} ignores enable_thinking and never opens a thinking block; set both to false"
        )


def find_think_tags(tokenizer) -> tuple[str, str] | None:
    """(opening, closing) tag as the template itself writes them in its empty block; None if it writes no such block."""
    off = render_text(tokenizer, student_messages("1 + 1"), enable_thinking=False)
    block = _EMPTY_BLOCK_AT_END.search(off)
    return (block["open"], block["close"]) if block else None


def teacher_prefix_text(
    tokenizer, teacher_prefix: str, *, teacher_thinking: bool, think_tags: tuple[str, str] | None = None
) -> str:
    """Text appended to the teacher's prompt so that both roles start their completion at the same kind of token.

    `none` appends nothing; `open_think` opens the thinking block; `empty_think` appends a closed, empty one.
    `think_tags` overrides the tags found in the template.
    """
    if teacher_prefix not in TEACHER_PREFIXES:
        raise ValueError(f"teacher_prefix={teacher_prefix!r} must be one of {', '.join(TEACHER_PREFIXES)}")
    if teacher_prefix == "none":
        return ""
    tags = think_tags or find_think_tags(tokenizer)
    if tags is None:
        raise ValueError(
            f"teacher_prefix={teacher_prefix}: the chat template of {_name(tokenizer)} writes no empty thinking block "
            "to take the tags from; give think_tags, or use teacher_prefix=none"
        )
    prompt = render_text(tokenizer, student_messages("1 + 1"), enable_thinking=teacher_thinking).rstrip()
    if prompt.endswith(tags):
        raise ValueError(
            f"teacher_prefix={teacher_prefix}, teacher_thinking={_flag(teacher_thinking)}: the chat template of "
            f"{_name(tokenizer)} already ends in a thinking block; use teacher_prefix=none"
        )
    opening, closing = tags
    return f"{opening}\n" if teacher_prefix == "open_think" else f"{opening}\n\n{closing}\n\n"


def _reference(problem: str, privileged_context: str, include_problem: bool) -> tuple[str, ...]:
    context = _text(privileged_context, "privileged_context")
    block = f"{REFERENCE_BEGIN}\n{context}\n{REFERENCE_END}"
    if include_problem:
        return PROBLEM_LABEL + _text(problem, "problem"), f"{REFERENCE_INTRO}\n{block}"
    return (f"{REFERENCE_ONLY_INTRO}\n{block}",)


def _user_turn(*paragraphs: str) -> list[dict]:
    return [{"role": "user", "content": "\n\n".join(paragraphs)}]


def _text(value: str, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field}={value!r} must be text that is not empty; drop the row or name another column")
    return value


def _apply_template(tokenizer, messages: list[dict], *, enable_thinking: bool) -> str:
    from jinja2.exceptions import TemplateError  # comes with transformers, which made the tokenizer

    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {_name(tokenizer)} has no chat template; use an instruction-tuned model, "
            "or save a template with the tokenizer"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
        )
    except TemplateError as error:
        raise ValueError(
            f"the chat template of {_name(tokenizer)} refused the prompt: {error}; correct the template, or use another tokenizer"
        ) from error


def _name(tokenizer) -> str:
    return repr(tokenizer.name_or_path)


def _flag(value: bool) -> str:
    return "true" if value else "false"
