"""Deferred imports: optional dependencies, and parts of this package that few programs need."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from granular.errors import MissingExtraError

_NAME: Final = 'granular-stream'


def import_extra(module: str, extra: str, purpose: str | None = None) -> Any:
    """Import a module of an optional extra.

    Args:
      module: full name of the module.
      extra: the extra of this package that installs it.
      purpose: what needs it, for the error; by default, that the module cannot be imported.

    Raises:
      MissingExtraError: if it is not installed; the message contains the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = purpose or f'{module} cannot be imported'
        raise MissingExtraError(f'{reason}: {install_command(extra)}') from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where this package was installed from.

    An index may have no release of it, or another one.
    """
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        recorded = metadata.distribution(_NAME).read_text('direct_url.json')
    except metadata.PackageNotFoundError:
        recorded = None
    origin: dict[str, Any] = json.loads(recorded or '{}')
    url = origin.get('url', '')
    if 'vcs_info' in origin:
        version = origin['vcs_info']
        return f"pip install '{_NAME}[{extra}] @ {version['vcs']}+{url}@{version['commit_id']}'"
    if 'dir_info' in origin:
        editable = '-e ' if origin['dir_info'].get('editable') else ''
        return f"pip install {editable}'{url2pathname(urlsplit(url).path)}[{extra}]'"
    return f"pip install '{_NAME}[{extra}]{f' @ {url}' if url else ''}'"


def import_if_installed(module: str) -> Any:
    """Import an optional module. Returns None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
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
