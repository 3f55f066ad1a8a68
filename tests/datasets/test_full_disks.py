"""Full disks, exhausted quotas and unwritable folders."""

import errno
import json
import os
import subprocess
import sys

import pytest

import granular
from granular.errors import AccessDeniedError, StoreError
from tests.datasets.test_writers import SPEC, fill, point
from tests.support.programs import run_python

# As on a full disk, a part of a write may find its place and the rest does not: no file may grow beyond 64 KiB here.
PROGRAM = """
import json, resource, sys
import granular
sys.path.insert(0, sys.argv[2])
from tests.datasets.test_full_disks import SCENARIOS
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
out = {}
for name, scenario in SCENARIOS.items():
    try:
        scenario(granular.Path(sys.argv[1]))
    except granular.errors.StoreError as error:
        out[name] = [type(error).__name__, str(error)]
print(json.dumps(out))
"""


def bag(version):
    def scenario(root):
        with granular.BagWriter(root / f'bag{version}.bag', version) as writer:
            for i in range(1000):
                writer.append(bytes([i % 256]) * 1000)

    return scenario


def dataset(name, layout, checksums=True, every=1):
    def scenario(root):
        args = granular.encoders, layout, 'check', checksums
        with granular.DatasetWriter(root / name, SPEC, *args) as writer:
            for i in range(len(writer), 10_000):
                writer.append(point(i), flush=i % every == 0)

    return scenario


def shards(layout):
    def scenario(root):
        with granular.ShardedDatasetWriter(
            root / f'shards-{layout}', SPEC, granular.encoders, 1000, layout=layout
        ) as w:
            fill(w, 1000)
            for i in range(1000):
                w.append({'x': bytes(100), 'n': i})

    return scenario


SCENARIOS = {
    **{f'bag{version}': bag(version) for version in (1, 2, 3)},
    'refs': dataset('refs', 'refs'),
    'columns': dataset('columns', 'columns'),
    'appended': dataset('appended', 'columns', False),
    'summed': dataset('summed', 'columns', True, 7),
    'shards-refs': shards('refs'),
    'shards-columns': shards('columns'),
    'file': lambda root: (root / 'file').write_bytes(bytes(100_000)),
    'copy': lambda root: (root / 'large').copy(root / 'copy'),
    'tree': lambda root: (root / 'tree').copy(root / 'tree2'),
}


def test_full_disk_is_an_error_and_leaves_no_dataset(tmp_path):
    root = granular.Path(tmp_path)
    for name in ('appended', 'summed'):
        with granular.DatasetWriter(
            root / name, SPEC, granular.encoders, 'columns', checksums=name == 'summed'
        ) as writer:
            fill(writer, 20)
    (root / 'large').write_bytes(bytes(100_000))
    (root / 'tree').mkdir()
    (root / 'large').copy(root / 'tree' / 'large')
    (root / 'tree' / 'spec.json').write_bytes(b'{}')
    command = [sys.executable, '-c', PROGRAM, str(tmp_path), os.getcwd()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    errors = json.loads(done.stdout)
    assert errors.keys() == SCENARIOS.keys()
    for name, (kind, message) in errors.items():
        assert kind == 'StoreError'
        assert message.startswith(str(tmp_path / ('tree2/large' if name == 'tree' else name)))
        assert 'larger than its file system' in message
    # Nothing is left of what could not be written, and all of what was there.
    assert sorted(os.listdir(tmp_path)) == sorted(
        ['appended', 'summed', 'large', 'tree', 'tree2', 'shards-refs', 'shards-columns']
        + [f'bag3{end}' for end in ('.bag', '.crc', '.idx')]
    )
    assert os.listdir(tmp_path / 'tree2') == []
    for layout in ('refs', 'columns'):
        assert os.listdir(tmp_path / f'shards-{layout}') == ['000000']
    with granular.BagReader(tmp_path / 'bag3.bag') as reader:
        assert list(reader) == [bytes([i % 256]) * 1000 for i in range(65)]
        assert (tmp_path / 'bag3.bag').stat().st_size == 65_000
    for name in ('appended', 'summed'):
        report = granular.verify(root / name)
        assert report.problems == []
        assert report.datapoints > 1000
        with granular.DatasetWriter(root / name, SPEC, granular.encoders, 'columns') as writer:
            assert writer.found == report.datapoints
            fill(writer, 3000 - writer.found, writer.found)
        with granular.DatasetReader(root / name, granular.decoders, verify=True) as reader:
            assert reader.fetch(range(3000)) == [point(i) for i in range(3000)]


RIVALS = """
import asyncio, itertools, os, resource, sys, threading
import granular
from granular import aio
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
PACKAGE = os.path.dirname(granular.__file__)
RECORDS = [b'one', b'two', b'three']

def rival(path, outcomes):
    try:
        with granular.BagWriter(path, 3, 'discard') as writer:
            for record in RECORDS:
                writer.append(record)
        outcomes.append('appended')
    except granular.errors.AlreadyExistsError:
        outcomes.append('refused')

async def close(path, step, outcomes):
    calls = itertools.count()

    def rise(frame, event, argument):
        # What the event loop does in between touches no file.
        ours = frame.f_code.co_filename.startswith(PACKAGE)
        if ours and event in ('call', 'c_call') and next(calls) == step:
            sys.setprofile(None)
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            thread = threading.Thread(target=rival, args=(path, outcomes))
            thread.start()
            thread.join()

    writer = await aio.BagWriter.open(path, 3)
    for record in RECORDS:
        await writer.append(record)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, unlimited[1]))
    try:
        await writer.append(bytes(100_000))
    except granular.errors.StoreError:
        pass
    sys.setprofile(rise)
    try:
        await writer.abort()
    finally:
        sys.setprofile(None)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

seen = set()
for step in itertools.count():
    path, outcomes = f'{sys.argv[1]}/{step}.bag', []
    asyncio.run(close(path, step, outcomes))
    with granular.BagReader(path, verify=True) as reader:
        assert list(reader) == RECORDS + (RECORDS if outcomes == ['appended'] else []), (step, outcomes)
    seen.update(outcomes)
    if not outcomes:
        break
assert seen == {'appended', 'refused'}, seen
"""


def test_rival_of_a_writer_that_failed_keeps_what_it_appends(tmp_path):
    """A second writer opens the bag at any moment while the first one, whose disk was full, is aborted."""
    done = run_python(RIVALS, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, '')


@pytest.mark.parametrize(
    ('number', 'kind', 'says'),
    [
        (errno.ENOSPC, StoreError, 'the disk is full'),
        (errno.EDQUOT, StoreError, 'the quota is used up'),
        (errno.EROFS, AccessDeniedError, 'read-only'),
        (errno.EACCES, AccessDeniedError, 'denied'),
        (errno.EIO, StoreError, 'failed'),
    ],
)
def test_system_error_is_quoted(number, kind, says, tmp_path, monkeypatch):
    def fail(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), path)

    (tmp_path / 'y.bag').write_bytes(b'x')
    message = rf'/y\.bag: .*{says}.*\({os.strerror(number)}\)'
    with monkeypatch.context() as context, pytest.raises(kind, match=message):
        context.setattr(os, 'open', fail)
        granular.Path(tmp_path / 'y.bag').read_bytes()


