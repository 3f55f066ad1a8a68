"""What is imported where it is used: optional dependencies, and parts of this package that few programs need."""

import importlib
import sys
from collections.abc import Callable, Mapping
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


def later(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) that imports some of its names when they are first asked for.

    Args:
      package: its name.
      homes: by module, the names that come from there, with spaces between them.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
