"""What must hold for any bytes: each target takes bytes, and raises only what its subject is allowed to raise.

Shared by test_fuzz.py (hypothesis, and a seeded mutator in the slow suite) and by atheris_run.py.
"""

import atexit
import json
import random
import re
import shutil
import tempfile
from pathlib import Path

from opsd.batch import Layout, build_inputs
from opsd.grading import extract_answer, grade
from opsd.recipe import Names, read_recipe
from opsd.rows import iter_rows
from opsd.runinfo import read_jsonl

FOLDER = Path(tempfile.mkdtemp(prefix="opsd-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
NAMES = Names(["max_steps", "beta", "output_dir", "lora_target_modules"], ["lora_target_modules"])

SEEDS = {
    "recipe": [
        b"export OPSD_MAX_STEPS=100  # the cap\n",
        b'export OPSD_LORA_TARGET_MODULES="q_proj v_proj"\n# c\n',
        b"export OPSD_OUTPUT_DIR='a b'\n",
        b"export OPSD_BETA=$(id)\n",
    ],
    "grader": [
        rb"so \boxed{42}", rb"<think>\boxed{1}</think>\boxed{\frac{1}{2}}", rb"\boxed{{{", rb"\boxed{1{,}000}", b"<think>", rb"\boxed{}",
        rb"\boxed{\text{12}}", rb"\boxed 7", rb"\fbox{-3}",
    ],
    "rows": [b'{"problem": "1 + 1", "Answer": "2"}\n' * 2, b"[1]\n", b'{"a": 1', b"\xef\xbb\xbf{}\n", b"\0\n", b'"x"\n'],
    "batch": [bytes(range(40)), b"\x05" * 30, b"\0" * 9],
}  # fmt: skip


def recipe(data: bytes) -> None:
    path = FOLDER / "recipe.env"
    path.write_bytes(data)
    try:
        settings = read_recipe(path, NAMES)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
        return
    for name, setting in settings.items():
        assert name in NAMES.fields or name in ("num_processes", "accelerate_config")
        assert setting.values and setting.text.strip() and "\0" not in setting.text


def grader(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    extracted = extract_answer(text)
    assert extracted is None or isinstance(extracted, str)
    if extracted is None:
        assert not grade(text, "42").correct
    elif re.fullmatch(r"[+-]?[0-9]{1,18}", extracted):
        assert grade(text, "42").correct == (int(extracted) == 42)  # digits are compared without math-verify


def rows(data: bytes) -> None:
    path = FOLDER / "rows.jsonl"
    path.write_bytes(data)
    found = list(iter_rows(path))
    assert all((row.values is None) == (row.defect is not None) for row in found)
    assert len(found) <= data.count(b"\n") + 1
    try:
        records = read_jsonl(path)
    except ValueError as error:
        assert "rows.jsonl:" in str(error)
        return
    assert len(records) == data.count(b"\n") and all(isinstance(record, dict) for record in records)
    json.dumps(records)


def batch(data: bytes) -> None:
    """Every completion token is predicted from the token right before it, packed and padded alike."""
    values = list(data) or [1]
    count = values[0] % 4 + 1
    prompts, completions = [], []
    for index in range(count):
        prompts.append([v + 1 for v in values[index :: count + 1]] or [7])
        completions.append([v + 1 for v in values[index + 1 :: count + 2]] or [8])
    expected = [
        sequence[-1] for p, c in zip(prompts, completions, strict=True) for sequence in [p, *([[t] for t in c[:-1]])]
    ]
    for layout in (Layout(True, 0), Layout(False, 0)):
        inputs = build_inputs(prompts, completions, layout)
        ids, positions = inputs.forward["input_ids"].flatten(), inputs.forward["position_ids"].flatten()
        assert ids[inputs.keep].tolist() == expected
        wanted = [len(p) - 1 + t for p, c in zip(prompts, completions, strict=True) for t in range(len(c))]
        assert positions[inputs.keep].tolist() == wanted


TARGETS = {"recipe": recipe, "grader": grader, "rows": rows, "batch": batch}


def mutate(name: str, generator: random.Random) -> bytes:
    """A seed with some bytes changed, removed, repeated or taken from another seed."""
    data = bytearray(generator.choice(SEEDS[name]))
    for _ in range(generator.randrange(1, 6)):
        at, kind = generator.randrange(len(data) + 1), generator.randrange(4)
        if kind == 0:
            data[at:at] = bytes(generator.randrange(256) for _ in range(generator.randrange(1, 4)))
        elif kind == 1:
            del data[at : at + generator.randrange(1, 6)]
        elif kind == 2:
            data[at:at] = data[max(0, at - generator.randrange(1, 9)) : at] * generator.randrange(1, 3)
        else:
            other = generator.choice(SEEDS[name])
            data[at:at] = other[generator.randrange(len(other)) :][: generator.randrange(1, 20)]
    return bytes(data)
