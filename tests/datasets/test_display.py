"""The first datapoints of readers, and how readers and pipelines look in notebooks."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

import granular
from granular import aio
from granular.errors import InvalidArgumentError

SPEC = {'image': 'png', 'label': 'int', 'title': 'utf8'}


def datapoint(i):
    return {'image': np.full((200, 100, 3), i, np.uint8), 'label': i, 'title': f'<script>{i}</script>'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('display')
    with granular.ShardedDatasetWriter(folder, SPEC, shardlen=4) as writer:
        for i in range(7):
            writer.append(datapoint(i))
    return folder


async def test_take_and_head_return_the_first_datapoints(folder):
    for path in folder, folder / '000000', folder / '000000/label.bag':
        with granular.open(path) as reader:
            assert repr(reader.take(3)) == repr(reader.head(3)) == repr(reader.fetch(range(3)))
            assert len(reader.take(100)) == len(reader)
            assert len(reader.head()) == min(5, len(reader))
            assert reader.take(0) == []
            with pytest.raises(InvalidArgumentError, match='count'):
                reader.take(-1)
        async with await aio.open(path) as twin:
            assert repr(await twin.take(2)) == repr(await twin.head(2)) == repr(await twin.fetch(range(2)))


def test_readers_show_their_spec_sizes_and_samples(folder):
    with granular.open(folder) as reader:
        shown = reader._repr_html_()
    for text in (
        'ShardedDatasetReader',
        '<td>7</td>',
        '&#x27;label&#x27;: &#x27;int&#x27;',
        '<th>shards</th><td>2</td>',
        ' bytes</td>',
    ):
        assert text in shown
    assert '<script' not in shown
    assert shown.count('&lt;script&gt;') == 3
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    opened = [Image.open(io.BytesIO(base64.b64decode(image))) for image in images]
    assert [(image.size, image.getpixel((0, 0))) for image in opened] == [((34, 67), (i, i, i)) for i in range(3)]


def test_bags_show_their_records(folder):
    with granular.BagReader(folder / '000000/label.bag') as reader:
        assert '<td>1 bytes</td>' in reader._repr_html_()


def test_samples_show_values_of_any_type():
    values = {
        '<b>': '<i>' * 100,
        'array': np.zeros((2, 3)),
        'empty': np.zeros((0, 3), np.uint8),
        'list': [1, 2],
        'x': None,
    }
    shown = granular.formats.display.Samples([values, {'other': b'abc'}])._repr_html_()
    assert '<b>' not in shown
    assert '<i>' not in shown
    for text in ('float64 of shape (2, 3)', 'uint8 of shape (0, 3)', '2 values: 1, …', 'None', '3 bytes'):
        assert text in shown


def test_pipelines_and_loaders_show_their_stages():
    dataset = granular.MapDataset.range(10).map(str).batch(2)
    for pipeline in dataset, dataset.to_iter_dataset():
        assert pipeline._repr_html_().startswith('<pre>&lt;')
        assert 'map(str)' in pipeline._repr_html_()
    with granular.Loader(granular.MapDataset.range(10), 2) as loader:
        assert repr(loader) == repr(loader.aio) == '<Loader: batches of 2 from range(0, 10)>'
