"""The structure that STYLE.md promises: who imports whom, where the environment is read, file sizes, and that no argument is idle."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

import opsd
from opsd.args import (
    DataArgs,
    EvalRegime,
    HandoffArgs,
    OPSDConfig,
    own_fields,
    own_training_fields,
    training_fields,
    training_parser,
)

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "opsd").glob("*.py"))
SCRIPTS = sorted(ROOT.glob("*.py"))
FOLDERS = ("callbacks", "tiny", "baselines", "bench")
SOURCES = [*SCRIPTS, *LIBRARY, *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
LIGHT = ("prompts", "grading", "evaluation", "recipe")  # import without torch, vLLM or transformers
# STYLE.md section 2, from the top; a file may import from its own or a later row
LAYERS = (
    ("trainer",),
    ("rollout", "batch", "teacher", "fused_divergence"),
    ("divergence", "prompts", "data"),
    ("args",),
)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> set[str]:
    """Dotted names of every import under `node`, `from a import b` as both `a` and `a.b`."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            names |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            names |= {child.module} | {f"{child.module}.{alias.name}" for alias in child.names}
    return names


def own_imports(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(tree(path)) if name.startswith("opsd.")} & {p.stem for p in LIBRARY}


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_library_imports_neither_scripts_nor_callbacks():
    forbidden = {path.stem for path in SCRIPTS} | {"callbacks", "baselines", "bench", "tests"}
    for path in LIBRARY:
        assert not {name.split(".")[0] for name in imported(tree(path))} & forbidden, short(path)


def test_only_the_training_script_attaches_callbacks():
    for path in SOURCES:
        if path.name != "opsd_train.py" and path.parent.name != "callbacks":
            assert not any(name.split(".")[0] == "callbacks" for name in imported(tree(path))), short(path)


def test_layers():
    rank = {name: row for row, names in enumerate(LAYERS) for name in names}
    for name, row in rank.items():
        for other in own_imports(ROOT / "opsd" / f"{name}.py"):
            assert rank.get(other, row) >= row, f"{name}.py imports {other}.py, which is above it"
    assert own_imports(ROOT / "opsd" / "args.py") == {"method_args", "loop_args"}
    assert own_imports(ROOT / "opsd" / "method_args.py") == set()
    assert own_imports(ROOT / "opsd" / "loop_args.py") == {"method_args"}
    for name in ("eval_aime.py", "opsd/evaluation.py"):
        assert "trainer" not in own_imports(ROOT / name), name


def test_no_import_cycle():
    graph = {path.stem: own_imports(path) for path in LIBRARY}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail, name])}"
        if name not in finished:
            for other in graph[name]:
                visit(other, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_without_the_heavy_libraries(name):
    code = f"import sys, opsd.{name}; print(sorted({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and run.stdout.strip() == "[]", run.stdout + run.stderr


def test_vllm_is_imported_only_where_the_engine_is_built_or_for_its_attention_kernel():
    for path in (path for path in SOURCES if path.parent.name != "bench"):  # benchmarks time vLLM itself
        module = tree(path)
        at_top = {n for node in module.body if isinstance(node, ast.Import | ast.ImportFrom) for n in imported(node)}
        assert not any(name.split(".")[0] == "vllm" for name in at_top), f"{short(path)} imports vllm at module level"
        if not path.name.startswith("rollout"):
            used = {name for name in imported(module) if name.split(".")[0] == "vllm"}
            kernels = {n for n in used if path.name == "attention.py" and n.startswith("vllm.vllm_flash_attn")}
            assert used == kernels, f"{short(path)} imports {used - kernels}"


def test_the_environment_is_read_only_in_recipe_and_entry_points():
    for path in LIBRARY + sorted((ROOT / "callbacks").glob("*.py")):
        if path.name in ("recipe.py", "entry.py"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv", "putenv"), f"{short(path)}:{node.lineno}"
        assert not imported(tree(path)) & {"os.environ", "os.getenv"}, short(path)


def test_file_sizes():
    # STYLE.md section 1, with a tenth of slack; args.py holds every argument, rollout.py both ends of every engine
    ceilings = {"opsd/trainer.py": 320, "opsd/args.py": 320, "opsd/method_args.py": 240, "opsd/rollout.py": 280}
    ceilings |= {short(path): 280 for path in LIBRARY if path.name in ("fused_divergence.py", "triton_divergence.py")}
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        ceiling = ceilings.get(short(path), 150 if path.parent == ROOT else 220)
        assert lines <= ceiling * 1.1, f"{short(path)} has {lines} lines, its ceiling is {ceiling}"
    for path in (ROOT / "tests").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, short(path)


def test_attributes_are_required_not_guessed():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hasattr", f"{short(path)}:{node.lineno}: hasattr"
                assert node.func.id != "getattr" or len(node.args) == 2, (
                    f"{short(path)}:{node.lineno}: getattr with a default"
                )


def test_every_module_says_what_it_is_for_and_stands_in_the_reading_order():
    for path in SOURCES:
        assert not path.read_text(encoding="utf-8").strip() or ast.get_docstring(tree(path)), short(path)
    listed = re.findall(r"\w+\.py", opsd.__doc__)
    assert len(listed) == len(set(listed))
    present = {path.name for path in LIBRARY} - {"__init__.py"}
    assert not present.symmetric_difference(listed), (
        "opsd/__init__.py must name every file of the library, and no other"
    )
    assert not [node for node in tree(ROOT / "opsd" / "__init__.py").body if not isinstance(node, ast.Expr)]


def test_no_name_in_two_dataclasses():
    owners = training_fields()
    assert len(owners) == len(set(owners)) and set(own_fields()) <= set(owners)
    names = [f.name for owner in (DataArgs, OPSDConfig, HandoffArgs) for f in fields(owner)]
    assert len(names) == len(set(names))


def test_every_argument_has_help():
    for owner in (DataArgs, HandoffArgs, EvalRegime):
        for f in fields(owner):
            assert f.metadata["help"].strip().endswith("."), f"{owner.__name__}.{f.name}"
    for action in training_parser()._actions:
        assert action.help, action.dest


def test_every_argument_is_read_and_exercised():
    inherited = {f.name for f in fields(TrainingArguments)}
    read = set()
    for path in SOURCES:
        if path.name not in ("args.py", "method_args.py"):
            read |= {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    own = [f.name for f in fields(DataArgs)] + [name for name in own_training_fields() if name not in inherited]
    own += [f.name for f in fields(EvalRegime)]
    assert not [name for name in own if name not in read], "declared in args.py and read nowhere"
    used_in = [*(ROOT / "tests").rglob("*.py"), ROOT / "recipe.env", *(ROOT / "recipes").rglob("*.env")]
    words = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in used_in)))
    words |= {word.removeprefix("OPSD_").lower() for word in words if word.startswith("OPSD_")}
    assert not [name for name in own if name not in words and f"eval_{name}" not in words], (
        "used by no recipe and no test"
    )
