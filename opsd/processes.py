"""How many processes on how many hosts, and which accelerate configuration starts them. Used by `launch.py`."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def count(name: str, text: str, lowest: int, where: str) -> int:
    """A whole number that was given as text, or a refusal that names it."""
    if not text.isascii() or not text.isdigit() or int(text) < lowest:
        raise ValueError(f"{name}={text!r} from {where} must be a whole number >= {lowest}; correct or unset it")
    return int(text)


def visible_gpus() -> int:
    """The GPUs this process may use (CUDA_VISIBLE_DEVICES counts)."""
    import torch

    return torch.cuda.device_count()


def host_flags(environ: Mapping[str, str]) -> tuple[int, list[str]]:
    """(number of hosts, accelerate's flags for them) from torchrun's own variables."""
    hosts = count("NNODES", environ.get("NNODES", "1"), 1, "environment")
    flags = ["--num_machines", str(hosts)]
    if hosts > 1:
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise ValueError(f"NNODES={hosts} needs {', '.join(missing)} as well; export them on every host")
        rank = count("NODE_RANK", environ["NODE_RANK"], 0, "environment")
        if rank >= hosts:
            raise ValueError(f"NODE_RANK={rank} must be below NNODES={hosts}; number the hosts from 0")
        flags += ["--machine_rank", str(rank), "--main_process_ip", environ["MASTER_ADDR"]]
    if environ.get("MASTER_PORT"):
        flags += ["--main_process_port", str(count("MASTER_PORT", environ["MASTER_PORT"], 1, "environment"))]
    return hosts, flags


def config_path(value: str) -> Path:
    """An accelerate configuration by name (`zero2`) or by path."""
    path = (
        ROOT / "accelerate_configs" / f"{value}.yaml"
        if "/" not in value and not value.endswith(".yaml")
        else Path(value)
    )
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (ROOT / "accelerate_configs").glob("*.yaml")))
        raise FileNotFoundError(
            f"accelerate_config={value} is no file {path}; use one of {known}, or a path to a .yaml"
        )
    return path
