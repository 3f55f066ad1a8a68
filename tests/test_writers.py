"""Two writers on one place, and writers that are killed."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import granular
from granular.errors import AlreadyExistsError, GranularError

SPEC = {'x': 'bytes', 'n': 'int'}


def point(i):
    return {'x': bytes([i % 256]) * (i % 90), 'n': i}


def fill(writer, count, first=0):
    for i in range(first, first + count):
        writer.append(point(i))


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_the_second_of_two_writers_is_refused(tmp_path, layout):
    first = granular.DatasetWriter(tmp_path / 'data', SPEC, granular.encoders, layout=layout)
    fill(first, 3)
    with pytest.raises(AlreadyExistsError):
        granular.DatasetWriter(tmp_path / 'data', SPEC, granular.encoders, layout=layout)
    fill(first, 3, 3)
    first.close()
    with granular.DatasetReader(tmp_path / 'data', granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(6)]


def test_a_bag_that_is_being_appended_to(tmp_path):
    first = granular.BagWriter(tmp_path / 'a.bag', 3)
    first.append(b'x')
    with pytest.raises(AlreadyExistsError, match='another writer'):
        granular.BagWriter(tmp_path / 'a.bag', 3)
    first.close()
    with granular.BagWriter(tmp_path / 'a.bag', 3) as second:
        second.append(b'y')
    assert list(granular.BagReader(tmp_path / 'a.bag')) == [b'x', b'y']


@pytest.mark.parametrize('size', [10, 9_000_000])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_whoever_closes_first_has_the_place(bucket, layout, size):
    """In a bucket nobody sees what another has begun, so both begin; the one that comes second changes nothing."""
    writers = [granular.DatasetWriter(bucket / 'data', SPEC, granular.encoders, layout=layout) for _ in range(2)]
    for number, writer in enumerate(writers):
        writer.append({'x': bytes([number]) * size, 'n': number})
    writers[1].close()
    with pytest.raises(AlreadyExistsError):
        writers[0].close()
    with granular.DatasetReader(bucket / 'data', granular.decoders) as reader:
        assert list(reader) == [{'x': b'\1' * size, 'n': 1}]


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path):
    writer = granular.BagWriter(tmp_path / 'a.bag')
    writer.append(b'x')
    (tmp_path / 'a.bag').write_bytes(b'mine')
    with pytest.raises(AlreadyExistsError):
        writer.close()
    assert (tmp_path / 'a.bag').read_bytes() == b'mine'
    assert sorted(os.listdir(tmp_path)) == ['a.bag']


# --- killed

SCRIPT = """
import sys
import granular
def point(i):
    return {'x': bytes([i % 256]) * (i % 90), 'n': i}
place, layout, checksums = sys.argv[1], sys.argv[2], sys.argv[3] == 'yes'
with granular.DatasetWriter(place, {'x': 'bytes', 'n': 'int'}, granular.encoders, layout, 'check', checksums) as writer:
    print('ready', flush=True)
    for i in range(len(writer), 3000):
        writer.append(point(i), flush=i % 5 == 0)
"""


def kill_a_writer(place, layout, checksums, wait):
    command = [sys.executable, '-c', textwrap.dedent(SCRIPT), str(place), layout, 'yes' if checksums else 'no']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    process.stdout.readline()
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize('checksums', [False, True])
def test_a_columns_writer_that_is_killed_again_and_again_is_gone_on_with(tmp_path, checksums):
    rng = random.Random(int(checksums))
    place = tmp_path / 'data'
    for _ in range(8):
        kill_a_writer(place, 'columns', checksums, rng.uniform(0, 0.03))
        if (place / 'spec.json').exists():  # it got to the end
            break
    with granular.DatasetWriter(place, SPEC, granular.encoders, layout='columns', checksums=checksums) as writer:
        there = len(writer)
        fill(writer, 3000 - there, there)
    with granular.DatasetReader(place, granular.decoders, verify=checksums) as reader:
        assert reader.fetch(range(3000)) == [point(i) for i in range(3000)]
    with granular.DatasetWriter(tmp_path / 'whole', SPEC, granular.encoders, layout='columns') as writer:
        fill(writer, 3000)
    for name in ('x.bag', 'x.idx', 'n.bag', 'n.idx', 'spec.json'):
        assert (place / name).read_bytes() == (tmp_path / 'whole' / name).read_bytes()


def test_a_refs_writer_that_is_killed_leaves_no_dataset(tmp_path):
    rng = random.Random(1)
    for i in range(5):
        place = tmp_path / f'data{i}'
        kill_a_writer(place, 'refs', False, rng.uniform(0, 0.05))
        try:
            with granular.DatasetReader(place, granular.decoders) as reader:
                assert reader.fetch(range(3000)) == [point(i) for i in range(3000)]
        except GranularError:
            assert not (place / 'spec.json').exists()
