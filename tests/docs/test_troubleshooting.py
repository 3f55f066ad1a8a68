"""docs/troubleshooting.md has an entry for each error class, and quotes messages as the code writes them."""

import ast
import re

from granular import errors
from tests import ROOT

PAGE = (ROOT / 'docs' / 'troubleshooting.md').read_text()
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]
MESSAGES = {' '.join(text.split()) for text in re.findall(r'`([^`]*…[^`]*)`', PAGE)}
# Messages of Python and of OpenSSL.
FOREIGN = {
    'DeprecationWarning: This process … is multi-threaded, use of fork() may lead to deadlocks in the child',
    '… certificate verify failed …',
    '… Too many open files',
}


def template(node):
    """Return the text of a string, with ``…`` for what is inserted into it."""
    if isinstance(node, ast.JoinedStr):
        return ''.join(part.value if isinstance(part, ast.Constant) else '…' for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r'%(\.\d)?[sdf]', '…', node.value)
    return ''


def pattern(message):
    return '.*'.join(re.escape(piece.strip()) for piece in message.split('…') if piece.strip())


def test_each_error_class_has_an_entry():
    assert re.findall(r'^### (\w+Error)$', PAGE, re.MULTILINE) == CLASSES


def test_quoted_messages_are_those_of_the_code():
    nodes = (node for path in (ROOT / 'granular').rglob('*.py') for node in ast.walk(ast.parse(path.read_text())))
    strings = '\n'.join({' '.join(template(node).split()) for node in nodes})
    assert not [message for message in MESSAGES - FOREIGN if not re.search(pattern(message), strings)]
