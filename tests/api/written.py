"""What is written twice for type checkers, the second time by ``python -m tests.api.written``.

Packages import their names on first access, by ``lazy_names``; type checkers see imports of them. Operations of a
MapDataset return one of their own API: what those of the async API return is repeated in the sync one.
"""

import ast
import re

from tests import ROOT

PACKAGES = ('granular/__init__.py', 'granular/aio/__init__.py', 'granular/grain/__init__.py')
IMPORTS = re.compile(r'(?<=\nif TYPE_CHECKING:\n).*?(?=else:\n)', re.DOTALL)
OPERATIONS = re.compile(r'(?<=\n    if TYPE_CHECKING:  # the types of elements\n).*?(?=\n\n\n)', re.DOTALL)
SHADOWING = {'open': '  # noqa: A004'}


def imports(text):
    """Return the imports of the names that a package passes to ``lazy_names``."""
    (homes,) = (
        ast.literal_eval(node.args[1])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'lazy_names'
    )
    names = sorted((module, name) for module, names in homes.items() for name in names.split())
    return ''.join(f'    from {module} import {name} as {name}{SHADOWING.get(name, "")}\n' for module, name in names)


def written():
    """Yield each file with such code, and the text that it is to have."""
    for package in PACKAGES:
        text = (ROOT / package).read_text()
        yield ROOT / package, IMPORTS.sub(lambda _, text=text: imports(text), text)
    operations = OPERATIONS.search((ROOT / 'granular/aio/pipeline/map_dataset.py').read_text())
    file = ROOT / 'granular/sync/pipeline.py'
    yield file, OPERATIONS.sub(lambda _: operations[0], file.read_text())


if __name__ == '__main__':
    for file, text in written():
        file.write_text(text)
