"""Stores, data sources and commands of other packages, which these name as entry points.

``granular.stores`` has subclasses of ``Store`` by their scheme, ``granular.sources`` functions that open a file by the
suffix of its name, without the dot, and ``granular.commands`` functions with the options of typer, by their name.
"""

import functools
from collections.abc import Mapping
from typing import Any

from granular.errors import GranularError


@functools.cache
def plugins(group: str) -> Mapping[str, Any]:
    """Return the entry points of a group by their name, as they were when it was first asked for.

    Raises:
      GranularError: if two packages name the same.
    """
    from importlib.metadata import entry_points

    found: dict[str, Any] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise GranularError(f'{group}: {entry.name!r} is both {other.value} and {entry.value}: uninstall one')
    return found


def plugin(group: str, name: str) -> Any:
    """Return the object that an entry point names; None if there is none of that name.

    Raises:
      GranularError: if it cannot be imported.
    """
    entry = plugins(group).get(name)
    if entry is None:
        return None
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise GranularError(f'{group}: {name!r} is {entry.value}, which cannot be imported: {error}') from error
