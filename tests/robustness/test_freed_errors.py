"""Errors are freed with all that their frames hold, such as batches, when the program has dealt with them.

A frame that refers to an error whose traceback refers to the frame would keep all of it until the next collection.
"""

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import granular
from granular import MapDataset
from granular.errors import GranularError
from granular.grain import MultiprocessingOptions

LENGTH = 12


class FailedError(Exception):
    """Raised by the functions of this module."""


def fail(value: Any) -> Any:
    if value == 5:
        raise FailedError
    return value


def fail_late(value: Any) -> Any:
    time.sleep(0.002)  # so that other threads help
    return fail(value)


def fail_dict(value: Any) -> Any:
    return {'n': fail(value)}


class Listed:
    """A source whose element 5 fails."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return fail(index)


def decode(record: Any) -> Any:
    return fail(granular.decoders['int'](record))


def consume(iterable: Iterable[Any]) -> None:
    for _ in iterable:
        pass


def load(**options: Any) -> None:
    with granular.Loader(numbers.map(fail_dict), 4, **options) as loader:
        for _ in range(3):
            next(loader)


def read(root: granular.Path, use: Callable[[Any], object], **options: Any) -> None:
    with granular.DatasetReader(root / 'dataset', {**granular.decoders, 'int': decode}, **options) as reader:
        use(reader)


def write(root: granular.Path, *datapoints: Any) -> None:
    with granular.DatasetWriter(root / 'written', {'n': 'int'}) as writer:
        for datapoint in datapoints:
            writer.append(datapoint)


numbers = MapDataset.range(LENGTH)
mapped = numbers.map(fail)


def stream(elements: MapDataset = numbers) -> Any:
    return elements.to_iter_dataset()


CASES: dict[str, Callable[[granular.Path], object]] = {
    'element': lambda root: mapped[5],
    'elements': lambda root: list(mapped),
    'elements in threads': lambda root: list(numbers.map(fail_late)),
    'two functions': lambda root: list(mapped.map(fail)),
    'of a source': lambda root: MapDataset.source(Listed())[5],
    'of a batch': lambda root: mapped.batch(4)[1],
    'stream': lambda root: consume(stream(mapped)),
    'stream of a source': lambda root: consume(stream(MapDataset.source(Listed())).batch(4)),
    'stream, map': lambda root: consume(stream().map(fail)),
    'stream, filter': lambda root: consume(stream().filter(lambda value: fail(value) is not None)),
    'stream, flat_map': lambda root: consume(stream().flat_map(lambda value: [fail(value)])),
    'stream, batch': lambda root: consume(stream(mapped).batch(4)),
    'stream, prefetch': lambda root: consume(stream().map(fail).prefetch(4)),
    'stream, window_shuffle': lambda root: consume(stream(mapped).window_shuffle(4, seed=1)),
    'stream, mix': lambda root: consume(granular.IterDataset.mix([stream(mapped), stream()])),
    'stream, processes': lambda root: consume(
        stream(mapped).mp_prefetch(MultiprocessingOptions(1, start_method='fork'))
    ),
    'Loader': lambda root: load(),
    'Loader, processes': lambda root: load(mp='fork', workers=1),
    'DataLoader': lambda root: consume(
        granular.grain.DataLoader(data_source=Listed(), sampler=granular.grain.samplers.SequentialSampler(LENGTH))
    ),
    'cache in shared memory': lambda root: granular.SharedMemoryCache(MapDataset.source(Listed()))[5],
    'reader, element': lambda root: read(root, lambda reader: reader[5]),
    'reader, elements': lambda root: read(root, list),
    'reader, fetch': lambda root: read(root, lambda reader: reader.fetch([3, 5, 6])),
    'reader, index': lambda root: read(root, lambda reader: reader[LENGTH]),
    'reader, Loader': lambda root: read(root, lambda reader: next(granular.Loader(reader, 8))),
    'no dataset': lambda root: granular.open(root / 'missing'),
    'no spec': granular.DatasetReader,
    'no file': lambda root: (root / 'missing').read_bytes(),
    'no file, streamed': lambda root: (root / 'missing').open('rb'),
    'folder': lambda root: consume((root / 'missing').iterdir()),
    'copy': lambda root: (root / 'missing').copy(root / 'copy'),
    'copy of a folder': lambda root: granular.copy_to_local(root / 'missing', '/tmp/missing'),
    'verify': lambda root: granular.verify(root / 'missing'),
    'writer': lambda root: write(root, {'n': 1, 'x': 2}),
    'conversion': lambda root: granular.convert(mapped.map(fail_dict), root / 'converted', spec={'n': 'int'}),
    'conversion of an iterable': lambda root: granular.convert(
        map(fail_dict, range(LENGTH)), root / 'converted', spec={'n': 'int'}
    ),
}  # fmt: skip


def alive() -> list[BaseException]:
    """Return the errors that stay alive: a thread whose caller was cancelled may still be leaving its call."""
    until = time.monotonic() + 60
    # Not `isinstance`, which a weak proxy of an object that is gone answers with an error.
    while found := [each for each in gc.get_objects() if issubclass(type(each), FailedError | GranularError)]:
        if time.monotonic() > until:
            break
        del found
        time.sleep(0.01)
    return found


@pytest.fixture(params=['disk', 'fakegcs', 'moto'], scope='module')
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> granular.Path:
    if request.param == 'disk':
        root = granular.Path(tmp_path_factory.mktemp('errors'))
    else:
        root = request.getfixturevalue(request.param).place()
    with granular.DatasetWriter(root / 'dataset', {'n': 'int'}) as writer:
        for number in range(LENGTH):
            writer.append({'n': number})
    return root


@pytest.mark.filterwarnings('ignore')  # readers and iterators that were not closed
@pytest.mark.parametrize('name', CASES)
def test_error_is_freed_when_it_was_caught(name: str, root: granular.Path) -> None:
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((FailedError, GranularError)) as caught:
            CASES[name](root)
        del caught
        assert not alive()
    finally:
        gc.enable()


def test_error_is_freed_when_its_element_was_skipped() -> None:
    gc.collect()
    gc.disable()
    try:
        dataset = numbers.map(fail_dict)
        assert len(list(dataset.to_iter_dataset(on_error='skip'))) == LENGTH - 1
        with granular.Loader(dataset, LENGTH - 1, on_error='skip') as loader:
            next(loader)
        assert not alive()
    finally:
        gc.enable()
