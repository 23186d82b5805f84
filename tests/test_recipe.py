"""The recipe parser: what it reads, what it refuses, and that it agrees with a shell without being one."""

import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.recipe import (
    Names,
    Setting,
    check_caps,
    derive_batch,
    read_base_recipe,
    read_caps,
    read_environment,
    read_flags,
    read_recipe,
)

ROOT = Path(__file__).resolve().parent.parent
NAMES = Names(
    ["learning_rate", "max_steps", "rollouts_per_step", "micro_batch_size", "lora_target_modules", "answer_pattern"],
    ["lora_target_modules"],
)


def recipe(tmp_path: Path, text: str, name: str = "some.env") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def parse(tmp_path: Path, text: str) -> dict[str, str]:
    return {name: setting.text for name, setting in read_recipe(recipe(tmp_path, text), NAMES).items()}


def test_comments_blank_lines_and_reasons(tmp_path):
    text = "# header with $(anything) and `ticks`\n\n   \nexport OPSD_LEARNING_RATE=1e-5  # half of 2e-5; quotes ' are fine\n"
    settings_read = read_recipe(recipe(tmp_path, text), NAMES)
    assert settings_read["learning_rate"].values == ("1e-5",)
    assert settings_read["learning_rate"].source == "some.env"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", "1e-5"),
        ("a/b_c.d:e,f+g@h%i^j=k", "a/b_c.d:e,f+g@h%i^j=k"),
        ("'-?\\d{1,6}'", "-?\\d{1,6}"),
        ("'$HOME `id` $(id) ; rm \"x\"'", '$HOME `id` $(id) ; rm "x"'),
        ('"two words"', "two words"),
        ('"it\'s # not a comment"', "it's # not a comment"),
        ("'# neither'  # but this is", "# neither"),
        ("x\t# after a tab", "x"),
        ("a=b", "a=b"),
    ],
)
def test_accepted_values_mean_the_same_in_bash(tmp_path, written, value):
    line = f"export OPSD_ANSWER_PATTERN={written}\n"
    assert parse(tmp_path, line) == {"answer_pattern": value}
    sourced = subprocess.run(
        ["bash", "-c", f'source {tmp_path}/some.env; printf %s "$OPSD_ANSWER_PATTERN"'], capture_output=True, text=True
    )
    assert sourced.stdout == value and sourced.stderr == ""


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_characters="'\0\n", exclude_categories=["Cs"]), min_size=1))
def test_any_single_quoted_text_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("recipe") / "q.env"
    path.write_text(f"export OPSD_ANSWER_PATTERN='{value}'  # reason\n", encoding="utf-8")
    if value.strip():
        assert read_recipe(path, NAMES)["answer_pattern"].values == (value,)
    else:
        with pytest.raises(ValueError, match="is empty"):
            read_recipe(path, NAMES)


