"""Values, types and counts in English, as the simulator has them: it imports nothing from here."""

from .simulator.wording import count_text, type_text, value_text, with_article

__all__ = ["count_text", "type_text", "value_text", "with_article"]
