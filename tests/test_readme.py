"""The README's tables are those of the committed JSON files, and its commands name files that exist."""

import re
from pathlib import Path

from bench import scaling
from bench.readme_tables import blocks, fill

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_generated_from_the_committed_results():
    assert fill(README, blocks(ROOT / "results")) == README


def test_the_memory_table_of_the_scaling_page_is_generated():
    text = scaling.DOCUMENT.read_text(encoding="utf-8")
    assert fill(text, {"layouts": scaling.table()}) == text


def test_an_edited_number_is_noticed():
    generated = blocks(ROOT / "results")
    edited = README.replace(
        generated["rollout"], generated["rollout"].replace("adapter, seeds | ", "adapter, seeds | 0")
    )
    assert edited != README
    assert fill(edited, generated) == README


def test_every_file_the_readme_names_exists():
    named = set(
        re.findall(r"(?:`|\s|\()((?:recipes|results|docs|opsd|callbacks|slurm|baselines|bench)/[\w./*-]+\.\w+)", README)
    )
    assert len(named) > 10
    missing = [name for name in sorted(named) if "*" not in name and not (ROOT / name).exists()]
    assert not missing
