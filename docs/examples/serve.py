"""A text server with continuous batching: requests join and leave the batch at every step.

Requests with a common prefix share its pages.

    python docs/examples/serve.py --model some/model --port 8000
    curl -d '{"prompt": [72, 105], "max_tokens": 8}' http://127.0.0.1:8000/v1/completions

The server has OpenAI's API, so OpenAI's clients work with base_url="http://127.0.0.1:8000/v1".
/v1/completions takes tokens, or text with --model; /v1/chat/completions needs a model with a chat
template. Decoding is greedy. "stream" sends tokens as server-sent events. A request is cancelled
when its client disconnects. Without --model the model is a tiny random Llama, whose tokens are
bytes.
"""

import argparse
import json
import queue
import select
import socket
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from torch_metal_attn.integrations.transformers import continuous_batching
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tools.demo import tiny_llama

# New tokens, or no tokens after POLL_SECONDS, so that the caller can check its client.
Parts = Generator[list[int], None, None]
POLL_SECONDS = 0.1
IDLE_SECONDS = 60  # limit for a client to send its request, or to read a part of the answer
MAX_REQUEST_BYTES = 2**24
KNOWN = ("model", "user", "max_tokens", "max_completion_tokens", "stream", "stream_options")
# Sampling options, with their values for greedy decoding.
GREEDY = {"temperature": 0, "top_p": 1, "n": 1, "best_of": 1, "echo": False}
GREEDY |= {"presence_penalty": 0, "frequency_penalty": 0}


class Stopped(RuntimeError):
    """The scheduler has ended, so the server cannot answer requests."""


def ends_of(model: Any) -> set[int]:
    """The tokens after which an answer ends."""
    ends = model.config.eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


