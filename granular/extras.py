"""Optional dependencies, imported where they are used; one that is missing is an error that names its extra."""

import importlib
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
