"""What is imported where it is used: optional dependencies, and parts of this package that few programs need."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from granular.errors import MissingExtraError


def need(module: str, extra: str) -> Any:
    """A module that an extra brings.

    Raises:
      MissingExtraError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{module} cannot be imported: pip install 'granular[{extra}]'") from error


def later(package: str, names: Sequence[str], modules: Sequence[str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) that imports some of its names when they are first asked for.

    Args:
      package: its name.
      names: what it exports.
      modules: where those names come from that it does not have yet; they are imported in this order.
    """

    def find(name: str) -> Any:
        if name in names:
            for module in map(importlib.import_module, modules):
                if hasattr(module, name):
                    setattr(sys.modules[package], name, getattr(module, name))
                    return getattr(module, name)
        raise AttributeError(f'module {package!r} has no attribute {name!r}')

    return find
