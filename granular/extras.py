"""Optional dependencies, imported where they are used."""

import importlib
from typing import Any

from granular.errors import MissingExtraError


def need(module: str, extra: str) -> Any:
    """An optional module.

    Raises:
      MissingExtraError: if it is not installed; it names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition('.')[0]
        raise MissingExtraError(f"{package} is not installed: pip install 'granular[{extra}]'") from error
