"""Of two writers of one path, of any kinds, one succeeds, and the other one fails: a table of all of them."""

import contextlib
import itertools
import json
import os

import pytest

import granular
from granular.errors import AlreadyExistsError, GranularError
from tests.conftest import BUCKETS, empty_folder
from tests.support.tables import cover, pairwise

SPEC = {'n': 'int', 'x': 'bytes'}
COUNT = 30
WRITERS = {
    'refs': (granular.DatasetWriter, {}),
    'columns': (granular.DatasetWriter, {'layout': 'columns'}),
    'shards': (granular.ShardedDatasetWriter, {'shardlen': 10}),
    'shards in columns': (granular.ShardedDatasetWriter, {'shardlen': 10, 'layout': 'columns'}),
}
CONVERSIONS = {'convert': 10, 'convert to one': None}
COPIES = {'copy': 'refs', 'copy of columns': 'columns', 'copy of shards': 'shards'}
KINDS = [*WRITERS, *CONVERSIONS, *COPIES]


def rivals():
    """Return each two kinds, with each number of points after which the second one begins: each has its turn first."""
    for (i, first), (j, second) in itertools.product(enumerate(KINDS), enumerate(KINDS)):
        moments = (0,) if first in COPIES else (0, 5, 15)
        for turn in range(i + j, i + j + len(moments)):
            yield first, second, moments[turn % len(moments)]


# All of them on the local disk, where they cost least; in buckets, each two kinds in one of them.
TABLE = [*cover([list(rivals())], [['local']]), *cover([pairwise(rivals())], [BUCKETS])]


@pytest.fixture(params=['local', *BUCKETS])
def root(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> granular.Path:
    """An empty folder in every kind of store that keeps writers apart."""
    return empty_folder(request, tmp_path)


def points(name):
    return [{'n': i, 'x': name.encode() * 4} for i in range(COUNT)]


def write(kind, path, name, halfway=lambda: None, at=5):
    """Write the points of a writer, which calls a function when it has written some of them."""
    if kind in COPIES:
        source, called = path.parent / f'source-{name}', []
        if not source.exists():
            write(COPIES[kind], source, name)
        source.copy(path, progress=lambda _: called or called.append(halfway()))
        return

    def some():
        for i, point in enumerate(points(name)):
            if i == at:
                halfway()
            yield point

    if kind in CONVERSIONS:
        granular.convert(some(), path, shardlen=CONVERSIONS[kind], spec=SPEC, sample=2)
        return
    cls, options = WRITERS[kind]
    with cls(path, SPEC, **options) as writer:
        for point in some():
            writer.append(point)


@pytest.mark.parametrize(('root', 'first'), list(itertools.product(['local', *BUCKETS], KINDS)), indirect=['root'])
def test_one_of_two_writers_of_any_kinds_succeeds(root, first, request):
    """The second one begins when the first one has written some, and ends before that continues."""
    here = first, request.node.callspec.params['root']
    for number, ((_, second, at), _) in enumerate(case for case in TABLE if (case[0][0], case[1]) == here):
        path, succeeded, failed = root / f'{number}' / 'ds', [], []

        def tried(kind, name, path=path, at=at, succeeded=succeeded, failed=failed, **options):
            try:
                write(kind, path, name, at=at, **options)
            except GranularError as error:
                failed.append(f'{kind}: {error!r}')
            else:
                succeeded.append(name)

        tried(first, 'a', halfway=lambda second=second, tried=tried: tried(second, 'b'))
        case = f'{first} at {at}, {second}: {succeeded} succeeded, {failed}'
        assert len(succeeded) == 1, case
        with granular.open(path) as reader:
            assert list(reader) == points(succeeded[0]), case
        assert granular.verify(path).problems == [], case
        assert not list(path.rglob('.writer.*')), case


@pytest.mark.parametrize('kind', ['copy', 'copy of shards'])
def test_copy_is_refused_beside_another_copy_and_completes_what_a_failed_one_left(root, kind):
    class StoppedError(Exception):
        pass

    def stop():
        with pytest.raises(AlreadyExistsError):
            write(kind, root / 'ds', 'b')
        raise StoppedError

    with pytest.raises(StoppedError):
        write(kind, root / 'ds', 'a', stop)
    write(kind, root / 'ds', 'a')
    with granular.open(root / 'ds') as reader:
        assert list(reader) == points('a')
    assert {path.name for path in (root / 'ds').rglob('*') if path.name.startswith('.')} == set()


@pytest.mark.parametrize('kind', COPIES)
def test_a_copy_that_runs_on_this_machine_is_not_discarded(bucket, kind):
    def discard():
        for cls, options in WRITERS.values():
            with pytest.raises(AlreadyExistsError):
                cls(bucket / 'ds', SPEC, resume='discard', **options)

    write(kind, bucket / 'ds', 'a', discard)
    with granular.open(bucket / 'ds') as reader:
        assert list(reader) == points('a')
    assert granular.verify(bucket / 'ds').problems == []


def test_a_conversion_takes_over_nothing_but_conversions_of_other_machines(bucket):
    claims = {}
    for kind in ('shards', 'convert', 'copy of shards'):

        def note(kind=kind):
            path = bucket / kind / '.writer.0.1.json'
            claims[kind] = {**json.loads(path.read_text()), 'system': 'elsewhere'}

        write(kind, bucket / kind, 'a', note)
    for number, (kind, claim) in enumerate(claims.items()):
        path = bucket / f'{number}'
        (path / '.writer.0.1.json').write_text(json.dumps(claim))
        with contextlib.nullcontext() if kind == 'convert' else pytest.raises(AlreadyExistsError, match='wait for it'):
            write('convert', path, 'b')
        assert path.exists() and (path / '.writer.0.1.json').exists() == (kind != 'convert')


@pytest.mark.parametrize('kind', ['copy', 'copy of columns'])
def test_conversion_that_is_continued_is_refused_beside_a_copy(root, kind):
    path = root / 'ds'
    write('convert to one', path, 'b')
    for file in list(path.iterdir()):
        if file.name != '.granular-conversion':  # what it leaves if it is killed at its beginning
            file.unlink()

    def go_on():
        with pytest.raises(AlreadyExistsError):
            write('convert to one', path, 'b')

    write(kind, path, 'a', go_on)
    with granular.open(path) as reader:
        assert list(reader) == points('a')
    assert granular.verify(path).problems == [] and not list(path.rglob('.writer.*'))


def test_failed_writer_removes_no_files_of_others(root):
    """Such as those of a tool without locks."""
    for layout in ('refs', 'columns'):
        source, path = root / f'source of {layout}', root / layout
        with granular.DatasetWriter(source, SPEC, layout=layout) as writer:
            writer.append(points('a')[0])
        rival = granular.DatasetWriter(path, SPEC, layout=layout)
        rival.append(points('b')[0])
        for file in source.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        with pytest.raises(GranularError):
            rival.close()
        with granular.DatasetReader(path, granular.decoders, verify=True) as reader:
            assert list(reader) == points('a')[:1]


@pytest.mark.parametrize('kind', [*WRITERS, *CONVERSIONS])
def test_failed_writer_keeps_a_folder_that_it_did_not_create(tmp_path, kind):
    class FailedError(Exception):
        pass

    def fail():
        raise FailedError

    path = granular.Path(tmp_path) / 'ds'
    for existed in (False, True):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(tmp_path / 'ds', 0o2770)
        with pytest.raises(FailedError):
            write(kind, path, 'a', fail)
        if existed:
            assert os.stat(tmp_path / 'ds').st_mode & 0o7777 == 0o2770
        path.mkdir(exist_ok=True)
