"""Chat with a Hugging Face model that keeps its static cache between the turns.

    python docs/examples/chat.py --model some/model
    python docs/examples/chat.py --say "Hello" --say "And now?"

Without --model a tiny random Llama answers with random bytes. Without --say the lines come from
the keyboard; an empty line or Ctrl-D ends the chat.
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


class Full(ValueError):
    """The conversation no longer fits into the cache."""


class Chat:
    """A conversation: its tokens, and their cache. Without a tokenizer each byte is a token."""

    def __init__(self, model: Any, tokenizer: Any, length: int) -> None:
        self.model, self.tokenizer, self.length = model, tokenizer, length
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.tokens: list[int] = []

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer.encode(text))
        turn = [{"role": "user", "content": text}]
        options = {"add_generation_prompt": True, "return_dict": False}
        return list(self.tokenizer.apply_chat_template(turn, **options))

    def decode(self, tokens: list[int]) -> str:
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def answer(self, text: str, most: int) -> str:
        """The model's answer, of at most `most` tokens. The model reads only new tokens."""
        tokens = self.tokens + self.encode(text)
        if len(tokens) + most > self.length:
            raise Full(
                f"the conversation has {len(tokens)} tokens and the answer up to {most}; the cache "
                f"holds {self.length}: start again with a larger --length"
            )
        ids = torch.tensor([tokens], device=self.model.device)
        made: Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache,
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            disable_compile=True,
        )
        self.tokens = made[0].tolist()
        return self.decode(self.tokens[len(tokens) :])


def typed() -> Iterator[str]:
    """Lines from the keyboard up to an empty one, Ctrl-D or Ctrl-C."""
    try:
        while line := input("> "):
            yield line
    except (EOFError, KeyboardInterrupt):
        print()


def chat(model: Any, tokenizer: Any, turns: Iterable[str], length: int, most: int) -> Chat:
    """Answer each turn on the best device, and show which attention ran."""
    with best_device() as device:
        conversation = Chat(enable(model).to(device), tokenizer, length)
        for text in turns:
            start = time.perf_counter()
            with record_routes() as routes:
                print(conversation.answer(text, most))
            calls, seconds = routes.kernel.total(), time.perf_counter() - start
            held = len(conversation.tokens)
            print(f"[{calls} attentions on {device}, {held} of {length} tokens, {seconds:.1f} s]")
    return conversation


def main(arguments: list[str] | None = None) -> Chat:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--say", action="append", metavar="TEXT", help="a turn; can be repeated")
    parser.add_argument("--length", type=int, default=128, help="tokens in total (default: 128)")
    parser.add_argument("--most", type=int, default=16, help="new tokens per turn (default: 16)")
    options = parser.parse_args(arguments)
    if min(options.length, options.most) < 1:
        parser.error("--length and --most must be at least 1")
    model, tokenizer = tiny_llama(), None
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    turns = typed() if options.say is None else options.say
    try:
        return chat(model, tokenizer, turns, options.length, options.most)
    except Full as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
