"""How a planted bug names the production code that it replaces: by reference, so that a rename is a type error."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Owner = type | ModuleType | dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function, a method or a property of production, and what a bug puts in its place."""

    right: Any
    wrong: Any

    def places(self) -> Iterator[tuple[Owner, Any]]:
        """Yield each owner of what is replaced, and its name there: a class, or the modules and tables that have it."""
        function: Any = self.right.fget if isinstance(self.right, property) else self.right
        *classes, name = function.__qualname__.split(".")
        if classes:
            yield vars(sys.modules[function.__module__])[classes[0]], name
            return
        for module in [module for key, module in sys.modules.items() if key.startswith("tensorhub_")]:
            for known, value in list(vars(module).items()):
                if value is function:
                    yield module, known
                elif isinstance(value, dict):
                    yield from ((value, key) for key, each in value.items() if each is function)
