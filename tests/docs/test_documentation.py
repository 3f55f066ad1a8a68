"""Every code block of the README and of docs/ runs as a user would run it, or has a tag that says why not.

Each page runs in a process, an empty folder and empty buckets of its own (tests/support/pages.py). Blocks tagged
``python no-run`` and ``sh no-run`` need what the tests do not have: they are parsed, and counted in ``NOT_RUN``.
"""

import ast
import re

import click
import pytest

from tests import ROOT
from tests.support.interpreters import Interpreter
from tests.support.pages import Runner, blocks, command_group, commands, parse

# The pages of the guide; the index and the folders project and reference are those of the site.
DOCS = sorted(
    {path for folder in ('.', 'coming-from', 'recipes') for path in (ROOT / 'docs' / folder).glob('*.md')}
    - {ROOT / 'docs/index.md'}
)
PAGES = [ROOT / 'README.md', *DOCS]
RUNNING = [page for page in PAGES if {'python', 'sh', 'console'} & {block.tag for block in blocks(page)}]
LINKING = sorted([*ROOT.glob('*.md'), *DOCS])
TAGS = {'python', 'sh', 'console', 'text', 'toml', 'json', 'yaml'}
PROGRAM = """
import warnings
warnings.simplefilter('ignore')
warnings.simplefilter('default', ResourceWarning)
from tests.support.pages import main
main()
"""
# Blocks tagged ``no-run``.
NOT_RUN = {
    'frameworks.md': 1,
    'images-clips-episodes.md': 1,
    'moving.md': 1,
    'sources.md': 1,
    'view.md': 3,
}


@pytest.fixture(scope='module')
def page_interpreter():
    with Interpreter('tests.support.pages', 'botocore.session', 'PIL.Image', options=['-W', 'error']) as interpreter:
        yield interpreter


@pytest.mark.usefixtures('user_buckets', 'user_repository')
@pytest.mark.parametrize('page', RUNNING, ids=lambda page: page.name)
def test_examples_run(page, redis_server, tmp_path, monkeypatch, request):
    if 'az://my-container' in page.read_text():
        request.getfixturevalue('user_container')
    monkeypatch.setenv('GRANULAR_REDIS_URL', redis_server.url)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    torch = any('torch' in block.text for block in blocks(page) if block.tag == 'python')
    interpreter = request.getfixturevalue('learning_interpreter' if torch else 'page_interpreter')
    process = interpreter.run(PROGRAM, str(page.relative_to(ROOT)), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert 'ResourceWarning' not in process.stderr and 'Traceback' not in process.stderr, process.stderr


@pytest.mark.parametrize(
    'text, right',
    [
        ("```python\nprint('a', 1)  # a 1\n```", True),
        ("```python\nprint('a', 1)  # a 1: an explanation\n```", True),
        ('```python\nprint([1, 2, 3])  # [1, ...]\n```', True),
        ("```python\nprint('a', 1)  # a 2\n```", False),
        ('```python\nx = 1\n```\n\n```python\nprint(x)  # 1\n```', True),
        ('```console\n$ granular --version\n...\n```', True),
        ('```console\n$ granular --version\nnone\n```', False),
    ],
)
def test_output_is_compared(text, right, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(text + '\n')
    if right:
        Runner(page, {}).run()
    else:
        with pytest.raises(AssertionError, match='prints'):
            Runner(page, {}).run()


@pytest.mark.parametrize('page', LINKING, ids=lambda page: page.name)
def test_blocks_have_tags(page):
    not_run = 0
    for block in blocks(page):
        assert block.tag.removesuffix(' no-run') in TAGS, f'{page.name}:{block.line}'
        if block.tag == 'python no-run':
            ast.parse(block.text)
        elif block.tag == 'sh no-run':
            for words in commands(block):
                if words[0] == 'granular':
                    parse(words)
        not_run += block.tag.endswith(' no-run')
    assert not_run == NOT_RUN.get(page.name, 0)


def prose(page):
    """Return the text of a page without its blocks."""
    return re.sub(r'^```.*?^```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r'^#+ (.*)$', prose(page), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', LINKING, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for path, _, anchor in re.findall(r'\]\((?!https?:)([^)#]*)(#?)([^)]*)\)', prose(page)):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f'{path}#{anchor}'


@pytest.mark.parametrize('page', LINKING, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page):
    group = command_group()
    for name, arguments in re.findall(r'`granular ([a-z][a-z-]*)( [^`]*)?`', prose(page)):
        command = group.get_command(click.Context(group), name)
        assert command is not None, name
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r' (--[a-z-]+)', arguments)) <= options, f'{name}{arguments}'


@pytest.mark.parametrize('page', LINKING, ids=lambda page: page.name)
def test_named_files_and_tests_exist(page):
    sources = {path: path.read_text() for path in (ROOT / 'tests').rglob('*.py')}
    files = {path.name for path in sources}
    for name in re.findall(r'`(\w[\w/]*\.py|test_\w+)`', prose(page)):
        if name.startswith('test_'):
            assert name in files or any(f'def {name}(' in text for text in sources.values()), name
        elif '/' in name:
            assert any((ROOT / folder / name).exists() for folder in ('.', 'granular', 'granular/aio')), name


def test_the_readme_links_to_each_page():
    links = re.findall(r'\]\((docs/[^)#]*\.md)\)', (ROOT / 'README.md').read_text())
    assert {str(page.relative_to(ROOT)) for page in DOCS} <= set(links)
