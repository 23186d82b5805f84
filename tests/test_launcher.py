"""From recipe, environment and flags to the command: the published values, precedence, caps by every route, and the shell script itself."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from opsd.args import HandoffArgs, OPSDConfig, own_fields, training_parser
from opsd.launch import resolve

ROOT = Path(__file__).resolve().parent.parent
RECIPES = [ROOT / "recipe.env", *sorted((ROOT / "recipes").rglob("*.env"))]
# smollm2.env names no rows: they are given by flag
EXTRA_FLAGS = {"smollm2.env": ["--train_file", "rows.jsonl"], "full_finetuning.env": ["--bf16", "false"]}  # no GPU here

# DESIGN.md section 2, both columns
SHARED = {
    "model_name_or_path": "Qwen/Qwen3-1.7B", "dtype": "bfloat16", "use_peft": "true", "lora_r": "64", "lora_alpha": "128",
    "lora_target_modules": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "dataset_name": "siyanzhao/Openthoughts_math_30k_opsd", "privileged_column": "solution",
    "max_steps": "100", "rollouts_per_step": "32", "max_grad_norm": "0.1",
    "student_thinking": "false", "temperature": "1.1", "top_p": "0.95", "top_k": "20", "max_completion_length": "1024",
    "teacher_kind": "base", "teacher_thinking": "true",
    "beta": "0.0", "distill_temperature": "1.1", "entry_clip": "0.05", "clip_mode": "entry", "position_gap": "false",
    "eval_samples_per_problem": "12", "eval_temperature": "1.0", "eval_top_p": "1.0", "eval_top_k": "0", "eval_thinking": "true",
    "eval_max_new_tokens": "38912", "eval_seed": "42", "eval_problem_prefix": "false", "wavg_last": "0",
}  # fmt: skip
GOLDEN = {
    "recipe.env": SHARED
    | {
        "learning_rate": "1e-5",
        "lr_scheduler_type": "linear",
        "answer_pattern": r"-?\d{1,6}",
        "min_trace_tokens": "2000",
    },
    "recipes/paper.env": SHARED
    | {"learning_rate": "5e-6", "lr_scheduler_type": "constant", "answer_pattern": "", "min_trace_tokens": "0"},
}


def shown(launch) -> dict[str, tuple[str, str]]:
    """The report read back: name -> (value, source)."""
    lines = launch.report().splitlines()[:-1]
    rows = {}
    for line in lines:
        name, rest = line.split(" = ", 1)
        value, source = rest.rsplit("  (", 1)
        assert name not in rows
        rows[name] = (value, source.removesuffix(")"))
    return rows


def write_recipe(tmp_path: Path, **values) -> str:
    path = tmp_path / "test.env"
    path.write_text("".join(f"export OPSD_{name.upper()}='{value}'\n" for name, value in values.items()))
    return str(path)


BASE = {"model_name_or_path": "m", "train_file": "rows.jsonl", "max_steps": 10}


@pytest.mark.parametrize("name", GOLDEN)
def test_dry_run_shows_the_published_values(name):
    rows = shown(resolve([str(ROOT / name)], {}, gpus=4))
    for field, value in GOLDEN[name].items():
        assert rows[field][0] == value, field
    assert rows["per_device_train_batch_size"] == ("8", "derived")
    assert rows["gradient_accumulation_steps"] == ("1", "derived")
    assert rows["num_processes"] == ("4", "default") and rows["accelerate_config"] == ("ddp", "default")
    assert rows["learning_rate"][1] == Path(name).name
    assert set(own_fields()) <= set(rows)
    (_, config, handoff, _) = training_parser().parse_args_into_dataclasses(
        resolve([str(ROOT / name)], {}, gpus=0).training_arguments
    )
    summed = config.learning_rate * (100 if config.lr_scheduler_type == "constant" else 50)
    assert summed == pytest.approx(5e-4)
    assert config.warmup_steps == 0 and config.weight_decay == 0


def test_every_shipped_recipe_parses():
    ablations = len(list((ROOT / "recipes" / "ablations").glob("*.env")))
    assert len(RECIPES) == 9 + ablations and {"recipe.env", "paper.env", "tiny.env", "smollm2.env"} <= {
        p.name for p in RECIPES
    }
    for path in RECIPES:
        launch = resolve([str(path), *EXTRA_FLAGS.get(path.name, [])], {}, gpus=0)
        training_parser().parse_args_into_dataclasses(launch.training_arguments)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_hold_deviations_with_a_reason(path):
    rows = shown(resolve([str(path), *EXTRA_FLAGS.get(path.name, [])], {}, gpus=1))
    for line in path.read_text().splitlines():
        if line.startswith("export "):
            assert "  # " in line, f"{path.name}: no reason in {line}"
    defaults = {
        f.name: f.default
        for f in [*OPSDConfig.__dataclass_fields__.values(), *HandoffArgs.__dataclass_fields__.values()]
    }
    if "base_recipe" in rows:  # what deviates is told from the base then; test_ablations.py looks at that
        return
    for name, (value, source) in rows.items():
        if source == path.name and name != "lr_scheduler_type":
            assert value != str(defaults.get(name, "")).removesuffix(".0"), (
                f"{path.name}: {name}={value} is the default"
            )


def test_command_survives_the_shell_and_the_real_parser(tmp_path):
    awkward = "-a b'c\"d$HOME`id`;*\\é"
    launch = resolve([write_recipe(tmp_path, **BASE), "--answer_pattern", "-?x y$", "--run_name", awkward], {}, gpus=0)
    printed = launch.report().splitlines()[-1]
    assert shlex.split(printed) == launch.command
    echoed = subprocess.run(["bash", "-c", f"printf '%s\\0' {printed}"], capture_output=True, text=True).stdout
    assert echoed.split("\0")[:-1] == launch.command
    data, config, _, model = training_parser().parse_args_into_dataclasses(launch.training_arguments)
    assert (data.answer_pattern, config.run_name, model.model_name_or_path) == ("-?x y$", awkward, "m")


def test_control_characters_are_not_printed(tmp_path):
    launch = resolve([write_recipe(tmp_path, **BASE), "--run_name", "a\x1b[31m\nb"], {}, gpus=0)
    assert shown(launch)["run_name"][0] == "a\\x1b[31m\\nb"
    printed = launch.report().splitlines()[-1]
    echoed = subprocess.run(["bash", "-c", f"printf '%s\\0' {printed}"], capture_output=True, text=True).stdout
    assert printed.isprintable() and echoed.split("\0")[:-1] == launch.command


@pytest.mark.parametrize(
    ("recipe", "environ", "flags", "value", "source"),
    [
        (None, None, None, "4", "default"),
        ("5", None, None, "5", "test.env"),
        (None, "6", None, "6", "environment"),
        (None, None, "7", "7", "flag"),
        ("5", "6", None, "6", "environment"),
        ("5", None, "7", "7", "flag"),
        (None, "6", "7", "7", "flag"),
        ("5", "6", "7", "7", "flag"),
    ],
)
def test_precedence(tmp_path, recipe, environ, flags, value, source):
    path = write_recipe(tmp_path, **BASE | ({"micro_batch_size": recipe} if recipe else {}))
    environment = {"OPSD_MICRO_BATCH_SIZE": environ} if environ else {}
    launch = resolve([path] + (["--micro_batch_size", flags] if flags else []), environment, gpus=1)
    assert shown(launch)["micro_batch_size"] == (value, source)


def test_a_base_recipe_stands_below_the_recipe_and_above_the_defaults(tmp_path):
    path = tmp_path / "difference.env"
    path.write_text(
        "export OPSD_BASE_RECIPE=recipe.env  # r\nexport OPSD_BETA=0.5  # r\nexport OPSD_ANSWER_PATTERN=''  # r\n"
    )
    rows = shown(resolve([str(path)], {}, gpus=1))
    assert rows["base_recipe"] == ("recipe.env", "difference.env")
    assert rows["beta"] == ("0.5", "difference.env")
    assert rows["learning_rate"] == ("1e-5", "recipe.env")
    assert rows["answer_pattern"] == ("", "default") and rows["min_trace_tokens"] == ("2000", "recipe.env")
    assert not any(word.startswith("--base_recipe") for word in resolve([str(path)], {}, gpus=1).command)
    other = shown(resolve([str(path), "--base_recipe", "recipes/tiny.env"], {}, gpus=1))
    assert other["world"] == ("tiny", "tiny.env") and other["beta"] == ("0.5", "difference.env")
    assert other["base_recipe"] == ("recipes/tiny.env", "flag")
    assert (
        shown(resolve([str(path)], {"OPSD_BASE_RECIPE": "recipes/paper.env"}, gpus=1))["learning_rate"][1]
        == "paper.env"
    )


def test_first_argument_or_default_recipe():
    assert shown(resolve(["--learning_rate=2e-5"], {}, gpus=1))["max_steps"] == ("100", "recipe.env")
    with pytest.raises(FileNotFoundError, match="recipe=nowhere.env"):
        resolve(["nowhere.env"], {}, gpus=1)


@pytest.mark.parametrize("name,cap", [("max_steps", 100), ("rollouts_per_step", 32)])
@pytest.mark.parametrize("route", ["recipe", "environment", "flag", "flag=", "dashes", "dashes=", "underscore"])
def test_no_route_around_the_caps(tmp_path, name, cap, route):
    dashed = "--" + name.replace("_", "-")
    over = cap * 2 if name == "rollouts_per_step" else cap + 1
    path = write_recipe(tmp_path, **BASE | ({name: over} if route == "recipe" else {}))
    environ = {f"OPSD_{name.upper()}": str(over)} if route == "environment" else {}
    flags = {
        "flag": [f"--{name}", str(over)], "flag=": [f"--{name}={over}"], "dashes": [dashed, str(over)], "dashes=": [f"{dashed}={over}"],
        "underscore": [f"--{name}", f"{over // 10}_{over % 10}"],
    }.get(route, [])  # fmt: skip
    with pytest.raises(
        ValueError, match=rf"{name}={over} must be 1 to {cap}, the cap in the header of train_capped.sh"
    ):
        resolve([path, *flags], environ, gpus=1)


def test_a_budget_in_epochs_does_not_replace_max_steps(tmp_path):
    without = {name: value for name, value in BASE.items() if name != "max_steps"}
    with pytest.raises(ValueError, match="max_steps is not given"):
        resolve([write_recipe(tmp_path, **without, num_train_epochs=3)], {}, gpus=1)
    for value in ("-1", "0"):
        with pytest.raises(ValueError, match=f"max_steps={value} must be 1 to 100"):
            resolve([write_recipe(tmp_path, **BASE), f"--max_steps={value}"], {}, gpus=1)


def test_caps_on_the_training_script_itself():
    command = ["opsd_train.py", "--max_steps=101", "--train_file=rows.jsonl", "--model_name_or_path=m"]
    run = subprocess.run([os.sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and run.stdout == ""
    assert "max_steps=101 must be 1 to 100" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32])
def test_world_sizes_that_divide_the_step(world):
    launch = resolve([], {}, gpus=world)
    rows = shown(launch)
    batch, accumulation = int(rows["per_device_train_batch_size"][0]), int(rows["gradient_accumulation_steps"][0])
    assert world * batch * accumulation == 32 and batch <= 16
    assert rows["world_size"] == (str(world), "derived")
    assert launch.command[launch.command.index("--num_processes") + 1] == str(world)
    config = "single" if world == 1 else "ddp"
    assert launch.command[launch.command.index("--config_file") + 1] == f"accelerate_configs/{config}.yaml"


def test_world_size_that_does_not_divide():
    with pytest.raises(ValueError, match="world_size=3 processes do not divide rollouts_per_step=32; use 2 or 4"):
        resolve([], {"OPSD_NUM_PROCESSES": "3"}, gpus=4)


def test_cpu_layouts():
    one, two = resolve([], {}, gpus=0), resolve([], {"OPSD_NUM_PROCESSES": "2", "OMP_NUM_THREADS": "7"}, gpus=0)
    assert "accelerate_configs/cpu.yaml" in one.command and "accelerate_configs/cpu_ddp.yaml" in two.command
    assert shown(one)["use_cpu"] == ("true", "derived") and "--use_cpu=true" in one.training_arguments
    assert two.command[two.command.index("--num_cpu_threads_per_process") + 1] == "7"
    forced = resolve(["--use_cpu", "true"], {}, gpus=4)
    assert "accelerate_configs/cpu.yaml" in forced.command and shown(forced)["use_cpu"] == ("true", "flag")


def test_several_hosts():
    hosts = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    launch = resolve([], hosts, gpus=4)
    assert shown(launch)["world_size"] == ("8", "derived") and shown(launch)["gradient_accumulation_steps"] == (
        "1",
        "derived",
    )
    text = shlex.join(launch.command)
    assert "--num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip head --main_process_port 1234" in text
    for change, message in (
        ({"MASTER_ADDR": ""}, "NNODES=2 needs MASTER_ADDR"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 must be below NNODES=2"),
        ({"NNODES": "two"}, "NNODES='two' from environment must be a whole number"),
        ({"NNODES": "3"}, "world_size=12"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve([], hosts | change, gpus=4)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--max_steps", "ten"], {}, "max_steps='ten' from flag: invalid int value"),
        (["--world", "mars"], {}, "world='mars' from flag: invalid choice"),
        ([], {"OPSD_BETA": "x"}, "beta='x' from environment: invalid float value"),
        (["--entry_clip=-1"], {}, "entry_clip=-1.0 must be > 0 nats; use inf to disable"),
        (["--eval_top_p=2"], {}, "eval_top_p=2.0 must be in"),
        ([], {"OPSD_NUM_PROCESSES": "0"}, "num_processes='0' from environment must be a whole number >= 1"),
        (["--num_processes=two"], {}, "num_processes='two' from flag"),
        ([], {"OPSD_DRY_RUN": "yes"}, "OPSD_DRY_RUN='yes' must be 1 or 0"),
        ([], {"OPSD_LEARNING_RTE": "1"}, "the nearest known name is OPSD_LEARNING_RATE"),
    ],
)
def test_bad_values_are_named(flags, environ, message):
    with pytest.raises(ValueError, match=message):
        resolve(flags, environ, gpus=1)


def test_accelerate_config_by_name_or_path(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("compute_environment: LOCAL_MACHINE\n")
    assert "accelerate_configs/ddp.yaml" in resolve([], {"OPSD_ACCELERATE_CONFIG": "ddp"}, gpus=1).command
    assert os.path.relpath(own, ROOT) in resolve([f"--accelerate_config={own}"], {}, gpus=1).command
    with pytest.raises(FileNotFoundError, match="accelerate_config=zero9 is no file .*use one of cpu, .*single"):
        resolve([], {"OPSD_ACCELERATE_CONFIG": "zero9"}, gpus=1)


def launch_script(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "train_capped.sh"), *arguments],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd="/",
        env={**os.environ, "OPSD_PYTHON": os.sys.executable, **environ},
    )  # fmt: skip


def test_script_dry_run(tmp_path):
    run = launch_script("recipes/paper.env", "--seed", "7", OPSD_DRY_RUN="1", OPSD_CACHE=str(tmp_path / "cache"))
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "seed = 7  (flag)" in lines and "learning_rate = 5e-6  (paper.env)" in lines
    assert "opsd_train.py" in shlex.split(lines[-1]) and "--seed=7" in shlex.split(lines[-1])
    assert not (tmp_path / "cache").exists()


def test_script_refuses_in_one_line():
    run = launch_script("recipes/paper.env", "--max-steps=101")
    assert run.returncode == 2 and run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if not line.startswith("setup: ")]
    assert errors == ["error: max_steps=101 must be 1 to 100, the cap in the header of train_capped.sh; lower it"]


def test_a_sourced_recipe_counts_as_environment():
    names = subprocess.run(
        ["bash", "-c", "set -e; source recipe.env; env -0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
    ).stdout.split("\0")
    environ = dict(pair.split("=", 1) for pair in names if pair.startswith("OPSD_"))
    rows = shown(resolve([str(ROOT / "recipes" / "paper.env")], environ, gpus=1))
    assert rows["learning_rate"] == ("1e-5", "environment")
    assert rows["answer_pattern"] == (r"-?\d{1,6}", "environment")


def test_processes_default_to_the_visible_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert shown(resolve([], {}))["num_processes"] == ("8", "default")
    assert shown(resolve([], {"OPSD_NUM_PROCESSES": "2"}))["num_processes"] == ("2", "environment")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert shown(resolve([], {}))["num_processes"] == ("1", "default")


@pytest.mark.parametrize("argv", [["--resume"], [str(ROOT / "recipe.env"), "--resume"]])
def test_resume_is_short_for_the_latest_checkpoint(argv):
    assert "--resume_from_checkpoint=latest" in resolve(argv, {}, gpus=1).training_arguments
