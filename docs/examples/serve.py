"""A text server with continuous batching: requests join and leave the batch at every step.

Requests that begin alike share the pages of that prefix. With --lookup the server answers one
request at a time, and verifies several tokens in a forward.

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
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
)

from torch_metal_attn.integrations.transformers import continuous_batching, enable
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tools.demo import tiny_llama


class Stopped(RuntimeError):
    """The scheduler has ended, so no request can be answered any more."""


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
            if name is None:
                raise Stopped("the server has stopped generating: restart it")
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
        with self._lock:
            for future in self._waiting.values():
                future.set_exception(Stopped("the server stopped while it generated: restart it"))


class Lookup:
    """Answers one request at a time, with greedy's tokens in fewer forwards.

    It reads only what follows the prefix that a request shares with the last one, and it drafts
    tokens by looking up what followed the last two tokens before (prompt lookup).
    """

    def __init__(self, model: Any, drafts: int) -> None:
        self._model, self._drafts = model, drafts
        ends = model.config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._forget()
        self._lock = threading.Lock()
        self._context = copy_context()  # requests come in other threads
        self.read: list[int] = []  # tokens that each forward has read

    def generate(self, tokens: list[int], most: int) -> list[int]:
        """The tokens that follow; other requests wait."""
        with self._lock:
            try:
                return self._context.run(self._generate, tokens, most)
            except BaseException:
                self._forget()  # layers may have read different tokens
                raise

    def _forget(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._held: list[int] = []  # the tokens in the cache

    def _generate(self, tokens: list[int], most: int) -> list[int]:
        made: list[int] = []
        pairs = zip(self._held, tokens[:-1], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        self._drop_to(min(len(self._held), len(tokens) - 1) if shared is None else shared)
        while len(made) < most:
            known = tokens + made
            draft = self._draft(known, most - len(made) - 1)
            best = self._best(known[len(self._held) :] + draft, len(draft) + 1)
            right = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
            made += best[: right + 1]
            self._drop_to(len(known) + right)
            for i, token in enumerate(made):
                if token in self._ends:
                    return made[: i + 1]
        return made

    def _draft(self, known: list[int], most: int) -> list[int]:
        """What followed the last earlier occurrence of the last two tokens."""
        for start in range(len(known) - 3, -1, -1):
            if known[start : start + 2] == known[-2:]:
                return known[start + 2 :][: min(self._drafts, most)]
        return []

    @torch.no_grad()
    def _best(self, new: list[int], count: int) -> list[int]:
        """Reads new tokens; the most likely token after each of the last `count`."""
        ids = torch.tensor([new], device=self._model.device)
        logits = self._model(ids, past_key_values=self._cache, logits_to_keep=count).logits
        self._held += new
        self.read.append(len(new))
        best: list[int] = logits[0].argmax(-1).tolist()
        return best

    def _drop_to(self, length: int) -> None:
        """Take back what was read and is no prefix of the answer."""
        if length < len(self._held):
            self._cache.crop(length - len(self._held))
            del self._held[length:]


@dataclass
class Limits:
    """What a request may ask for. One that the model cannot run would end the scheduler for all."""

    vocabulary: int
    length: int  # of a prompt and its answer together

    def check(self, tokens: Any, most: Any) -> None:
        """Raises ValueError for a request that cannot be answered."""
        # A bool is an int, but no token.
        whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
        if not whole or not tokens:
            raise ValueError('"tokens" must be a list of at least one integer')
        wrong = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(
                f'"tokens" has {wrong}; the model\'s tokens are 0 to {self.vocabulary - 1}'
            )
        if type(most) is not int or most < 1:
            raise ValueError(f'"most" is {most!r}; it must be an integer of at least 1')
        if len(tokens) + most > self.length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and the answer up to {most}; both together "
                f"may have {self.length}"
            )


class Handler(BaseHTTPRequestHandler):
    """POST a JSON object, and get {"tokens": [...]}, with a tokenizer "text" too."""

    batches: Batches | Lookup
    limits: Limits
    tokenizer: Any = None

    def do_POST(self) -> None:
        answer: dict[str, Any]
        try:
            status, answer = 200, self.answer()
        except ValueError as error:
            status, answer = 400, {"error": str(error)}
        except Stopped as error:
            status, answer = 503, {"error": str(error)}
        except Exception as error:
            status, answer = 500, {"error": repr(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self) -> dict[str, Any]:
        """The answer to the request; ValueError if the request is wrong."""
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            asked = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the request must be a JSON object: {error}") from error
        if not isinstance(asked, dict) or not {"tokens", "text"} & asked.keys():
            raise ValueError('the request must be a JSON object with "tokens" or "text"')
        if "tokens" in asked:
            tokens = asked["tokens"]
        elif self.tokenizer is None:
            raise ValueError('"text" needs a tokenizer: start the server with --model')
        elif isinstance(asked["text"], str):
            tokens = self.tokenizer.encode(asked["text"])
        else:
            raise ValueError('"text" must be a string')
        most = asked.get("most", 16)
        self.limits.check(tokens, most)
        made = self.batches.generate(tokens, most)
        return {"tokens": made} | (
            {} if self.tokenizer is None else {"text": self.tokenizer.decode(made)}
        )


@contextmanager
def batching(model: Any, config: ContinuousBatchingConfig) -> Iterator[Batches]:
    """Of all requests; those that begin alike share pages, as transformers' config says."""
    with (
        continuous_batching(model),
        model.continuous_batching_context_manager(
            GenerationConfig(do_sample=False, eos_token_id=model.config.eos_token_id or -1),
            continuous_batching_config=config,
        ) as manager,
    ):
        yield Batches(manager)


@contextmanager
def server(
    model: Any, tokenizer: Any, port: int, blocks: int, lookup: int = 0
) -> Iterator[ThreadingHTTPServer]:
    """A server on this machine that has not started yet; port 0 chooses a free one."""
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512)
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", blocks * config.page_size)
    with best_device() as device, ExitStack() as stack:
        batches: Batches | Lookup
        if lookup > 0:
            batches = Lookup(enable(model.to(device)), lookup)
        else:
            batches = stack.enter_context(batching(model.to(device), config))
        bound = {
            "batches": batches,
            "limits": Limits(text.vocab_size, min(blocks * config.page_size, longest)),
            "tokenizer": tokenizer,
        }
        kind = type("Bound", (Handler,), bound)
        with ThreadingHTTPServer(("127.0.0.1", port), kind) as http:
            print(f"serving on http://127.0.0.1:{http.server_port}, kernels on {device}")
            yield http


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Hugging Face model; a tiny random one if not given")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument(
        "--blocks", type=int, default=64, help="of 256 tokens each, in the cache (default: 64)"
    )
    parser.add_argument(
        "--lookup",
        type=int,
        default=0,
        help="answer one request at a time, and draft this many tokens by prompt lookup",
    )
    options = parser.parse_args(arguments)
    if options.blocks < 1 or options.lookup < 0 or not 0 <= options.port < 2**16:
        parser.error("--blocks must be at least 1, --lookup at least 0, --port in 0..65535")
    if options.model is None:
        model, tokenizer = tiny_llama(), None
    else:
        loaded = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        model, tokenizer = loaded.eval(), AutoTokenizer.from_pretrained(options.model)
    with server(model, tokenizer, options.port, options.blocks, options.lookup) as http:
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
