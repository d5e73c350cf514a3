"""The simulator's wording of values, types and counts, for the errors of all modules."""

from .simulator.wording import count_text, type_text, value_text, with_article

__all__ = ["count_text", "type_text", "value_text", "with_article"]
