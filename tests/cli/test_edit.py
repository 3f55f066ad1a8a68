"""The command ``edit``: its arguments become those of ``granular.rewrite``."""

import json

import numpy as np
import pytest

import granular


@pytest.fixture
def source(tmp_path):
    with granular.ShardedDatasetWriter(tmp_path / 'source', {'label': 'int', 'text': 'utf8'}, shardlen=4) as writer:
        for i in range(10):
            writer.append({'label': i, 'text': f'text {i}'})
    return tmp_path / 'source'


def rows(folder):
    with granular.open(folder) as reader:
        return reader.fetch(range(len(reader)))


def test_edit_changes_rows_keys_and_shards(granular_cli, source, tmp_path):
    np.save(tmp_path / 'labels.npy', np.arange(10) * 2)
    (tmp_path / 'gone.txt').write_text('3\n-1\n')
    (tmp_path / 'some.json').write_text('{"0": "new"}')
    code, out, err = granular_cli(
        'edit', source, tmp_path / 'a', '--exclude', tmp_path / 'gone.txt', '--set', f'label={tmp_path}/labels.npy',
        '--set', f'text={tmp_path}/some.json', '--rename', 'label=class', '--shards', '2', '--json',
    )  # fmt: skip
    assert code == 0, err
    done = json.loads(out)
    assert (done['datapoints'], done['shards'], done['spec']) == (8, 2, {'class': 'int', 'text': 'utf8'})
    expected = [{'class': 2 * i, 'text': f'text {i}' if i else 'new'} for i in range(9) if i != 3]
    assert rows(tmp_path / 'a') == expected
    code, out, err = granular_cli('edit', source, source, tmp_path / 'b', '--keep', '0,12', '--drop', 'text')
    assert code == 0, err
    assert '2 datapoints in 2 shards' in out
    assert rows(tmp_path / 'b') == [{'label': 0}, {'label': 2}]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--keep', '10'], 'index 10 is out of range'),
        (['--keep', 'words.txt'], "words.txt: expected an index a line, got 'a'"),
        (['--set', 'label=labels.csv'], 'expected a file that ends in .npy or .json'),
        (['--set', 'label=keys.json'], "keys.json: expected indices as keys of the mapping, got 'x'"),
        (['--set', 'label=bad.json'], 'bad.json: cannot be read'),
        (['--exclude', 'none.txt'], 'none.txt: cannot be read'),
        (['--exclude', 'text=p3'], "granular.rewrite(SRC, DST, exclude=lambda text: text == 'p3')"),
        (['--keep', 'label=3'], '--keep: label=3: expected indices, or the name of a file of indices'),
    ],
)
def test_wrong_arguments_are_named(granular_cli, source, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in (('words.txt', '1\na\n'), ('keys.json', '{"x": 1}'), ('bad.json', '{')):
        (tmp_path / name).write_text(text)
    code, _, err = granular_cli('edit', source, tmp_path / 'target', *arguments)
    assert code == 1
    assert message in err
    assert not (tmp_path / 'target').exists()
