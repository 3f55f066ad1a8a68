"""docs/troubleshooting.md has an entry for each error class, and all pages quote messages as the code writes them.

A quoted message is text in backticks of two words or with ``…``, which stands for what a page leaves out, that is
neither Python nor a command.
"""

import ast
import functools
import re

import pytest

from granular import errors
from tests import ROOT

PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')])
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]
COMMANDS = (
    'aws', 'gcloud', 'granular', 'hf', 'make', 'pip', 'pre-commit', 'py-spy', 'python', 'pyright', 'find', 'sh',
    'torchrun', 'ulimit', '.venv', '--',
)  # fmt: skip
# Messages of Python, of OpenSSL and of filelock.
FOREIGN = {
    'DeprecationWarning: This process … is multi-threaded, use of fork() may lead to deadlocks in the child',
    '… certificate verify failed …',
    '… Too many open files',
    "object of type 'IterDataset' has no len()",
    'os.fork is unsafe while filelock is changing descriptor ownership',
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def quotes(page):
    """Return the messages that a page quotes."""
    prose = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = (' '.join(quote.split()) for quote in re.findall(r'`([^`]+)`', prose))
    return {text for text in quoted if is_message(text)} - FOREIGN


def is_message(text):
    words = re.findall(r"(?<![^\s(])[A-Za-z'-]+(?![^\s:;,.)])", text)
    if len(words) < 2 and not ('…' in text and ' ' in text):
        return False
    return not text.startswith((*COMMANDS, 'async ')) and not is_python(text)


def is_python(text):
    for end in ('', ': pass', ' x'):
        try:
            ast.parse(text.replace('…', '...') + end)
        except SyntaxError:
            continue
        return True
    return False


def template(node):
    """Return the text of a string, with ``…`` for what is inserted into it."""
    if isinstance(node, ast.JoinedStr):
        return ''.join(part.value if isinstance(part, ast.Constant) else '…' for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r'%(\.\d)?[sdf]', '…', node.value)
    return ''


@functools.cache
def templates():
    """Return the strings of the code without its docstrings."""
    found = set()
    for path in (ROOT / 'granular').rglob('*.py'):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        bodies = (node.body for node in nodes if isinstance(node, DOCUMENTED))
        docstrings = {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}
        found |= {' '.join(template(node).split()) for node in nodes if node not in docstrings}
    return found


def pattern(text):
    return '.*'.join(re.escape(piece.strip()) for piece in text.split('…') if piece.strip())


def is_of_the_code(quote):
    """Return whether a string of the code contains a quote, or gives it with its placeholders filled."""
    if any(re.search(pattern(quote), text) for text in templates()):
        return True
    plain = [text for text in templates() if '…' in text and len(text.replace('…', '')) > len(quote) / 2]
    return any(re.fullmatch('.*'.join(map(re.escape, text.split('…'))), quote) for text in plain)


def test_each_error_class_has_an_entry():
    page = (ROOT / 'docs/troubleshooting.md').read_text()
    assert re.findall(r'^### (\w+Error)$', page, re.MULTILINE) == CLASSES


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_quoted_messages_are_those_of_the_code(page):
    assert [quote for quote in quotes(page) if not is_of_the_code(quote)] == []


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('`…: has no spec.json: …`', True),
        ('`attempt 3 failed, retrying in 0.41 s: …`', True),
        ('`was killed by SIGKILL`', True),
        ('`left alone: …`', True),
        ('`no trouble`', False),
        ('`…: is no dataset at all: …`', False),
        ('`A page, a window, or a bag of one key.`', False),
        ('`reader[i]`, `make test` and `for element in iterator` are no messages', None),
    ],
)
def test_quotes_are_compared_with_strings_and_not_with_docstrings(text, expected, tmp_path):
    (tmp_path / 'page.md').write_text(text)
    found = quotes(tmp_path / 'page.md')
    assert [is_of_the_code(quote) for quote in found] == ([] if expected is None else [expected])
