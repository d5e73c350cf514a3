"""A text server with continuous batching: requests join and leave the batch at every step.

    python docs/examples/serve.py --model some/model --port 8000
    curl -d '{"tokens": [72, 105], "most": 8}' http://127.0.0.1:8000

A request has the tokens of a prompt, or with --model its "text". Without --model a tiny random
Llama serves, whose tokens are bytes.
"""

import argparse
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from torch_metal_attn.demo import tiny_llama
from torch_metal_attn.device import best_device
from torch_metal_attn.integrations.transformers import continuous_batching


class Batches:
    """Hands prompts to transformers' scheduler, and each result to the one who asked for it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._waiting: dict[str, Future[list[int]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._collect, daemon=True).start()

    def generate(self, tokens: list[int], most: int) -> list[int]:
        """The tokens that follow; other requests run at the same time."""
        future: Future[list[int]] = Future()
        with self._lock:  # so that no result comes before its future is known
            name = self._manager.add_request(tokens, max_new_tokens=most)
            self._waiting[name] = future
        return future.result()

    def _collect(self) -> None:
        for result in self._manager:
            if result.is_finished():
                with self._lock:
                    future = self._waiting.pop(result.request_id)
                if result.error:
                    future.set_exception(RuntimeError(result.error))
                else:
                    future.set_result(result.generated_tokens)


class Handler(BaseHTTPRequestHandler):
    """POST a JSON object, and get {"tokens": [...]}, with a tokenizer "text" too."""

    batches: Batches
    tokenizer: Any = None

    def do_POST(self) -> None:
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = asked["tokens"] if "tokens" in asked else self.tokenizer.encode(asked["text"])
            made = self.batches.generate(tokens, asked.get("most", 16))
            answer: dict[str, Any] = {"tokens": made}
            if self.tokenizer is not None:
                answer["text"] = self.tokenizer.decode(made)
            status = 200
        except Exception as error:
            status, answer = 400, {"error": repr(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def server(model: Any, tokenizer: Any, port: int, blocks: int) -> Iterator[ThreadingHTTPServer]:
    """A server on this machine that has not started yet; port 0 chooses a free one."""
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512)
    with (
        best_device() as device,
        continuous_batching(model.to(device)),
        model.continuous_batching_context_manager(
            GenerationConfig(do_sample=False, eos_token_id=model.config.eos_token_id or -1),
            continuous_batching_config=config,
        ) as manager,
    ):
        kind = type("Bound", (Handler,), {"batches": Batches(manager), "tokenizer": tokenizer})
        with ThreadingHTTPServer(("127.0.0.1", port), kind) as http:
            print(f"serving on http://127.0.0.1:{http.server_port}, kernels on {device}")
            yield http


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Hugging Face model; a tiny random one if not given")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument("--blocks", type=int, default=64, help="of the cache (default: 64)")
    options = parser.parse_args(arguments)
    if options.model is None:
        model, tokenizer = tiny_llama(), None
    else:
        loaded = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        model, tokenizer = loaded.eval(), AutoTokenizer.from_pretrained(options.model)
    with server(model, tokenizer, options.port, options.blocks) as http:
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
