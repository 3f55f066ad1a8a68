"""Each snippet of the README runs, in order, against an empty folder and empty buckets."""

import contextlib
import re

import numpy as np
import pytest

import granular
from granular import testing
from tests import ROOT

SNIPPETS = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)


class EnoughError(Exception):
    """Ends the first snippet, which trains for ever."""


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
        train = granular.Path('s3://my-bucket/train')
        spec = {'image': 'array', 'label': 'int'}
        with granular.ShardedDatasetWriter(train, spec, granular.encoders, shardlen=60) as writer:
            for i in range(120):
                writer.append({'image': np.full((32, 32, 3), i, np.uint8), 'label': i})
        yield


def test_the_snippets(tmp_path, monkeypatch, capsys, buckets):
    monkeypatch.chdir(tmp_path)
    trained: list[dict[str, np.ndarray]] = []

    def train(batch):
        trained.append(batch)
        if len(trained) == 4:
            raise EnoughError

    names: dict[str, object] = {'train': train}
    assert len(SNIPPETS) >= 6
    with contextlib.suppress(EnoughError):  # which lets go of the loader, unlike pytest.raises
        exec(compile(SNIPPETS[0], 'README.md', 'exec'), names)
    assert len(trained) == 4
    for snippet in SNIPPETS[1:]:
        exec(compile(snippet, 'README.md', 'exec'), names)
    names['loader'].close()
    assert {key: array.shape for key, array in trained[0].items()} == {'image': (64, 32, 32, 3), 'label': (64,)}
    assert {key: array.dtype for key, array in trained[0].items()} == {'image': np.uint8, 'label': np.int64}
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
    for link in re.findall(r'\]\(([^)#:]+)\)', (ROOT / 'README.md').read_text()):
        assert (ROOT / link).exists(), link
