"""Adds instructions that find, at run time, which of several private variables an address is in."""

from collections.abc import Callable, Iterable, Set

from .ir import split, typed
from .places import Places, addresses_of

# (address, size in bytes) of a variable, as operands in IR; None if unknown.
Variable = tuple[str, str] | None
NOWHERE = frozenset({"null", "undef", "poison"})


class Choices:
    """The phis and selects of addresses whose accesses are checked."""

    def __init__(
        self,
        checked: Iterable[str],
        mixed: Set[str],
        places: Places,
        variable: Callable[[str], Variable],
    ) -> None:
        """checked: the addresses of accesses. mixed: addresses that may be in several variables.

        variable: returns the variable of an address that is not mixed.
        """
        self.mixed, self.places, self.variable = mixed, places, variable
        self.addresses: dict[str, list[str]] = {}  # the operands of each choice
        pending = list(checked)
        for address in pending:
            name = self.beginning(address)
            op, rest = places.instruction(name)
            if name in mixed and name not in self.addresses and op in ("phi", "select"):
                self.addresses[name] = addresses_of(op, rest)
                pending += self.addresses[name]
        while unknown := [name for name in self.addresses if None in self.variables(name)]:
            for name in unknown:
                del self.addresses[name]

    def beginning(self, address: str) -> str:
        """The phi, select or variable from which an address is computed."""
        op, rest = self.places.instruction(address)
        return self.beginning(typed(split(rest)[1])[1]) if op == "getelementptr" else address

    def variables(self, name: str) -> list[Variable]:
        """The variable of each operand of a choice."""
        return [self.variable_of(address) for address in self.addresses[name]]

    def variable_of(self, address: str) -> Variable:
        """The variable that an address is in."""
        if address in NOWHERE:
            return "null", "0"
        if address not in self.mixed:
            return self.variable(address)
        name = self.beginning(address)
        if name not in self.addresses:
            return None
        return f"%msl.base.{name[1:]}", f"%msl.size.{name[1:]}"

    def lines(self, name: str) -> list[str]:
        """Instructions that choose the variable's address and size. They follow the choice."""
        if name not in self.addresses:
            return []
        op, rest = self.places.instruction(name)
        variables = [variable for variable in self.variables(name) if variable]
        lines = []
        for at, (result, of_type) in enumerate((("base", "ptr"), ("size", "i32"))):
            if op == "phi":
                blocks = [split(pair[1:-1])[1] for pair in split(typed(rest)[1])]
                pairs = zip(variables, blocks, strict=True)
                parts = [f"[ {variable[at]}, {block} ]" for variable, block in pairs]
                choice = f"phi {of_type} {', '.join(parts)}"
            else:
                parts = [f"{of_type} {variable[at]}" for variable in variables]
                choice = f"select {split(rest)[0]}, {', '.join(parts)}"
            lines.append(f"  %msl.{result}.{name[1:]} = {choice}")
        return lines
