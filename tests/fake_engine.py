"""An engine process for tests: answers from the seed alone, slowly enough to be killed, and can be told to fail.

    python tests/fake_engine.py <file descriptor>

FAKE_DEAF: adapters change nothing. FAKE_SECONDS: time per completion. FAKE_DIE_AFTER: completions after which the process kills itself.
"""

import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection

from opsd.eval_worker import die_with_parent, serve
from opsd.rollout import Rollout, VLLMEngine


class FakeEngine(VLLMEngine):
    """Stands where vLLM would; answers requests in an order of its own."""

    def __init__(self, settings):
        self._waiting = []
        self._answered = 0
        self.served = "base model"
        sys.stderr.write("fake engine is loaded\n")

    @property
    def pending(self):
        return len(self._waiting)

    def sync(self, adapter_dir, step):
        self.served = str(adapter_dir)

    @property
    def canary_logps(self):
        return () if "FAKE_DEAF" in os.environ else (self.served,)

    def submit(self, key, prompt_ids, sampling, seed):
        self._waiting.append((key, prompt_ids, sampling, seed))

    def poll(self):
        if self._answered == int(os.environ.get("FAKE_DIE_AFTER", -1)):
            sys.stderr.write("fake engine runs out of memory\n")
            sys.stderr.flush()
            time.sleep(0.5)  # what was answered before has left the process
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
        self._answered += 1
        key, prompt_ids, sampling, seed = self._waiting.pop(random.randrange(len(self._waiting)))
        generator = random.Random(seed)
        ids = [generator.randrange(10) for _ in range(generator.randrange(1, sampling.max_new_tokens + 1))]
        reason = "length" if len(ids) == sampling.max_new_tokens else "stop"
        return [(key, Rollout(tuple(prompt_ids), tuple(ids), (), reason))]

    def close(self):
        pass


if __name__ == "__main__":
    die_with_parent()
    serve(Connection(int(sys.argv[1])), build=FakeEngine)