class Batches:
    """Passes prompts to transformers' scheduler, and each result to its request."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._waiting: dict[str, queue.Queue[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._collect, daemon=True).start()

    def stream(self, tokens: list[int], max_tokens: int) -> Parts:
        """The tokens as they are generated. Closing the generator cancels the request."""
        results: queue.Queue[Any] = queue.Queue()
        with self._lock:  # a result may come before the queue is stored
            name = self._manager.add_request(tokens, max_new_tokens=max_tokens, streaming=True)
            if name is None:
                raise Stopped("the server has stopped generating: restart it")
            self._waiting[name] = results
        count = 0
        try:
            finished = False
            while not finished:
                try:
                    result = results.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    yield []
                    continue
                if isinstance(result, Exception):
                    raise result
                if result.error:
                    raise RuntimeError(result.error)
                finished, generated = result.is_finished(), result.generated_tokens[count:]
                count += len(generated)
                yield generated
        finally:
            with self._lock:
                unfinished = self._waiting.pop(name, None)
            if unfinished is not None:
                self._manager.cancel_request(name)

    def _collect(self) -> None:
        for result in self._manager:
            with self._lock:
                act = self._waiting.pop if result.is_finished() else self._waiting.get
                results = act(result.request_id, None)
            if results is not None:  # the request was not cancelled
                results.put(result)
        with self._lock:
            for results in self._waiting.values():
                results.put(Stopped("the server stopped while it generated: restart it"))


class Answer:
    """The JSON of an answer, whole or in parts."""

    def __init__(self, tokenizer: Any, model: str, chat: bool, prompt: int) -> None:
        self._tokenizer, self._chat, self._prompt = tokenizer, chat, prompt
        kind = "chat.completion" if chat else "text_completion"
        self._head: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind}
        self._head |= {"model": model, "created": int(time.time())}
        self._made: list[int] = []
        self._sent = 0  # characters

    def add(self, generated: list[int], ended: bool) -> str:
        """The text of new tokens, without an incomplete last character."""
        self._made += generated
        if self._tokenizer is None:
            return ""
        text = str(self._tokenizer.decode(self._made, skip_special_tokens=True))
        if not ended and text.endswith("\ufffd"):
            return ""
        new, self._sent = text[self._sent :], len(text)
        return new

    def usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self._prompt, "completion_tokens": len(self._made)}
        return counts | {"total_tokens": self._prompt + len(self._made)}

    def chunk(self, text: str, tokens: list[int], reason: str | None, whole: bool) -> Any:
        """An object of OpenAI's API. token_ids is vLLM's."""
        choice = {"index": 0, "token_ids": tokens, "logprobs": None, "finish_reason": reason}
        if self._chat:
            name = "message" if whole else "delta"
            choice[name] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        part = {"object": "chat.completion.chunk"} if self._chat and not whole else {}
        return self._head | part | {"choices": [choice]}


@dataclass
class Request:
    """A checked request."""

    tokens: list[int]
    max_tokens: int
    chat: bool
    stream: bool
    usage: bool  # sent as the last part of a stream


class Handler(BaseHTTPRequestHandler):
    batches: Batches
    vocabulary: int
    longest: int  # the most tokens of a prompt and its answer together
    model: str
    ends: set[int]
    tokenizer: Any = None
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        else:
            self.send_failure(404, f"there is no {self.path}; GET has /v1/models")

    def do_POST(self) -> None:
        try:
            request = self.request_of_body()
        except ValueError as error:
            self.send_failure(400, str(error))
            return
        started = False
        try:
            with closing(self.batches.stream(request.tokens, request.max_tokens)) as parts:
                for body in self.answer(request, parts):
                    if request.stream and not started:
                        self.send_response(200)
                        self.send_header("Content-Type", "text/event-stream")
                        self.send_header("Cache-Control", "no-cache")
                        self.end_headers()
                        started = True
                    self.event(body) if request.stream else self.send(body)
            if request.stream:
                self.event("[DONE]")
        except (ConnectionError, TimeoutError):
            raise  # the client left
        except Exception as error:
            stopped = isinstance(error, Stopped)
            status, message = (503, str(error)) if stopped else (500, repr(error))
            if started:
                self.event({"error": {"message": message, "type": "server_error"}})
            else:
                self.send_failure(status, message)

    def answer(self, request: Request, parts: Parts) -> Iterator[dict[str, Any]]:
        """The answer, in parts if the request has "stream"."""
        answer = Answer(self.tokenizer, self.model, request.chat, len(request.tokens))
        generated: list[int] = []
        reason = None
        for part in parts:
            self.check_client()
            generated += part
            if generated and generated[-1] in self.ends:
                reason = "stop"
            elif len(generated) == request.max_tokens:
                reason = "length"
            if part and request.stream:
                yield answer.chunk(answer.add(part, reason is not None), part, reason, False)
        if not request.stream:
            text = answer.add(generated, True)
            yield answer.chunk(text, generated, reason, True) | {"usage": answer.usage()}
        elif request.usage:
            yield answer.chunk("", [], None, False) | {"choices": [], "usage": answer.usage()}

    def request_of_body(self) -> Request:
        """The request; ValueError if it is wrong."""
        text = self.rfile.read(self.body_length())
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the request must be a JSON object: {error}") from error
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            raise ValueError(
                f"there is no {self.path}; POST has /v1/completions and /v1/chat/completions"
            )
        name = "messages" if chat else "prompt"
        if not isinstance(body, dict) or name not in body:
            raise ValueError(f'the request must be a JSON object with "{name}"')
        body = {option: value for option, value in body.items() if value is not None}
        for option, value in body.items():
            if option not in {name, *KNOWN} and value != GREEDY.get(option):
                only = f"is {value!r}; only {GREEDY[option]} is" if option in GREEDY else "is not"
                raise ValueError(f'"{option}" {only} supported; leave it out')
        stream, options = body.get("stream", False), body.get("stream_options", {})
        if type(stream) is not bool or not isinstance(options, dict):
            raise ValueError('"stream" must be true or false, and "stream_options" a JSON object')
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens", 16))
        tokens = self.tokens(body.get(name), chat)
        self.check(tokens, max_tokens)
        return Request(tokens, max_tokens, chat, stream, bool(options.get("include_usage")))

    def check(self, tokens: Any, max_tokens: Any) -> None:
        """Raises ValueError for a request that the model cannot run, which ends the scheduler."""
        # A bool is an int, but not a token.
        if not isinstance(tokens, list) or not tokens or {*map(type, tokens)} != {int}:
            raise ValueError('"prompt" must be a text, or a list of at least one integer')
        last = self.vocabulary - 1
        for token in tokens:
            if not 0 <= token <= last:
                raise ValueError(f'"prompt" has {token}; the model\'s tokens are 0 to {last}')
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f'"max_tokens" is {max_tokens!r}; it must be an integer of at least 1')
        if len(tokens) + max_tokens > self.longest:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and the answer up to {max_tokens}; both "
                f"together may have {self.longest}"
            )

    def body_length(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"Content-Length is {length!r}; it must be the bytes of the request, up to "
                f"{MAX_REQUEST_BYTES}"
            )
        return int(length)

    def tokens(self, prompt: Any, chat: bool) -> Any:
        """The tokens of a prompt, or of messages."""
        if not chat and not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: start the server with --model")
        if not chat:
            prompt.encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
            return self.tokenizer.encode(prompt)
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("the model has no chat template: use /v1/completions")
        options = {"add_generation_prompt": True, "return_dict": False}
        try:
            return list(self.tokenizer.apply_chat_template(prompt, **options))
        except Exception as error:
            raise ValueError(f'"messages" do not fit the chat template: {error}') from error

    def check_client(self) -> None:
        """Raises ConnectionError if the client left."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client left")

    def send(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_failure(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.send({"error": {"message": message, "type": kind}}, status)

    def event(self, data: dict[str, Any] | str) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())


class Server(ThreadingHTTPServer):
    """A thread for each client."""

    request_queue_size = 1024  # clients that connect at the same time; http.server's default is 5
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


@contextmanager
def server(model: Any, tokenizer: Any, port: int, blocks: int) -> Iterator[ThreadingHTTPServer]:
    """A server on this machine that has not started yet; port 0 chooses a free one."""
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512)
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", blocks * config.page_size)
    ends = ends_of(model)
    greedy = GenerationConfig(do_sample=False, eos_token_id=[*ends] or [-1])
    with (
        best_device() as device,
        continuous_batching(model.to(device)),
        model.continuous_batching_context_manager(
            greedy, continuous_batching_config=config
        ) as manager,
    ):
        attributes = {
            "batches": Batches(manager),
            "vocabulary": text.vocab_size,
            "longest": min(blocks * config.page_size, longest),
            "model": model.config.name_or_path or "tiny",
            "ends": ends,
            "tokenizer": tokenizer,
        }
        kind = type("Bound", (Handler,), attributes)
        with Server(("127.0.0.1", port), kind) as http:
            print(f"serving on http://127.0.0.1:{http.server_port}, kernels on {device}")
            yield http


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument(
        "--blocks", type=int, default=64, help="blocks of 256 tokens in the cache (default: 64)"
    )
    options = parser.parse_args(arguments)
    if options.blocks < 1 or not 0 <= options.port < 2**16:
        parser.error("--blocks must be at least 1, and --port in 0..65535")
    model, tokenizer = tiny_llama(), None
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    with server(model, tokenizer, options.port, options.blocks) as http:
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
