"""The scripts of docs/examples at small sizes, on mps or in the simulator."""

import http.client
import importlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from tests.docs.doc_pages import ROOT
from tests.helpers.patience import HANG_SECONDS
from torch_metal_attn.tools.demo import tiny_llama
from torch_metal_attn.tools.doctor.attention import OURS
from torch_metal_attn.tools.doctor.watch import Watch

SCRIPTS = sorted(path.stem for path in (ROOT / "docs" / "examples").glob("*.py"))
NEEDED = {"chat": ["transformers"], "serve": ["transformers", "psutil"]}
NEEDED |= {"train_lora": ["diffusers", "peft"], "image_pipeline": ["diffusers"]}
PROMPTS = [[72, 105], [65], [1, 2, 3, 4, 5]]


def example(name):
    for library in NEEDED.get(name, []):
        pytest.importorskip(library)
    return importlib.import_module(name)


def continued(prompt, most):
    """The next tokens by torch's eager attention, without a cache."""
    model, tokens = tiny_llama(), torch.tensor([prompt])
    model.set_attn_implementation("eager")
    options = {"use_cache": False, "do_sample": False, "pad_token_id": 0, "max_new_tokens": most}
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return generated[0].tolist()[len(prompt) :]


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("chat", ["--most", "0"], "--length and --most must be at least 1"),
        ("serve", ["--blocks", "0"], "--blocks must be at least 1"),
        ("serve", ["--port", "65536"], "--port in 0..65535"),
        ("train_gpt", ["--batch", "0"], "must be at least 1"),
        ("train_gpt", ["--length", "-3"], "must be at least 1"),
        ("train_gpt", ["--text", "no such file"], "cannot read no such file: "),
        ("train_lora", ["--images", "no such folder"], "no such folder is not a folder"),
    ],
)
def test_bad_arguments_are_refused(name, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        example(name).main(arguments)
    assert message in capsys.readouterr().err + str(ended.value)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "tiny_pipeline"])
def test_help_is_printed(name, capsys):
    with pytest.raises(SystemExit) as ended:
        example(name).main(["--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
    assert f"(examples/{name}.py)" in (ROOT / "docs" / "examples.md").read_text()


def test_chat_continues_as_eager_attention_does(capsys):
    chat = example("chat")
    conversation = chat.main(["--say", "Hi", "--say", "so", "--most", "4", "--length", "32"])
    first = [*b"Hi", *continued([*b"Hi"], 4)]
    assert conversation.tokens == [*first, *b"so", *continued([*first, *b"so"], 4)]
    assert "12 of 32 tokens" in capsys.readouterr().out
    assert conversation.cache.get_seq_length() == 11  # the last token is not in the cache
    with pytest.raises(ValueError, match="has 32 tokens and the answer up to 4; the cache holds"):
        conversation.answer("x" * 20, 4)
    with pytest.raises(SystemExit):
        chat.main(["--say", "Hi", "--most", "4", "--length", "5"])
    assert "start again with a larger --length" in capsys.readouterr().err


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_chat_ends_with_its_input(monkeypatch, end):
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=["Hi", end]))
    assert len(example("chat").main(["--most", "1"]).tokens) == 3


class Letters:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text):
        return list(text.encode())

    chat_template = "the contents"

    def apply_chat_template(self, messages, **options):
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(tokens).decode(errors="replace")


class Served:
    def __init__(self, server):
        self.server = server

    def connect(self, body, path="/v1/completions", **headers):
        """A client that has sent a request: a JSON value, or bytes."""
        client = http.client.HTTPConnection("127.0.0.1", self.server.server_port, HANG_SECONDS)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        client.request("POST", path, body, headers)
        return client

    def __call__(self, *request, **headers):
        with closing(self.connect(*request, **headers)) as client:
            answer = client.getresponse()
            body = json.load(answer)
        if answer.status != 200:
            return answer.status, body["error"]["message"]
        (choice,) = body["choices"]
        return 200, choice["token_ids"]


@contextmanager
def served(tokenizer=None, model=None):
    with example("serve").server(model or tiny_llama(), tokenizer, 0, 16) as server:
        running = threading.Thread(target=server.serve_forever)
        running.start()
        try:
            yield Served(server)
        finally:
            server.shutdown()
            running.join()


