"""A prompt whose log-probabilities prove that an engine serves new weights. Used by the vLLM engines."""


class Canary:
    """Proof that an engine serves what it was given: the log-probabilities of one prompt must change when the weights do."""

    PATIENCE = 5  # changed weights in a row that may leave the log-probabilities untouched

    def __init__(self):
        self.digest: str | None = None
        self.logps: tuple[float, ...] = ()
        self._unchanged = 0

    def check(self, digest: str, logps: tuple[float, ...], served: str) -> None:
        """Compares with the sync before. Raises RuntimeError when several changed weights in a row gave the same output."""
        if self.digest is not None and self.digest != digest:
            self._unchanged = self._unchanged + 1 if self.logps == logps else 0
            if self._unchanged >= self.PATIENCE:
                raise RuntimeError(
                    f"the engine's output on the canary prompt has not changed over {self._unchanged} changed adapters (now "
                    f"{served}): it does not serve them; check the vLLM version and the adapter's target modules"
                )
        self.digest, self.logps = digest, logps