@settings(max_examples=300, deadline=None)
@given(st.text(string.printable, max_size=60))
def test_any_other_text_is_read_or_refused_in_one_line(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("recipe") / "f.env"
    path.write_bytes(f"export OPSD_ANSWER_PATTERN={value}\n".encode())
    try:
        settings_read = read_recipe(path, NAMES)
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
    else:
        assert set(settings_read) <= {"answer_pattern"}


@pytest.mark.parametrize(
    "value",
    ["$(touch PWNED)", "`touch PWNED`", "$HOME", '"$HOME"', '"`id`"', "a;b", "a b", "a&b", "a|b", "a>b", "(a)", "~", "{a,b}",
     "*", "?", "'open", '"open', "a'b'", "'a''b'", '"a\\"b"', "a\\ b", "!x", "#x", "x#y", "<(id)", "x\r"],
)  # fmt: skip
def test_shell_syntax_is_refused_and_not_run(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"some\.env:2: "):
        parse(tmp_path, f"# first\nexport OPSD_ANSWER_PATTERN={value}\n")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("export OPSD_LEARNING_RAT=1\n", "OPSD_LEARNING_RAT is unknown; the nearest known name is OPSD_LEARNING_RATE"),
        ("export OPSD_MAX_STEPS=1\nexport OPSD_MAX_STEPS=2\n", r":2: OPSD_MAX_STEPS is set twice, first on line 1"),
        ("export OPSD_MAX_STEPS=\n", "OPSD_MAX_STEPS is empty"),
        ("export OPSD_MAX_STEPS=''\n", "OPSD_MAX_STEPS is empty"),
        ("export OPSD_MAX_STEPS=  # reason\n", "OPSD_MAX_STEPS is empty"),
        ("export OPSD_max_steps=1\n", "must be written OPSD_MAX_STEPS"),
        ("export MAX_STEPS=1\n", "must be written OPSD_MAX_STEPS"),
        ("OPSD_MAX_STEPS=1\n", "is not `export OPSD_NAME=value"),
        ("export OPSD_MAX_STEPS 1\n", "is not `export OPSD_NAME=value"),
        ("  export OPSD_MAX_STEPS=1\n", "is not `export OPSD_NAME=value"),
        ("source other.env\n", "is not `export OPSD_NAME=value"),
        ("export OPSD_DRY_RUN=1\n", "is read from the environment only; export OPSD_DRY_RUN instead"),
        ("export OPSD_PYTHON=python3\n", "is read from the environment only"),
        ("export OPSD_PER_DEVICE_TRAIN_BATCH_SIZE=4\n", "is derived .* OPSD_MICRO_BATCH_SIZE"),
        ("export OPSD_GRADIENT_ACCUMULATION_STEPS=4\n", "is derived"),
        ("\ufeffexport OPSD_MAX_STEPS=1\n", "is not `export OPSD_NAME=value"),
    ],
)
def test_refused_lines(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_recipe_that_is_no_text_or_no_file(tmp_path):
    path = tmp_path / "binary.env"
    path.write_bytes(b"export OPSD_MAX_STEPS=\xff\n")
    with pytest.raises(ValueError, match="byte 22 is not UTF-8"):
        read_recipe(path, NAMES)
    with pytest.raises(FileNotFoundError, match="recipe=.*nowhere.env is not a file"):
        read_recipe(tmp_path / "nowhere.env", NAMES)
    with pytest.raises(FileNotFoundError):
        read_recipe(tmp_path, NAMES)


def test_environment():
    environ = {
        "OPSD_MAX_STEPS": "5",
        "OPSD_DRY_RUN": "1",
        "HOME": "/root",
        "OPSD_LORA_TARGET_MODULES": "q_proj  k_proj",
    }
    found = read_environment(environ, NAMES)
    assert {name: setting.values for name, setting in found.items()} == {
        "max_steps": ("5",), "dry_run": ("1",), "lora_target_modules": ("q_proj", "k_proj"),
    }  # fmt: skip
    assert {setting.source for setting in found.values()} == {"environment"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OPSD_MAXSTEPS": "5"}, "environment: OPSD_MAXSTEPS is unknown; the nearest known name is OPSD_MAX_STEPS"),
        ({"OPSD_MAX_STEPS": " "}, "environment: OPSD_MAX_STEPS is empty"),
        ({"OPSD_max_steps": "5"}, "must be written OPSD_MAX_STEPS"),
        ({"OPSD_GRADIENT_ACCUMULATION_STEPS": "2"}, "is derived"),
        ({"OPSD_": "2"}, "OPSD_ is unknown"),
    ],
)
def test_refused_environment(environ, message):
    with pytest.raises(ValueError, match=message):
        read_environment(environ, NAMES)


def test_flags():
    argv = "--max-steps 5 --learning_rate=1e-5 --lora_target_modules q k --answer_pattern=-?x --micro_batch_size -1".split()
    found = read_flags(argv, NAMES)
    assert {name: setting.values for name, setting in found.items()} == {
        "max_steps": ("5",), "learning_rate": ("1e-5",), "lora_target_modules": ("q", "k"), "answer_pattern": ("-?x",),
        "micro_batch_size": ("-1",),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_stepz", "5"], "flags: --max_stepz is unknown; the nearest known name is --max_steps"),
        (["--max_step", "5"], "is unknown"),
        (["--max_steps", "5", "--max-steps=6"], "given twice"),
        (["--max_steps"], "empty value"),
        (["--max_steps="], "empty value"),
        (["--max_steps", ""], "empty value"),
        (["--max_steps", "5", "6"], "takes one value, 2 are given"),
        (["max_steps", "5"], "stands alone"),
        (["--", "5"], "stands alone"),
        (["--config", "x.yaml"], "--config is unknown"),
        (["--per-device-train-batch-size", "8"], "is derived"),
        (["--cache", "/x"], "export OPSD_CACHE instead"),
    ],
)
def test_refused_flags(argv, message):
    with pytest.raises(ValueError, match=message):
        read_flags(argv, NAMES)


