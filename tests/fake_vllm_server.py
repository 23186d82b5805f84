"""An HTTP server for tests that speaks as much of vLLM's API as `opsd/rollout_server.py` uses, and can be told to misbehave.

Completions depend on the seed and on the adapter that is named, so that serving the wrong one shows.
"""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = "test-key"


class FakeVLLM(ThreadingHTTPServer):
    """Attributes are switches: see `Handler`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.adapters: dict[str, str] = {}  # name -> digest of the weights
        self.requests: list[tuple[str, dict]] = []
        self.failures = 0  # how many more requests are answered by 503
        self.deaf = False  # adapters change nothing
        self.other_prompt = False
        self.processed = True
        self.max_model_len = 128
        self.runtime_lora = True
        self.finish_reason = "length"
        self.drop_after: int | None = None  # completions after which every connection is dropped
        self.scorer = None  # prompt ids, count -> prompt log-probabilities of a teacher
        self.tokenizer = None  # of /tokenize
        self.silent = False  # never answers a completion, and health fails
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, path: str) -> list[dict]:
        return [body for seen, body in self.requests if seen == path]

    def handle_error(self, request, client_address):
        """Dropped connections are part of the tests."""

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        """Silent."""

    def answer(self, status: int, body) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            return self.answer(503 if self.server.silent else 200, "")
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self.answer(401, {"error": "Unauthorized"})
        cards = [{"id": "base", "parent": None, "max_model_len": self.server.max_model_len}]
        return self.answer(200, {"data": cards + [{"id": name, "parent": "base"} for name in self.server.adapters]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.requests.append((self.path, body))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self.answer(401, {"error": "Unauthorized"})
        if server.failures:
            server.failures -= 1
            return self.answer(503, "busy")
        if self.path == "/v1/load_lora_adapter" and server.runtime_lora:
            file = Path(body["lora_path"]) / "adapter_model.safetensors"
            if not file.is_file():
                return self.answer(404, {"error": {"message": "Loading lora failed: No adapter found"}})
            if body["lora_name"] in server.adapters:
                return self.answer(400, {"error": {"message": "The lora adapter has already been loaded."}})
            server.adapters[body["lora_name"]] = hashlib.sha256(file.read_bytes()).hexdigest()
            return self.answer(200, "Success")
        if self.path == "/v1/unload_lora_adapter":
            if server.adapters.pop(body["lora_name"], None) is None:
                return self.answer(404, {"error": {"message": "cannot be found"}})
            return self.answer(200, "Success")
        if self.path == "/tokenize":
            return self.answer(200, {"tokens": server.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]})
        if self.path == "/v1/completions":
            return self.complete(body)
        return self.answer(404, {"detail": "Not Found"})

    def complete(self, body):
        server = self.server
        if body["model"] not in ("base", *server.adapters):
            return self.answer(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        if server.silent:
            time.sleep(5)
        if server.drop_after is not None:
            if server.drop_after == 0:
                self.close_connection = True
                return None
            server.drop_after -= 1
        weights = "" if server.deaf else server.adapters.get(body["model"], "base")
        digest = hashlib.sha256(f"{weights}|{body.get('seed')}|{body['prompt']}".encode()).digest()
        tokens = [byte % 50 for byte in digest[: body["max_tokens"]]]
        logp = 0.0 if body.get("top_k") == 1 and server.processed else -1.0 - digest[0] / 256
        prompt_logps = [None] + [{str(t): {"logprob": -digest[i % 32] / 256}} for i, t in enumerate(body["prompt"][1:])]
        if server.scorer is not None:
            prompt_logps = server.scorer(body["prompt"], body["prompt_logprobs"])
        choice = {
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"][::-1] if server.other_prompt else body["prompt"],
            "logprobs": {"token_logprobs": [logp] * len(tokens)},
            "prompt_logprobs": prompt_logps if "prompt_logprobs" in body else None,
            "finish_reason": server.finish_reason,
        }
        return self.answer(200, {"choices": [choice]})
