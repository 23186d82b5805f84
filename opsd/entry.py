"""How an entry point starts and ends: the libraries' environment, log lines that are safe to show, errors of one line, exit codes.

Imports neither torch nor vLLM.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from opsd.runinfo import hardware

# vLLM's kernel configurations, one file an operation and GPU
LORA_KERNELS = Path(__file__).resolve().parent / "lora_kernels"


def library_environment(cores: int) -> dict[str, str]:
    """Environment defaults for the libraries, to be set before they are imported.

    No telemetry leaves; vLLM runs in this process (needed to share a GPU), on an H200 with LoRA kernels tuned for 32 sequences; without
    a GPU its torch.compile of the sampler is switched off, which makes small models ten times slower for minutes (DESIGN.md section 7).
    """
    values = {
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    gpus = hardware()["gpus"]
    if gpus:
        values["VLLM_LORA_ENABLE_DUAL_STREAM"] = "1"  # the adapter's products beside the layer's own
        if all("H200" in gpu for gpu in gpus):
            values["VLLM_TUNED_CONFIG_FOLDER"] = str(LORA_KERNELS)
    else:
        values |= {
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(cores),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "DS_ACCELERATOR": "cpu",
        }
    return values


def printable(text: str) -> str:
    """Text for a terminal: control, format and direction-changing characters, which may move its cursor or hide what it shows, become
    escapes; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class PrintableFormatter(logging.Formatter):
    """Log lines hold text that models and data sets wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(names: Iterable[str]) -> None:
    """One logging configuration for a process: these loggers at INFO, everything else at WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)


def exit_on_bad_input(main: Callable[[list[str]], None]) -> None:
    """Runs `main(argv)`; bad input (ValueError, FileNotFoundError) becomes one line on stderr and exit code 2.

    A bare `--debug` anywhere in the arguments is removed and brings the traceback back.
    """
    argv = sys.argv[1:]
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    code = 0
    try:
        main(argv)
    except SystemExit as stop:
        code = stop.code or 0
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
            code = 1
    except (ValueError, FileNotFoundError) as error:
        if debug:
            raise
        sys.stderr.write(f"error: {printable(' '.join(str(error).split()))}\n")
        code = 2
    _leave(code)


def _leave(code: int) -> None:
    """Ends the process with `code`; one of several processes (torchrun's `WORLD_SIZE`) ends without taking the interpreter down.

    gloo's threads drop the last collective's tensors some time after its result is there. Before Python 3.14 a thread that asks for the
    interpreter while it is being taken down is unwound, which C++ answers with `terminate`: a finished run would exit with SIGABRT.
    What remains to be done at exit is done here as `multiprocessing` does it in its children.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
