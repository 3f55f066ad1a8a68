"""Deferred imports: optional dependencies, and parts of this package that few programs need."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from granular.errors import MissingExtraError


def missing(what: str, extra: str) -> MissingExtraError:
    """Return the error for an optional dependency that is not installed, with the command that installs it."""
    return MissingExtraError(f"{what}: pip install 'granular-stream[{extra}]'")


def need(module: str, extra: str) -> Any:
    """Import a module of an optional extra.

    Raises:
      MissingExtraError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(f'{module} cannot be imported', extra) from error


def later(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` (PEP 562) that imports some of its names on first access.

    Args:
      package: name of the package.
      homes: for each module, the names it provides, separated by spaces.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
