"""Coverage-guided fuzzing of one target, where the package atheris is installed (it is not a requirement).

python tests/fuzz/atheris_run.py recipe -runs=1000000
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import atheris  # noqa: E402

with atheris.instrument_imports(include=["opsd"]):
    from targets import SEEDS, TARGETS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    corpus = Path(tempfile.mkdtemp(prefix=f"opsd-corpus-{name}-"))
    for number, seed in enumerate(SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], TARGETS[name])
    atheris.Fuzz()
