"""Findings of the shader lint."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One place in a shader that breaks a rule."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"
