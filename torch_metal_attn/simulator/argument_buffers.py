"""Argument buffers, which the simulator refuses: structs with pointers as arguments of kernels."""

import re

from .kernels import Kernel
from .lexer import TokenList
from .objects import ADDRESS_SPACES, structs

REASON = (
    "an argument buffer holds pointers, which tensors cannot: pass each buffer as an argument "
    "of the kernel"
)


def refuse_argument_buffers(tokens: TokenList, kernels: list[Kernel]) -> None:
    """Raise MetalSourceError for `[[id(n)]]`, and for a kernel's struct that has pointers."""
    for index in tokens.find("id"):
        if tokens.text(index - 2) == "[" == tokens.text(index - 1):
            raise tokens.error(index, f"the attribute id({tokens.text(index + 2)}): {REASON}")
    used = {
        word
        for kernel in kernels
        for parameter in kernel.parameters
        if parameter.kind == "buffer"
        for word in re.findall(r"\w+", parameter.type)
    }
    for name, body, end in structs(tokens):
        if name not in used:
            continue
        for index in range(body + 1, end):
            if tokens.text(index) in ADDRESS_SPACES and _declares_pointer(tokens, index):
                raise tokens.error(index, f"struct {name} of a kernel's argument: {REASON}")


def _declares_pointer(tokens: TokenList, index: int) -> bool:
    """Whether a field that is a pointer or a reference is declared at `index`."""
    end = tokens.next(index, (";", "(", ")", "{"))
    words = {tokens.text(at) for at in range(index, end)}
    return tokens.text(end) == ";" and bool(words & {"*", "&"})
