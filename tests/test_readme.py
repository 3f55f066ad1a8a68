"""Each snippet of the README runs, in order, against an empty folder and empty buckets."""

import pathlib
import re

import pytest

import granular
from granular import testing

HOME = pathlib.Path(__file__).parent.parent
SNIPPETS = re.findall(r'```python\n(.*?)```', (HOME / 'README.md').read_text(), re.DOTALL)


@pytest.fixture
def buckets(monkeypatch):
    """``s3://my-bucket`` and ``gs://my-bucket``, found through the environment, as for a user."""
    with testing.s3_server() as s3, testing.gcs_server() as gcs:
        monkeypatch.setenv('AWS_ENDPOINT_URL', s3['endpoint_url'])
        monkeypatch.setenv('AWS_ACCESS_KEY_ID', s3['key'])
        monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', s3['secret'])
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', gcs['endpoint_url'])
        granular.Path('s3://my-bucket').mkdir(exist_ok=True)  # moto keeps what other servers of this process hold
        granular.Path('gs://my-bucket').mkdir()
        yield


def test_the_snippets(tmp_path, monkeypatch, capsys, buckets):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    assert len(SNIPPETS) >= 6
    for snippet in SNIPPETS:
        exec(compile(snippet, 'README.md', 'exec'), names)
    names['loader'].close()
    out = capsys.readouterr().out
    for line in (
        "7 ['a digit', 'number 99']",
        "{'label': 7}",
        '[3, 1, 41, 59]',
        '(16, 8, 8)',
        '3 100',
        "['caption.bag',",
    ):
        assert line in out


def test_the_links():
    for link in re.findall(r'\]\(([^)#:]+)\)', (HOME / 'README.md').read_text()):
        assert (HOME / link).exists(), link
