"""Sizes that a conversion stores beside values."""

import json

import numpy as np
import pytest

import granular
from granular import MapDataset
from granular.errors import EncodeError, InvalidArgumentError

LENGTHS = [300, 1, 4000, 77]


def clips(kind):
    """Create clips as files, with samples of one and two channels, and as samples."""
    for i, length in enumerate(LENGTHS):
        audio = (np.full((length, 1 + i % 2), i, np.int16), 8000)
        yield {'audio': audio if kind == 'samples' else granular.encoders[kind](audio), 'words': list(range(i))}


@pytest.mark.parametrize('kind', ['wav', 'flac', 'samples'])
def test_sizes_of_audio_and_lists(tmp_path, kind):
    spec = {'audio': 'flac'} if kind == 'samples' else None
    done = granular.convert(clips(kind), tmp_path / 'ds', spec=spec, sizes=['audio', 'words'], shardlen=2)
    assert done.spec['audio_size'] == done.spec['words_size'] == 'int'
    assert done.reasons['audio_size'] == 'of sizes'
    with granular.open(tmp_path / 'ds') as reader:
        assert reader.sizes('audio').tolist() == LENGTHS == [len(reader[i]['audio'].samples) for i in range(4)]
        assert reader.sizes('words').tolist() == [0, 1, 2, 3]
        samples = MapDataset.source(reader).map(lambda clip: {'audio': clip['audio'].samples[:, 0]})
        batches = samples.batch_by_size('audio', 8000, buckets=2, sizes='audio_size')
        assert sorted(size for batch in batches for size in batch['audio_sizes'].tolist() if size) == sorted(LENGTHS)
    with granular.open(tmp_path / 'ds') as reader:  # of which the values are converted
        rest = MapDataset.source(reader).select(['audio'])
        with pytest.raises(EncodeError, match="Audio is stored as 'tree': pass the type of audio with spec"):
            granular.convert(rest, tmp_path / 'again', sizes='audio')
        granular.convert(rest, tmp_path / 'again', sizes='audio', spec={'audio': 'wav'})
    with granular.open(tmp_path / 'again') as reader:
        assert reader.sizes('audio').tolist() == LENGTHS


@pytest.mark.parametrize('kind', ['wav', 'flac'])
def test_audio_of_unknown_length_is_decoded(tmp_path, kind):
    file = bytearray(granular.encoders[kind]((np.zeros(500, np.int16), 8000)))
    if kind == 'flac':  # no number of samples in its header, as of a file that was written into a pipe
        file[21] &= 0xF0
        file[22:26] = bytes(4)
    else:
        at = file.index(b'data') + 4
        file[at : at + 4] = b'\xff' * 4
    granular.convert([{'audio': bytes(file)}], tmp_path / 'ds', sizes='audio')
    with granular.open(tmp_path / 'ds') as reader:
        assert reader.sizes('audio').tolist() == [500]


@pytest.mark.parametrize(
    ('records', 'sizes', 'message'),
    [
        ([{'text': 'a'}], 'text', "sizes: expected a key of a type of wav, .*got 'text', of type 'utf8'"),
        ([{'text': 'a'}], 'audio', r"got 'audio', and the records have \['text'\]"),
        ([{'a': [1], 'a_size': 1}], 'a', "the records have a key 'a_size': rename it"),
    ],
)
def test_sizes_that_are_refused(tmp_path, records, sizes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        granular.convert(records, tmp_path / 'ds', sizes=sizes)


def test_a_damaged_clip_is_named(tmp_path):
    wav = granular.encoders['wav']((np.zeros(500, np.int16), 8000))
    with pytest.raises(EncodeError, match="key 'audio': expected a value with a size: .* the file is truncated"):
        granular.convert([{'audio': wav}, {'audio': wav[:-10]}], tmp_path / 'ds', sizes='audio')
    stored = tmp_path / 'stored'
    granular.convert([{'audio': wav}], stored)
    with granular.open(stored) as reader, pytest.raises(InvalidArgumentError, match='are copied as they are stored'):
        granular.convert(reader, tmp_path / 'copy', sizes='audio')


def test_the_command(granular_cli, tmp_path):
    for i, length in enumerate(LENGTHS):
        (tmp_path / f'{i}.wav').write_bytes(granular.encoders['wav']((np.zeros(length, np.int16), 8000)))
    table = tmp_path / 'clips.parquet'
    pa = pytest.importorskip('pyarrow')
    import pyarrow.parquet as pq

    files = [(tmp_path / f'{i}.wav').read_bytes() for i in range(len(LENGTHS))]
    pq.write_table(pa.table({'audio': files}), table)
    code, out, _ = granular_cli('convert', table, tmp_path / 'ds', '--sizes', 'audio', '--json')
    assert (code, json.loads(out)['spec']['audio_size']) == (0, 'int')
    with granular.open(tmp_path / 'ds') as reader:
        assert reader.sizes('audio').tolist() == LENGTHS
