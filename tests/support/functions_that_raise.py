"""User functions that raise, in every operation that takes one.

``python -m tests.support.functions_that_raise threads map``

Prints as JSON, for each case, its fault, or None: the error must reach the caller as itself, or an error of the tree
must name it as its cause, within ``BOUND`` seconds, and the next read of the process must work.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

import granular
from granular import IterDataset, MapDataset, ReadOptions, aio
from granular.errors import GranularError, WorkerError
from granular.grain import MultiprocessingOptions
from tests.support.seams import on_loop
from tests.support.tables import cover

BOUND: Final = 60.0  # seconds: far more than any case takes, as the machine may be busy


class OwnError(BaseException):
    """A user exception that is not an Exception."""


class OddError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f'{one} and {two}')


class SilentError(Exception):
    """An error whose text is not to be had."""

    def __str__(self) -> str:
        raise SystemExit(4)

    __repr__ = __str__


ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    'LookupError': lambda: LookupError('mine'),
    'SystemExit': lambda: SystemExit(3),
    'KeyboardInterrupt': lambda: KeyboardInterrupt('mine'),
    'StopIteration': lambda: StopIteration('mine'),
    'StopAsyncIteration': lambda: StopAsyncIteration('mine'),
    'GeneratorExit': lambda: GeneratorExit('mine'),
    'CancelledError': lambda: asyncio.CancelledError('mine'),
    'futures.CancelledError': lambda: concurrent.futures.CancelledError('mine'),
    'OwnError': lambda: OwnError('mine'),
    'BaseExceptionGroup': lambda: BaseExceptionGroup('mine', [KeyboardInterrupt('mine'), ValueError('mine')]),
    'OddError': lambda: OddError(1, 2),
    'SilentError': SilentError,
}
# Errors that should take the same way to the caller.
FAMILIES: Final = (
    ['LookupError', 'OddError', 'SilentError'],
    ['SystemExit', 'KeyboardInterrupt', 'GeneratorExit'],
    ['OwnError', 'BaseExceptionGroup'],
    ['StopIteration', 'StopAsyncIteration', 'CancelledError', 'futures.CancelledError'],
)
UNCHANGED: Final = ('LookupError', 'OwnError', 'BaseExceptionGroup', 'OddError')
BAD: Final = 21  # the element whose function raises; those before it must come
COUNT: Final = 40


class Raises:
    """A user function that raises for one value. It pickles, for worker processes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self.number(value) == BAD:
            raise ERRORS[self.name]()
        return value

    def number(self, value: Any) -> int:
        while isinstance(value, list | tuple | dict):
            value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        return int.from_bytes(value, 'little') if isinstance(value, bytes) else int(value)

    def indexed(self, index: int, value: Any) -> Any:
        return self(value)

    def random(self, value: Any, rng: np.random.Generator) -> Any:
        return self(value)

    def predicate(self, value: Any) -> bool:
        self(value)
        return True

    def several(self, value: Any) -> list[Any]:
        return [self(value)]

    def encode(self, value: int) -> bytes:
        return int(self(value)).to_bytes(8, 'little')

    def decode(self, record: bytes) -> int:
        return int.from_bytes(self(record), 'little')

    def dicts(self, value: int, seed: Any) -> dict[str, int]:
        return {'x': self(value)}


class Indexed:
    """A user data source."""

    def __init__(self, fn: Callable[[int], Any]) -> None:
        self._fn = fn

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self._fn(index)


class Fetched(Indexed):
    """A user data source that fetches many indices."""

    def fetch(self, indices: Any) -> list[Any]:
        return [self._fn(index) for index in indices]


class Awaited(Indexed):
    """An asynchronous user data source that fetches many indices."""

    async def fetch(self, indices: Any) -> list[Any]:
        await asyncio.sleep(0)
        return [self._fn(index) for index in np.asarray(indices).tolist()]


class Sampler(Indexed):
    """A user sampler."""

    def __getitem__(self, index: int) -> granular.grain.RecordMetadata:
        return granular.grain.RecordMetadata(self._fn(index), index)


