"""Rules for a shader's tokens: words that Metal lacks, and declarations of kernels."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from ..metal.lexer import TokenList
from ..metal.rewrite import declarator_end
from .tree_rules import Finding

BANNED_WORDS = {
    "asm": "assembly",
    "__asm": "assembly",
    "__asm__": "assembly",
    "assert": "output",
    "delete": "heap",
    "double": "double",
    "dynamic_cast": "rtti",
    "extern": "extern",
    "goto": "goto",
    "new": "heap",
    "printf": "output",
    "std": "std",
    "thread_local": "thread-local",
    "throw": "exception",
    "try": "exception",
    "typeid": "rtti",
    "virtual": "virtual",
    "wchar_t": "wchar",
}

Place = tuple[int, str, str]  # token index, rule, message


def check_tokens(tokens: TokenList) -> Iterator[Finding]:
    """Findings in `tokens`, which are preprocessed Metal."""
    for rule in TOKEN_RULES:
        for index, name, message in rule(tokens):
            token = tokens[index]
            yield Finding(token.file, token.line, name, message)


def banned_words(tokens: TokenList) -> Iterator[Place]:
    for index in range(len(tokens)):
        word = tokens.text(index)
        if word == "long" == tokens.text(index + 1):
            yield index, "long-long", "`long long` is not in Metal: `long` has 64 bits"
        is_deleted_function = word == "delete" and tokens.text(index - 1) == "="
        if tokens[index].kind == "name" and word in BANNED_WORDS and not is_deleted_function:
            yield index, BANNED_WORDS[word], f"`{word}` is not in Metal"


def kernel_signatures(tokens: TokenList) -> Iterator[Place]:
    for declared, opening in _kernels(tokens):
        words = [tokens.text(i) for i in range(declared, opening)]
        if "void" not in words[:-1]:
            yield opening - 1, "kernel-returns", f"kernel `{words[-1]}` must return void"
        for start, end in tokens.split(opening + 1, tokens.close(opening)):
            parameter = [tokens.text(i) for i in range(start, end)]
            if not any(pair == ("[", "[") for pair in pairwise(parameter)):
                message = f"kernel parameter `{tokens.source(start, end)}` has no [[attribute]]"
                yield start, "kernel-parameter", message
            elif "thread" in parameter:
                message = "a kernel parameter must point to device, constant or threadgroup memory"
                yield start, "kernel-parameter", message


def threadgroup_variables(tokens: TokenList) -> Iterator[Place]:
    braces = [tokens.close(opening) + 1 for _, opening in _kernels(tokens)]
    bodies = [range(at, tokens.close(at)) for at in braces if tokens.text(at) == "{"]
    for index in tokens.find("threadgroup"):
        before = tokens.text(tokens.skip(index - 1, ("const", "volatile", "alignas"), -1))
        declarator = declarator_end(tokens, index)
        if declarator is None or before not in (";", "{", "}", ")", ""):
            continue  # a parameter or a cast
        if not any(index in body for body in bodies):
            message = "a threadgroup variable must be declared in a kernel"
            yield index, "threadgroup-scope", message
        end_of_name = tokens.seek(declarator, ("=", ";"))
        if tokens.text(declarator) == "{" or tokens.text(end_of_name) == "=":
            message = "a threadgroup variable cannot have an initialiser"
            yield index, "threadgroup-initialiser", message


def template_asserts(tokens: TokenList) -> Iterator[Place]:
    """Assertions in templates that do not depend on the template's parameters.

    clang before 17 evaluates such an assertion even if the template is never used.
    """
    parameters: dict[int, set[str]] = {}  # parameters of all templates around each assertion
    for index in tokens.find("template"):
        if tokens.text(index + 1) != "<" or tokens.text(index + 2) == ">":
            continue
        end = tokens.close_angle(index + 1)
        at = tokens.seek(end, (";", "{"))
        declared = tokens.split(index + 2, end)
        names = {tokens.text(tokens.next(start, ("=", ",", ">")) - 1) for start, _ in declared}
        last = tokens.close(at) if tokens.text(at) == "{" else at
        for inside in range(at, last):
            if tokens.text(inside) == "static_assert":
                parameters.setdefault(inside, set()).update(names)
    for index, names in parameters.items():
        condition = range(index + 2, tokens.close(index + 1))
        if names.isdisjoint(tokens.text(i) for i in condition):
            message = "this does not depend on template parameters: some compilers always check it"
            yield index, "template-assert", message


def _kernels(tokens: TokenList) -> Iterator[tuple[int, int]]:
    """For each kernel, the first token after `kernel` and the `(` of the parameters."""
    for index in tokens.find("kernel"):
        at = index + 1
        if tokens.text(index - 1) in ("[", ","):  # [[kernel, ...]] void f(
            start = index - 1
            while tokens.text(start) != "[" or tokens.text(start - 1) != "[":
                start -= 1
            at = tokens.close(start - 1) + 1
        opening = tokens.seek(at, ("(", ";", "{"))
        if tokens.text(at) != "decltype" and tokens.text(opening) == "(":  # not an instantiation
            yield at, opening


TOKEN_RULES: list[Callable[[TokenList], Iterator[Place]]] = [
    banned_words,
    kernel_signatures,
    threadgroup_variables,
    template_asserts,
]
