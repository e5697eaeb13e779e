"""The public names of a package, each imported at its first use.

They are listed once, as the imports that a type checker reads:

    if TYPE_CHECKING:
        from counterpoint.tune.trial import Trial as Trial
    else:
        __all__, __getattr__, __dir__ = public_names(__name__)

So `import tune` imports no module of it. An editor and mypy know every name with its type, and find a misspelt one.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def public_names(module: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__all__`, `__getattr__` and `__dir__` of a module, which calls this while it is imported.

    `from package import *` in the list stands for the `__all__` of that package. `from module import part`, where `module` is
    the module itself, stands for a module inside it. Raises `ImportError` where the source is not at hand.
    """
    found = sys.modules[module]
    origin = {name: (home, original) for name, home, original in _listed(module)}

    def get(name: str) -> Any:
        if name not in origin:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=found)
        home, original = origin[name]
        if home == module:
            return importlib.import_module(f"{home}.{original}")
        return getattr(importlib.import_module(home), original)

    return sorted(origin), get, lambda: sorted(origin)


def _listed(module: str) -> Iterator[tuple[str, str, str]]:
    """Yields each name, the module that has it, and what it is called there."""
    spec = sys.modules[module].__spec__
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(module)
    if source is None:
        raise ImportError(f"{module} has no source, which lists its public names", name=module)
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                    home = statement.module
                    for alias in statement.names:
                        if alias.name == "*":
                            yield from ((name, home, name) for name in importlib.import_module(home).__all__)
                        else:
                            yield alias.asname or alias.name, home, alias.name
