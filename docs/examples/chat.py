"""Chat with a Hugging Face model whose keys and values stay in a static cache between the turns.

    python docs/examples/chat.py --model some/model
    python docs/examples/chat.py --say "Hello" --say "And now?"

Without --model a tiny random Llama answers, with bytes as its tokens: it shows the calls, and makes
no sense. Without --say the lines come from the keyboard; an empty one or Ctrl-D ends the chat.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

from torch_metal_attn.integrations.transformers import enable, record_routes
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tools.demo import tiny_llama


class Bytes:
    """A tokenizer for models without one: each byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Templated:
    """A model's own tokenizer, with its chat template if it has one."""

    def __init__(self, name: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(name)

    def encode(self, text: str) -> list[int]:
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer.encode(text))
        turn = [{"role": "user", "content": text}]
        found = self._tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_dict=True
        )
        return list(found["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class Full(ValueError):
    """The conversation no longer fits into the cache."""


class Chat:
    """A conversation: all its tokens, and a cache that holds those that the model has read."""

    def __init__(self, model: Any, tokenizer: Bytes | Templated, length: int) -> None:
        self.model, self.tokenizer, self.length = model, tokenizer, length
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.tokens: list[int] = []

    def answer(self, text: str, most: int) -> str:
        """The model's answer of at most `most` tokens. It reads only what is new. Raises Full."""
        tokens = self.tokens + self.tokenizer.encode(text)
        if len(tokens) + most > self.length:
            raise Full(
                f"the conversation has {len(tokens)} tokens and the answer up to {most}; the cache "
                f"holds {self.length}: start again with a larger --length"
            )
        given = torch.tensor([tokens], device=self.model.device)
        made: Tensor = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.cache,
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            disable_compile=True,
        )
        self.tokens = made[0].tolist()
        return self.tokenizer.decode(self.tokens[len(tokens) :])


def chosen(name: str | None) -> tuple[Any, Bytes | Templated]:
    """The named model with its tokenizer, or a tiny one."""
    if name is None:
        return tiny_llama(), Bytes()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.eval(), Templated(name)


def typed() -> Iterator[str]:
    """Lines from the keyboard up to an empty one, Ctrl-D or Ctrl-C."""
    try:
        while line := input("> "):
            yield line
    except (EOFError, KeyboardInterrupt):
        print()


def chat(
    model: Any, tokenizer: Bytes | Templated, said: Iterable[str], length: int, most: int
) -> Chat:
    """Answer each line on the best device, and show what ran."""
    with best_device() as device:
        conversation = Chat(enable(model).to(device), tokenizer, length)
        for text in said:
            start = time.perf_counter()
            with record_routes() as routes:
                print(conversation.answer(text, most))
            calls, seconds = routes.kernel.total(), time.perf_counter() - start
            held = len(conversation.tokens)
            print(f"[{calls} attentions on {device}, {held} of {length} tokens, {seconds:.1f} s]")
    return conversation


def main(arguments: list[str] | None = None) -> Chat:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Hugging Face model; a tiny random one if not given")
    parser.add_argument("--say", action="append", metavar="TEXT", help="a turn; can be repeated")
    parser.add_argument("--length", type=int, default=128, help="of the cache (default: 128)")
    parser.add_argument("--most", type=int, default=16, help="new tokens a turn (default: 16)")
    options = parser.parse_args(arguments)
    if min(options.length, options.most) < 1:
        parser.error("--length and --most must be at least 1")
    model, tokenizer = chosen(options.model)
    said = typed() if options.say is None else options.say
    try:
        return chat(model, tokenizer, said, options.length, options.most)
    except Full as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
