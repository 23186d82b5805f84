"""One vLLM server as the trainer sees it: HTTP requests with bounded retries, a key, and a clear error when it is gone.

Used by `opsd/rollout_server.py`. Proxies of the environment are not used: a server is reached directly.
"""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request

from opsd.canary import Canary
from opsd.rollout import EngineDied
from opsd.server_process import StartedServer

logger = logging.getLogger(__name__)

WAITS_S = (0.5, 1.0, 2.0, 4.0)  # between the attempts of one request
RETRIED_STATUS = (429, 500, 502, 503, 504)
REQUEST_TIMEOUT_S = (
    3600.0  # a long completion says nothing until it is finished; a dead server is found by the health check
)
HEALTH_TIMEOUT_S = 5.0
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


class RequestRefused(RuntimeError):
    """A server understood a request and refused it; asking again would not help."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server:
    """One vLLM server: requests with retries, and what it serves."""

    def __init__(self, url: str, api_key: str, started: StartedServer | None):
        self.url = url.rstrip("/")
        self.model = ""  # the base model's name on the server
        self.served_name = ""
        self.canary = Canary()
        self._key = api_key
        self._started = started
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def ask(self, path: str, body: dict | None = None, timeout: float = REQUEST_TIMEOUT_S) -> str:
        """The body of the answer. Raises RequestRefused, or EngineDied when the server stays away over all attempts."""
        for wait in (*WAITS_S, None):
            try:
                return self._ask_once(path, body, timeout)
            except RequestRefused as error:
                if error.status not in RETRIED_STATUS:
                    raise
                reason = f"answers {error.status}: {error}"
            except (OSError, http.client.HTTPException) as error:
                reason = f"does not answer ({error})"
            if wait is None or (self._started is not None and self._started.process.poll() is not None):
                break
            logger.warning("%s %s; asking again in %.1f s", self.url, reason, wait)
            time.sleep(wait)
        raise self.death(reason)

    def _ask_once(self, path: str, body: dict | None, timeout: float) -> str:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        try:
            with self._open(request, timeout=timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            if error.code == 401:
                text = "the key was refused; export OPSD_VLLM_API_KEY with the key that the server was started with"
            raise RequestRefused(error.code, text[:500]) from None

    def healthy(self) -> bool:
        try:
            self._ask_once("/health", None, timeout=HEALTH_TIMEOUT_S)
        except (OSError, http.client.HTTPException, RequestRefused):
            return False
        return True

    def death(self, reason: str) -> EngineDied:
        tail = "" if self._started is None else self._started.last_words()
        return EngineDied(f"vLLM server {self.url} {reason}; restart it and resume from the last checkpoint{tail}")

    def base_model(self) -> dict:
        """The card of the one base model that is served. Raises ValueError when it is not one."""
        cards = json.loads(self.ask("/v1/models", timeout=60.0))["data"]
        base = [card for card in cards if card["parent"] is None]
        if len(base) != 1:
            raise ValueError(f"{self.url} serves {len(base)} base models; exactly one is needed")
        return base[0]

    def complete(self, prompt_ids: list[int], **settings) -> dict:
        """One completion of what is served; the choice of the answer, its prompt ids checked."""
        body = {
            "model": self.served_name,
            "prompt": list(prompt_ids),
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        try:
            choice = json.loads(self.ask("/v1/completions", body | NEUTRAL | settings))["choices"][0]
        except RequestRefused as error:
            raise RuntimeError(f"vLLM server {self.url} refused a request: {error}") from None
        if choice["prompt_token_ids"] != list(prompt_ids):
            raise RuntimeError(f"vLLM server {self.url} answered another prompt than it was given: prompt ids differ")
        return choice