def test_caps_stand_in_the_launcher_once(tmp_path):
    assert read_caps(ROOT / "train_capped.sh") == (100, 32)
    script = tmp_path / "train.sh"
    script.write_text("readonly STEP_CAP=7\nROLLOUT_CAP=8  # eight\n")
    assert read_caps(script) == (7, 8)
    for text, message in (
        ("STEP_CAP=7\n", "must set STEP_CAP and ROLLOUT_CAP"),
        ("STEP_CAP=7\nSTEP_CAP=8\n", "set twice"),
    ):
        script.write_text(text)
        with pytest.raises(RuntimeError, match=message):
            read_caps(script)


def test_check_caps():
    check_caps(100, 32, 100, 32)
    check_caps(1, 1, 100, 32)
    for steps, rollouts, message in (
        (101, 32, "max_steps=101 must be 1 to 100"),
        (0, 32, "max_steps=0"),
        (-1, 32, "max_steps=-1"),
        (100, 33, "rollouts_per_step=33 must be 1 to 32"),
        (100, 0, "rollouts_per_step=0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_caps(steps, rollouts, 100, 32)


@pytest.mark.parametrize(
    ("rollouts", "world", "micro", "expected"),
    [(32, 1, 4, (4, 8)), (32, 2, 4, (4, 4)), (32, 4, 4, (4, 2)), (32, 8, 4, (4, 1)), (32, 16, 4, (2, 1)), (32, 32, 4, (1, 1)),
     (32, 1, 32, (32, 1)), (32, 1, 5, (4, 8)), (12, 2, 4, (3, 2)), (7, 1, 4, (1, 7)), (8, 4, 100, (2, 1))],
)  # fmt: skip
def test_derived_batch(rollouts, world, micro, expected):
    batch, accumulation = derive_batch(rollouts, world, micro)
    assert (batch, accumulation) == expected and world * batch * accumulation == rollouts


@pytest.mark.parametrize(
    ("rollouts", "world", "nearest"),
    [(32, 3, "2 or 4"), (32, 5, "4 or 8"), (32, 64, "use 32 processes"), (8, 6, "4 or 8"), (7, 2, "1 or 7")],
)
def test_world_sizes_that_do_not_divide(rollouts, world, nearest):
    with pytest.raises(ValueError, match=rf"world_size={world} .*{nearest}"):
        derive_batch(rollouts, world, 4)


def test_micro_batch_must_be_positive():
    with pytest.raises(ValueError, match="micro_batch_size=0 must be > 0"):
        derive_batch(32, 1, 0)


def test_a_base_recipe_is_one_level_and_may_be_put_back_to_defaults(tmp_path):
    names = Names(NAMES.fields, NAMES.list_fields)
    recipe(tmp_path, "export OPSD_LEARNING_RATE=1e-5\nexport OPSD_ANSWER_PATTERN=x\n", "base.env")
    path = recipe(
        tmp_path, "export OPSD_BASE_RECIPE=base.env  # r\nexport OPSD_ANSWER_PATTERN=''  # all\n", "difference.env"
    )
    difference = read_recipe(path, names)
    assert difference["answer_pattern"].values == ()
    base = read_base_recipe(difference, tmp_path, names)
    assert base["learning_rate"] == Setting(("1e-5",), "base.env")
    assert read_base_recipe({}, tmp_path, names) == {}
    recipe(tmp_path, "export OPSD_BASE_RECIPE=difference.env\n", "second.env")
    with pytest.raises(
        ValueError, match="OPSD_BASE_RECIPE in a base recipe is refused; name base.env as the base directly"
    ):
        read_base_recipe(read_recipe(tmp_path / "second.env", names), tmp_path, names)
    with pytest.raises(FileNotFoundError, match="base_recipe=gone.env from flag is not a file"):
        read_base_recipe({"base_recipe": Setting(("gone.env",), "flag")}, tmp_path, names)
    with pytest.raises(ValueError, match="OPSD_BASE_RECIPE is empty"):
        read_recipe(recipe(tmp_path, "export OPSD_BASE_RECIPE=''\n"), names)
