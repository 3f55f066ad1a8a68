"""Imports on the first use: each process imports all test modules, and few of the tests use PyTorch."""

import importlib
from collections.abc import Callable
from typing import Any


def imported(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls a class or function of a module, which it imports before."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **options)

    return call