def events(client):
    answer = client.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    for line in answer:
        if line.strip():
            name, _, data = line.decode().strip().partition(": ")
            assert name == "data"
            yield data if data == "[DONE]" else json.loads(data)


REFUSED = [
    ({}, 'a JSON object with "prompt"'),
    ([1], 'a JSON object with "prompt"'),
    (b"[" * 100_000, "must be a JSON object: maximum recursion depth exceeded"),
    (b"1" * 5000, "must be a JSON object: Exceeds the limit"),
    (b"\xff", "must be a JSON object: "),
    ({"prompt": "Hi"}, "start the server with --model"),
    ({"prompt": []}, "a list of at least one integer"),
    ({"prompt": [True]}, "a list of at least one integer"),
    ({"prompt": [1, 256]}, "has 256; the model's tokens are 0 to 255"),
    ({"prompt": [-1]}, "has -1; the model's tokens are 0 to 255"),
    ({"prompt": [1], "max_tokens": 0}, "an integer of at least 1"),
    ({"prompt": [1], "max_tokens": 128}, "both together may have 128"),
    ({"prompt": [1], "temperature": 0.7}, '"temperature" is 0.7; only 0 is supported; leave'),
    ({"prompt": [1], "stop": ["a"]}, '"stop" is not supported; leave it out'),
    ({"prompt": [1], "max_completion_tokens": 0}, "an integer of at least 1"),
    ({"prompt": [1], "stream": 1}, '"stream" must be true or false'),
    ({"prompt": [1], "stream_options": 1}, '"stream_options" a JSON object'),
]


def test_serve_answers_or_refuses_each_request():
    with served() as post, ThreadPoolExecutor() as pool:
        requests = [{"prompt": prompt, "max_tokens": 3} for prompt in PROMPTS]
        wrong = [(pool.submit(post, request), message) for request, message in REFUSED]
        answers = list(pool.map(post, requests))
        for answer, message in wrong:
            assert answer.result()[0] == 400
            assert message in answer.result()[1]
        assert "there is no /v2; POST has" in post({}, "/v2")[1]
        for length in ("-1", "x", "99999999999"):
            assert post(b"{}", "/v1/completions", **{"Content-Length": length})[0] == 400
    assert answers == [(200, continued(prompt, 3)) for prompt in PROMPTS]


def test_serve_takes_many_clients(capfd, monkeypatch):
    """All clients connect before one is accepted. Requests of closed clients are cancelled."""
    accepting = threading.Event()
    kind = example("serve").Server
    monkeypatch.setattr(kind, "verify_request", lambda *_: accepting.wait(HANG_SECONDS))
    with served() as post:
        manager = post.server.RequestHandlerClass.batches._manager
        cancelled, cancel = [], manager.cancel_request
        manager.cancel_request = lambda name: cancelled.append(name) or cancel(name)
        request, expected = {"prompt": PROMPTS[0], "max_tokens": 2}, continued(PROMPTS[0], 2)
        long = request | {"max_tokens": 120}
        clients = [post.connect(request) for _ in range(128)]
        leaving = [post.connect(long | {"stream": n % 2 > 0}) for n in range(8)]
        accepting.set()
        for client in leaving[1::2]:
            assert next(events(client))["choices"][0]["finish_reason"] is None
        for client in leaving:
            client.close()
        for client in clients:
            assert json.load(client.getresponse())["choices"][0]["token_ids"] == expected
            client.close()
        assert post(request)[0] == 200
        assert any(len(cancelled) == 8 or time.sleep(0.05) for _ in range(200))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("chat", [False, True])
