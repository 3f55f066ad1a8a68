"""Sphinx extension of the documentation site.

- Files outside docs/ (the README, the changelog, the examples) appear in pages with ``{include}`` and ``{examples}``
  blocks. Links are those of the repository: they lead to the same place on GitHub and in the site.
- ``.. command-line::`` shows the help of each command.
- The search is over sections and API entries instead of pages: a message pasted from a traceback leads to its section.
"""

import builtins
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from numpy.typing import ArrayLike
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import stringify_annotation

LOGGER = logging.getLogger(__name__)
DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
BLOCK = re.compile(r'^```\{(include|examples)\} (\S+)\n```$', re.MULTILINE)
CODE = re.compile(r'(^```.*?^```$|`[^`\n]+`)', re.MULTILINE | re.DOTALL)
LINK = re.compile(r'\]\((?!\w+:)([^()#\s]+)(#[^()\s]*)?\)')


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Insert the files that a page includes, and lead links to pages of the site."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == '.md':
        source[0] = BLOCK.sub(lambda block: included(app.env, path, block), relink(source[0], path, path))


def included(env: BuildEnvironment, page: Path, block: re.Match[str]) -> str:
    """Return the text of an ``{include}`` or ``{examples}`` block."""
    kind, name = block.groups()
    path = (page.parent / name).resolve()
    if kind == 'examples':
        files = sorted(path.glob('*.py'))
        text = '\n\n'.join(f'## {file.name}\n\n```python\n{file.read_text()}```' for file in files)
    else:
        files, text = [path], path.read_text()
    for file in files:
        env.note_dependency(str(file))
    return relink(text, path, page)


def relink(text: str, origin: Path, page: Path) -> str:
    """Change the links of a file of the repository to those of the page that shows it."""
    pieces = CODE.split(text)
    return ''.join(
        piece if i % 2 else LINK.sub(lambda link: f']({target(link, origin, page)})', piece)
        for i, piece in enumerate(pieces)
    )


def target(link: re.Match[str], origin: Path, page: Path) -> str:
    """Return the address of a link within the site."""
    path, anchor = (origin.parent / link[1]).resolve(), link[2] or ''
    if path == ROOT / 'README.md':
        path = DOCS / 'index.md'
    elif path.parent == ROOT and path.suffix == '.md':
        path = DOCS / 'project' / f'{path.stem.lower()}.md'
    elif path == ROOT / 'examples':
        path = DOCS / 'project' / 'examples.md'
    elif path.parent == ROOT / 'examples':
        anchor = '#' + path.name.replace('.', '')
        path = DOCS / 'project' / 'examples.md'
    if not path.is_relative_to(DOCS) or not path.exists():
        LOGGER.warning('%s: %s is not in the site', origin, link[1])
    return os.path.relpath(path, page.parent) + anchor


class CommandLine(SphinxDirective):
    """The commands of the command line, each with its help."""

    def run(self) -> list[nodes.Node]:
        os.environ.update(COLUMNS='100', TERMINAL_WIDTH='100', NO_COLOR='1')
        typer = importlib.import_module('typer')
        for module in ('edit', 'measuring', 'transfers'):
            importlib.import_module(f'granular.cli.{module}')
        group = typer.main.get_command(importlib.import_module('granular.cli.commands').app)
        context = group.make_context('granular', [], resilient_parsing=True)
        sections: list[nodes.Node] = []
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            section = nodes.section(ids=[name], names=[name])
            text = command.get_help(type(context)(command, info_name=name, parent=context))
            section += [nodes.title('', f'granular {name}'), nodes.literal_block(text, text, language='text')]
            self.state.document.note_explicit_target(section)
            sections.append(section)
        return sections


def accept_foreign(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.Node | None:
    """Show references without a link where there is no page: types in signatures, Python, and other libraries."""
    if node.get('refdomain') != 'py':
        return None
    name = node['reftarget'].split('.')[0]
    foreign = hasattr(builtins, name) or name in sys.stdlib_module_names or name in ('jax', 'google', 'torch', 'numpy')
    parent = node.parent
    while parent is not None and not isinstance(parent, addnodes.desc_signature | nodes.field_name):
        parent = parent.parent
    return content if foreign or parent is not None else None


def shorten_types(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Name the union that ``ArrayLike`` is, in a signature; defaults of dataclasses that are computed are dots."""
    union = stringify_annotation(ArrayLike, 'smart')
    return arguments and arguments.replace(union, 'ArrayLike').replace('<factory>', '...'), result


def prepare_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring for napoleon.

    An error refers to its remedies. The fields of IOConfig are listed with the descriptions that the class has.
    """
    if what == 'exception':
        lines += ['', f'`Causes and remedies <../troubleshooting.html#{obj.__name__.lower()}>`__']
    if what in ('attribute', 'data', 'property'):
        lines.insert(0, '\\')  # otherwise napoleon takes a sentence with a colon for a type with a description
    if name == 'granular.config.IOConfig':
        lines += ['', 'Attributes:']
        for field in obj.__dataclass_fields__.values():
            default = field.default_factory()
            lines.append(f'  {field.name}: {field.metadata["doc"]}. By default {default!r}.')


def entries(env: BuildEnvironment) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield page, anchor, title, titles above and text of each section and API entry of the site."""
    for docname in sorted(env.found_docs):
        pending: list[tuple[nodes.Element, str, str, tuple[str, ...]]] = []
        pending.append((env.get_doctree(docname), '', '', ()))
        while pending:
            node, anchor, title, above = pending.pop()
            text: list[str] = []
            collect(node, text, pending, (*above, title) if title else above)
            if title:
                yield docname, anchor, title, ' / '.join(above), ' '.join(' '.join(text).split())


def collect(node: nodes.Element, text: list[str], pending: list[Any], above: tuple[str, ...]) -> None:
    """Collect the text of a node without its sections and entries, which become pending."""
    for child in node.children:
        if isinstance(child, nodes.section):
            # The first heading of a page is the page itself.
            pending.append((child, child['ids'][0] if above else '', child[0].astext(), above))
        elif isinstance(child, addnodes.desc) and child[0].get('ids'):
            signature = child[0]
            pending.append((child, signature['ids'][0], signature.get('fullname') and signature['ids'][0], above[:1]))
        elif isinstance(child, nodes.title | nodes.comment | addnodes.index | addnodes.toctree):
            continue
        elif isinstance(child, nodes.TextElement):
            text.append(child.astext())
        elif isinstance(child, nodes.Element):
            collect(child, text, pending, above)


def write_search(app: Sphinx, error: Exception | None) -> None:
    """Write the entries that the search page loads."""
    if error is None and app.builder.format == 'html':
        rows = ',\n'.join(json.dumps(entry, ensure_ascii=False) for entry in entries(app.env))
        (Path(app.outdir) / '_static' / 'entries.js').write_text(f'const ENTRIES = [\n{rows}\n];\n')


def add_search(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Load the search on its page."""
    if pagename == 'search':
        app.add_js_file('entries.js', loading_method='defer')
        app.add_js_file('search.js', loading_method='defer')


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.add_directive('command-line', CommandLine)
    app.connect('source-read', read_page)
    app.connect('missing-reference', accept_foreign)
    app.connect('autodoc-process-signature', shorten_types)
    app.connect('autodoc-process-docstring', prepare_docstring, priority=100)
    app.connect('html-page-context', add_search)
    app.connect('build-finished', write_search)
    return {'version': '1', 'parallel_read_safe': True, 'parallel_write_safe': True}