EXHAUSTED = """
import os, resource, sys
import granular
path = granular.Path(sys.argv[1])
path.write_bytes(b'content')
open_reader = granular.DatasetReader  # imports it
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
try:
    open_reader(path.parent)
except granular.errors.StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print(path.read_bytes())
"""


def test_limit_on_open_files_is_named(tmp_path):
    arguments = [sys.executable, '-c', EXHAUSTED, str(tmp_path / 'spec.json')]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == [
        f'{tmp_path / "spec.json"}: failed (Too many open files)',
        "b'content'",
    ], result.stderr


def test_file_system_that_becomes_read_only_is_named(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    writer = granular.Path(tmp_path / 'file').open('wb')
    writer.write(b'x')
    with monkeypatch.context() as context:
        for name in ('fsync', 'unlink'):
            context.setattr(os, name, refuse)
        with pytest.raises(AccessDeniedError, match='the file system is read-only') as caught:
            writer.close()
    assert any(note.startswith('removing') and 'failed, too' in note for note in caught.value.__notes__)
    assert [found.kind for found in granular.clean(tmp_path, remove=True, older=0)] == ['draft']


def test_unwritable_folder_is_an_error(tmp_path):
    """Even root cannot create files in sysfs."""
    root = granular.Path('/sys')
    (tmp_path / 'tree').mkdir()
    (tmp_path / 'tree' / 'x').write_bytes(b'x')
    for layout in ('refs', 'columns'):
        with pytest.raises(AccessDeniedError, match='/sys/granular'):
            granular.DatasetWriter(root / 'granular', SPEC, granular.encoders, layout)
        with pytest.raises(AccessDeniedError, match='/sys/granular'):
            granular.ShardedDatasetWriter(root / 'granular', SPEC, granular.encoders, 10, layout=layout)
    for version in (1, 2, 3):
        with pytest.raises(AccessDeniedError, match='/sys/granular.sync.bags'):
            granular.BagWriter(root / 'granular.sync.bags', version)
    for call in (
        lambda: (root / 'granular').write_bytes(b'x'),
        lambda: granular.Path(tmp_path / 'tree' / 'x').copy(root / 'granular'),
        lambda: granular.Path(tmp_path / 'tree').copy(root / 'granular'),
    ):
        with pytest.raises(AccessDeniedError, match='/sys/granular'):
            call()
    assert not os.path.exists('/sys/granular')