def test_serve_streams(chat):
    name = "messages" if chat else "prompt"
    request = {name: [{"role": "user", "content": "Hi"}] if chat else "Hi", "max_tokens": 6}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with served(Letters()) as post:
        assert post(request, path) == (200, expected := continued([*b"Hi"], 6))
        with closing(post.connect(request | options, path)) as client:
            *parts, usage, end = events(client)
    answer = example("serve").Answer(Letters(), "tiny", chat, 2)
    assert [answer.add([byte], False) for byte in "é".encode()] == ["", "é"]
    choices = [part["choices"][0] for part in parts]
    assert [token for choice in choices for token in choice["token_ids"]] == expected
    text = "".join(choice["delta"]["content"] if chat else choice["text"] for choice in choices)
    assert text == Letters().decode(expected)
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert parts[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert (usage["choices"], usage["usage"]["total_tokens"], end) == ([], 8, "[DONE]")


def test_serve_ends_at_token_0():
    """The weights are swapped so that token 0 is the second token."""
    model, (first, second) = tiny_llama(), continued(PROMPTS[0], 2)
    model.config.eos_token_id = 0
    weight = model.lm_head.weight.data
    weight[[0, second]] = weight[[second, 0]]
    with served(model=model) as post:
        request = {"prompt": PROMPTS[0], "max_tokens": 9}
        assert post(request) == (200, [first, 0])


def test_serve_shares_prefixes(monkeypatch):
    from transformers.generation.continuous_batching import PagedAttentionCache

    matches, search = [], PagedAttentionCache.search_prefix_match

    def noted(self, *arguments):
        matches.append(search(self, *arguments))
        return matches[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", noted)
    serve = example("serve")
    config = partial(serve.ContinuousBatchingConfig, page_size=16)
    monkeypatch.setattr(serve, "ContinuousBatchingConfig", config)
    prompt = [*range(40)]
    with served() as post:
        for tokens in (prompt, [*prompt[:35], 9]):
            assert post({"prompt": tokens, "max_tokens": 2}) == (200, continued(tokens, 2))
    assert matches == [0, 32]


def test_serve_says_that_its_scheduler_has_ended(monkeypatch):
    monkeypatch.setattr(example("serve").Handler, "check", lambda *_: None)
    with served() as post:
        status, error = post({"prompt": [256]})
        assert status >= 500
        assert error
        assert post({"prompt": [1]}) == (503, "the server has stopped generating: restart it")


def test_train_gpt_learns(capsys, tmp_path):
    train_gpt = example("train_gpt")
    losses = train_gpt.main(["--steps", "4", "--batch", "2", "--length", "32"])
    assert losses[-1] < losses[0]
    assert "step 4/4: loss " in capsys.readouterr().out
    (tmp_path / "byte.txt").write_text("x\n\n")
    with pytest.raises(SystemExit):
        train_gpt.main(["--text", str(tmp_path / "byte.txt")])
    assert "byte.txt has no document of two bytes or more" in capsys.readouterr().err
    model = train_gpt.GPT()
    parts = train_gpt.documents("one\n\nx\n\nand another\n\nthree", 512)
    assert [len(part) for part in parts] == [3, 11, 5]
    with torch.no_grad():
        packed = (train_gpt.packed(each, "cpu") for each in (parts, *([part] for part in parts)))
        logits = [model(inputs, bounds, longest) for inputs, _, bounds, longest in packed]
    torch.testing.assert_close(logits[0], torch.cat(logits[1:]))


def calls_by_target(watch):
    ours = sum(calls for call, calls in watch.seen.items() if call.goes_to == OURS)
    return ours, watch.seen.total() - ours


def test_train_lora_has_the_losses_of_the_native_backend(tmp_path):
    train_lora = example("train_lora")
    losses = {}
    for backend, expected in (("metal_attn", (17, 0)), ("native", (0, 17))):
        with Watch() as watch:
            options = ["--steps", "2", "--backend", backend, "--out", str(tmp_path / backend)]
            losses[backend] = train_lora.main(options)
        assert calls_by_target(watch) == expected
    assert losses["metal_attn"] == pytest.approx(losses["native"], abs=1e-4)
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(tmp_path / "metal_attn" / "pytorch_lora_weights.safetensors")
    assert any(weight.abs().max() > 0 for name, weight in weights.items() if "lora_B" in name)


def test_image_pipeline_compares_both_backends(tmp_path):
    image_pipeline = example("image_pipeline")
    with Watch() as watch:
        comparison = image_pipeline.main(["--size", "16", "--out", str(tmp_path)])
    # Two steps and the decoder with each backend, and the step that is explained.
    assert calls_by_target(watch) == (2 * 8 + 1 + 8, 2 * 8 + 1)
    assert comparison.difference < 1e-4
    assert comparison.calls == 8
    # 4 heads of 4 x 4 queries and keys, in float32
    assert (comparison.scores, comparison.statistics) == (4 * 16 * 16 * 4, 4 * 16 * 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metal_attn.png", "native.png"]