class Selected(Indexed):
    """A user selection map."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return 0, self._fn(index)


class Replaced:
    """A user ``on_error`` function that raises."""

    def __init__(self, fn: Raises) -> None:
        self._fn = fn

    def __call__(self, step: int, error: Exception) -> Any:
        return self._fn(step)


def identity(value: int) -> int:
    return value


def failing(value: int) -> int:
    if value == BAD:
        raise LookupError('the first error')
    return value


def unchanged_batch(points: list[Any]) -> list[Any]:
    return points


def encode_plain(value: int) -> bytes:
    return value.to_bytes(8, 'little')


# --- the operations: each makes an iterable, a dataset that can be indexed, or something to be called


def stream(dataset: MapDataset, way: 'Way', **options: Any) -> IterDataset:
    return dataset.to_iter_dataset(ReadOptions(prefetch_buffer_size=16), **options).mp_prefetch(way.workers)


OPERATIONS: Final[dict[str, Callable[[Raises, 'Way', str], Any]]] = {
    'map': lambda fn, way, _: stream(MapDataset.range(COUNT).map(fn), way),
    'map_with_index': lambda fn, way, _: stream(MapDataset.range(COUNT).map_with_index(fn.indexed), way),
    'random_map': lambda fn, way, _: stream(MapDataset.range(COUNT).random_map(fn.random, seed=1), way),
    'filter': lambda fn, way, _: stream(MapDataset.range(COUNT).filter(fn.predicate), way),
    'batch_fn': lambda fn, way, _: stream(MapDataset.range(COUNT).batch(1, batch_fn=fn), way),
    'select_from_datasets': lambda fn, way, _: stream(
        MapDataset.select_from_datasets([MapDataset.range(COUNT)], Selected(fn)), way
    ),
    'blocks': lambda fn, way, _: stream(
        MapDataset.range(COUNT).map(fn).shuffle(1, granular.shuffle.Blocks(4)), way
    ),
    'getitem': lambda fn, way, _: stream(MapDataset.source(Indexed(fn)), way),
    'fetch': lambda fn, way, _: stream(MapDataset.source(Fetched(fn)), way),
    'async fetch': lambda fn, way, _: stream(MapDataset.source(Awaited(fn)), way),
    'on_error': lambda fn, way, _: stream(MapDataset.range(COUNT).map(failing), way, on_error=Replaced(fn)),
    'iter.map': lambda fn, way, _: stream(MapDataset.range(COUNT), way).batch(1, batch_fn=unchanged_batch).map(fn),
    'iter.filter': lambda fn, way, _: (
        stream(MapDataset.range(COUNT), way).batch(1, batch_fn=unchanged_batch).filter(fn.predicate)
    ),
    'iter.random_map': lambda fn, way, _: (
        stream(MapDataset.range(COUNT), way).batch(1, batch_fn=unchanged_batch).random_map(fn.random, seed=1)
    ),
    'iter.batch_fn': lambda fn, way, _: stream(MapDataset.range(COUNT), way).batch(1, batch_fn=fn),
    'flat_map': lambda fn, way, _: stream(MapDataset.range(COUNT), way).flat_map(fn.several),
    'prefetch': lambda fn, way, _: stream(MapDataset.range(COUNT), way).flat_map(fn.several).prefetch(4),
    'mix': lambda fn, way, _: IterDataset.mix(
        [stream(MapDataset.range(COUNT).map(fn), way), stream(MapDataset.range(COUNT), way)]
    ),
    'waiting map': lambda fn, way, _: stream(MapDataset.source(Awaited(identity)).map(fn), way),
    'waiting flat_map': lambda fn, way, _: stream(MapDataset.source(Awaited(identity)), way).flat_map(fn.several),
    'waiting Transform': lambda fn, way, _: loader(granular.sources.Transform(Awaited(identity), fn.dicts), way),
    'DataLoader': lambda fn, way, _: granular.grain.DataLoader(
        data_source=range(COUNT), sampler=granular.grain.samplers.SequentialSampler(COUNT), operations=[fn],
        worker_count=way.workers.num_workers, start_method=way.workers.start_method,
    ),
    'sampler': lambda fn, way, _: granular.grain.DataLoader(
        data_source=range(COUNT), sampler=Sampler(fn), operations=[],
        worker_count=way.workers.num_workers, start_method=way.workers.start_method,
    ),
    'Transform': lambda fn, way, _: loader(granular.sources.Transform(range(COUNT), fn.dicts), way),
    'Interleave': lambda fn, way, _: loader(
        granular.sources.Interleave([granular.sources.Transform(range(COUNT), fn.dicts)] * 2), way
    ),
    'decoder': lambda fn, way, folder: stream(MapDataset.source(reader(fn, folder)), way),
    'reader': lambda fn, way, folder: reader(fn, folder),
    'fields': lambda fn, way, _: stream(
        MapDataset.source(granular.kappadata.ModeWrapper(Methods(fn), 'x')), way
    ),
}  # fmt: skip


class Methods(granular.kappadata.KDDataset):
    """A user dataset with a method for each field."""

    def __init__(self, fn: Raises) -> None:
        self._fn = fn

    def __len__(self) -> int:
        return COUNT

    def getitem_x(self, index: int, ctx: Any = None) -> Any:
        return self._fn(index)

    def getitems_y(self, indices: list[int], ctxs: Any = None) -> list[Any]:
        return [self._fn(index) for index in indices]

    async def getitem_z(self, index: int, ctx: Any = None) -> Any:
        await asyncio.sleep(0)
        return self._fn(index)


def loader(source: Any, way: 'Way') -> granular.Loader:
    processes = way.workers.num_workers
    return granular.Loader(source, 1, 4, processes or 4, mp=way.workers.start_method if processes else None)


def reader(fn: Raises, folder: str) -> granular.DatasetReader:
    return granular.DatasetReader(folder, {'raw': fn.decode})


def write(folder: str) -> None:
    with granular.DatasetWriter(folder, {'x': 'raw'}, {'raw': encode_plain}) as writer:
        for i in range(COUNT):
            writer.append({'x': i})


# --- operations that are called once


def append_records(fn: Raises, folder: str) -> None:
    target = tempfile.mkdtemp(dir=folder)
    with granular.DatasetWriter(target + '/data', {'x': 'raw'}, {'raw': fn.encode}) as writer:
        for i in (*range(BAD), BAD + 1):
            writer.append({'x': i})
        try:
            writer.append({'x': BAD})
        finally:
            # The writer has not moved, and goes on.
            writer.append({'x': BAD + 2})
            writer.close()
            with granular.DatasetReader(target + '/data', {'raw': decode_plain}) as written:
                if [point['x'] for point in written] != [*range(BAD), BAD + 1, BAD + 2]:
                    raise AssertionError('the dataset is not what was appended')


def decode_plain(record: bytes) -> int:
    return int.from_bytes(record, 'little')


def convert_iterable(fn: Raises, folder: str) -> None:
    granular.convert(({'x': value} for value in UserIterable(fn)), tempfile.mkdtemp(dir=folder) + '/data')


def convert_with_encoder(fn: Raises, folder: str) -> None:
    records = [{'x': value} for value in range(COUNT)]
    path = tempfile.mkdtemp(dir=folder) + '/data'
    granular.convert(records, path, spec={'x': 'raw'}, encoders={'raw': fn.encode}, shardlen=8)


def convert_async_iterable(fn: Raises, folder: str) -> None:
    class Given:
        def __init__(self) -> None:
            self._given = UserIterable(fn)

        def __aiter__(self) -> 'Given':
            return self

        async def __anext__(self) -> dict[str, int]:
            try:
                value = self._given.next()
            except IndexError:
                raise StopAsyncIteration from None
            return {'x': value}

    granular.convert(Given(), tempfile.mkdtemp(dir=folder) + '/data')


def convert_with_progress(fn: Raises, folder: str) -> None:
    path = tempfile.mkdtemp(dir=folder) + '/data'
    granular.convert([{'x': value} for value in range(COUNT)], path, progress=lambda count: fn(BAD))


def index_with_progress(fn: Raises, folder: str) -> None:
    path = tempfile.mkdtemp(dir=folder)
    with granular.ShardedDatasetWriter(path, {'x': 'int'}, granular.encoders, shardlen=4) as writer:
        writer.append({'x': 1})
    granular.build_index(path, progress=lambda count: fn(BAD))


def copy_with_progress(fn: Raises, folder: str) -> None:
    granular.Path(folder).copy(granular.Path(tempfile.mkdtemp()) / 'copy', progress=lambda count: fn(BAD))


async def append(fn: Raises, folder: str) -> None:
    async with aio.DatasetWriter(tempfile.mkdtemp(dir=folder) + '/data', {'x': 'raw'}, {'raw': fn.encode}) as writer:
        for i in range(COUNT):
            await writer.append({'x': i})


class UserIterable:
    """A user iterable. Its own StopIteration is its end."""

    def __init__(self, fn: Raises) -> None:
        self._fn, self._numbers = fn, iter(range(COUNT))

    def __iter__(self) -> 'UserIterable':
        return self

    def __next__(self) -> int:
        value = next(self._numbers)
        return int(self._fn(value))

    def next(self) -> int:
        value = next(self._numbers, None)
        if value is None:
            raise IndexError
        return int(self._fn(value))


CALLS: Final[dict[str, Callable[[Raises, str], Any]]] = {
    'map[i]': lambda fn, folder: MapDataset.range(COUNT).map(fn)[BAD],
    'map.fetch': lambda fn, folder: MapDataset.range(COUNT).map(fn).fetch(range(COUNT)),
    'filter[i]': lambda fn, folder: MapDataset.range(COUNT).filter(fn.predicate)[BAD],
    'getitem[i]': lambda fn, folder: MapDataset.source(Indexed(fn))[BAD],
    'async fetch[i]': lambda fn, folder: MapDataset.source(Awaited(fn))[BAD],
    'sampler.len': lambda fn, folder: MapDataset.source(Long(fn)),
    'Transform[i]': lambda fn, folder: granular.sources.Transform(range(COUNT), fn.dicts)[BAD],
    'Transform.fetch': lambda fn, folder: granular.sources.Transform(range(COUNT), fn.dicts).fetch(range(COUNT)),
    'Loader.len': lambda fn, folder: next(granular.Loader(granular.sources.Interleave([Long(fn)]), 1)),
    'reader[i]': lambda fn, folder: reader(fn, folder)[BAD],
    'reader[i:]': lambda fn, folder: reader(fn, folder)[BAD : BAD + 4],
    'reader.fetch': lambda fn, folder: reader(fn, folder).fetch(range(COUNT)),
    'append': append_records,
    'convert': convert_iterable,
    'convert encoder': convert_with_encoder,
    'convert async': convert_async_iterable,
    'convert progress': convert_with_progress,
    'copy progress': copy_with_progress,
    'index progress': index_with_progress,
    'fields many': lambda fn, folder: MapDataset.source(granular.kappadata.ModeWrapper(Methods(fn), 'y')).fetch(
        range(COUNT)
    ),
    'fields async': lambda fn, folder: MapDataset.source(granular.kappadata.ModeWrapper(Methods(fn), 'z')).fetch(
        range(COUNT)
    ),
    'aio append': lambda fn, folder: run_in_loop(append(fn, folder)),
    'aio map.get': lambda fn, folder: run_in_loop(MapDataset.range(COUNT).map(fn).aio.get(BAD)),
    'aio map.fetch': lambda fn, folder: run_in_loop(MapDataset.range(COUNT).map(fn).aio.fetch(range(COUNT))),
    'aio async fetch': lambda fn, folder: run_in_loop(MapDataset.source(Awaited(fn)).aio.fetch(range(COUNT))),
    'aio reader.get': lambda fn, folder: run_in_loop(reader(fn, folder).aio.get(BAD)),
    'aio reader.fetch': lambda fn, folder: run_in_loop(reader(fn, folder).aio.fetch(range(COUNT))),
    'waiting map.fetch': lambda fn, folder: MapDataset.source(Awaited(identity)).map(fn).fetch(range(COUNT)),
    'aio gather': lambda fn, folder: run_in_loop(
        MapDataset.zip([MapDataset.range(COUNT).map(fn), MapDataset.range(COUNT).map(fn)]).aio.fetch(range(COUNT))
    ),
}


ENDS: Final = {('convert', 'StopIteration'), ('convert async', 'StopAsyncIteration')}  # of the user's own iterators


class Long:
    """A data source whose length raises."""

    def __init__(self, fn: Raises) -> None:
        self._fn = fn

    def __len__(self) -> int:
        return int(self._fn(BAD))

    def __getitem__(self, index: int) -> Any:
        return {'x': index}


# --- ways to iterate over an operation


def iterate(items: Any) -> None:
    before = 0
    with contextlib.ExitStack() as stack:
        iterator = iter(items)
        if hasattr(iterator, 'close'):
            stack.callback(iterator.close)
        for _ in iterator:
            before += 1
    raise AssertionError(f'no error, but {before} elements of {COUNT}')


def iterate_async(items: Any) -> None:
    run_in_loop(_iterate_async(items))


async def _iterate_async(items: Any) -> None:
    before = 0
    iterator = aiter(items.aio if hasattr(items, 'aio') else items)
    try:
        async for _ in iterator:
            before += 1
    finally:
        await iterator.aclose()
    raise AssertionError(f'no error, but {before} elements of {COUNT}')


def run_in_loop(coro: Any) -> Any:
    """Await a coroutine on its own loop, and re-raise its exception outside of the loop."""

    async def main() -> None:
        try:
            await coro
        except BaseException as error:
            caught.append(error)

    caught: list[BaseException] = []
    asyncio.run(main())
    if not caught:
        raise AssertionError('no error')
    raise caught[0]


class Way:
    """A way to iterate over the elements of an operation."""

    def __init__(self, take: Callable[[Any], None], processes: int, method: str = 'spawn', api: Any = granular) -> None:
        self.take, self.api = take, api
        self.workers = MultiprocessingOptions(processes, start_method=method)


WAYS: Final = {
    'threads': Way(iterate, 0),
    'async': Way(iterate_async, 0, api=aio),
    'fork': Way(iterate, 1, 'fork'),
    'spawn': Way(iterate, 1, 'spawn'),
}


def find_problem(error: BaseException, name: str) -> str | None:
    """Return the problem with an error that reached the caller, or None."""
    raised = ERRORS[name]()
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if type(error) is SilentError is type(raised):
        return None
    if name in UNCHANGED and type(error) is type(raised) and str(error) == str(raised):
        return None
    if isinstance(error, GranularError) and any(type(link) is type(raised) for link in chain):
        return None
    if name == 'OddError' and any(isinstance(link, WorkerError) and 'OddError' in str(link) for link in chain):
        return None  # it does not pickle
    return f'got {error!r}, from {chain[1:]!r:.300}'


def run_in_thread(work: Callable[[], Any]) -> tuple[BaseException | None, str | None]:
    """Run work in a thread; returns its exception, and the problem if it did not end in time."""
    caught: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(BOUND)
    return (caught[0] if caught else None), (f'not done in {BOUND:.0f} s' if thread.is_alive() else None)


def probe() -> None:
    """Read a stream that needs the loop, threads and tasks."""
    dataset = MapDataset.range(8).map(str).to_iter_dataset().flat_map(list).prefetch(2)
    with iter(dataset) as iterator:
        assert list(iterator) == list('01234567')
    on_loop(asyncio.sleep(0))


def cases(way: str, folder: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield the names of operation and error, and the function that raises."""
    if way == 'calls':
        for operation, name in cover([list(CALLS)], FAMILIES):
            if (operation, name) not in ENDS:
                called = CALLS[operation]
                yield operation, name, lambda called=called, name=name: called(Raises(name), folder)  # type: ignore[misc]
        return
    chosen = WAYS[way]
    # What a worker raises takes the same way from each operation: there, each operation and each error comes once.
    for operation, name in cover([list(OPERATIONS)], [list(ERRORS)] if way == 'fork' else FAMILIES):
        make = OPERATIONS[operation]
        yield (
            operation,
            name,
            lambda make=make, name=name: chosen.take(make(Raises(name), chosen, folder)),  # type: ignore[misc]
        )


def main() -> None:
    """Run the cases of a way: all of them, or those of some operations or errors."""
    logging.getLogger('granular').setLevel('ERROR')  # it warns of what on_error replaces
    way, *some = sys.argv[1:]
    problems: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder + '/data')
        for operation, name, work in cases(way, folder + '/data'):
            if some and operation not in some and name not in some:
                continue
            error, fault = run_in_thread(work)
            if fault is None:
                fault = 'no error' if error is None else find_problem(error, name)
            probed, late = run_in_thread(probe)
            if probed is not None or late is not None:
                fault = f'{fault}; then the next read: {late or repr(probed)}'
            problems[f'{operation} {name}'] = fault
            if late is not None:
                break  # nothing works any more
    sys.stdout.write(json.dumps(problems))
    sys.stdout.flush()
    os._exit(0) if any(problems.values()) else None


if __name__ == '__main__':
    main()
