"""Deferred imports: optional dependencies, and the modules of this package, which are imported on first use."""

import atexit
import contextlib
import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from granular.errors import MissingExtraError

_NAME: Final = 'granular-stream'

_at_exit: Final = contextlib.ExitStack()
atexit.register(_at_exit.close)
at_exit: Final = _at_exit.callback
"""Registers a function for the exit of the interpreter: before those registered so earlier, but after all handlers of
the program, which may still read and write, although it registered them before the function's module was imported."""


def import_extra(module: str, extra: str, purpose: str | None = None) -> Any:
    """Import a module of an extra; raise ``MissingExtraError`` with the purpose, and the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = purpose or f'{module} cannot be imported'
        told = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition('.')[0])
        raise MissingExtraError(f'{reason}: {_install_command(extra)}') from None if told else error


def _install_command(extra: str) -> str:
    """Return the command that installs an extra from where this package came from, which may be no index."""
    import json
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


def is_masked(array_type: type) -> bool:
    """Return whether a type is that of arrays with a mask, without importing it, which takes long."""
    return issubclass(array_type, getattr(sys.modules.get('numpy.ma'), 'MaskedArray', ()))


def lazy_names(package: str, homes: Mapping[str, str]) -> None:
    """Let a package import its names on first access (PEP 562), and list them in ``__all__`` and ``dir``.

    Args:
      package: name of the package.
      homes: for each module, the names it provides, separated by spaces; the package itself for its modules.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in modules:
            from granular._support.other_names import no_module_name  # which most programs need not import

            raise no_module_name(package, name)
        if modules[name] == package:
            return importlib.import_module(f'{package}.{name}')
        value = namespace[name] = getattr(importlib.import_module(modules[name]), name)
        return value

    names = sorted(modules)
    version = ['__version__'] if '__version__' in namespace else []
    namespace.update(__all__=names, __getattr__=find, __dir__=lambda: names + version)
