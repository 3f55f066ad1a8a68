"""Ctrl-C inside ``next``, caught: the next call returns the same element, and the saved state is the one before it.

So are the states that are saved later.

Iterators that have no state, such as those of readers, listings and lines of files, continue as well.

Interrupts come at counted points, as in ``test_interrupts.py``: on the main thread, and while it waits for the loop.
One that comes after ``next`` has returned, and before its caller stores the element, is not seen: no point is there.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset, MultiprocessingOptions, ReadOptions
from granular.aio.runtime.loops import ensure_event_loop
from tests.robustness.test_interrupts import Loop, MainThread, points
from tests.support.files import FILES
from tests.support.states import plain
from tests.support.tables import pairwise

COUNT = 12


class Waiting:
    """A source that waits on the loop for each of its elements."""

    def __len__(self) -> int:
        return COUNT

    async def fetch(self, indices: Any) -> list[int]:
        await ensure_event_loop()
        await asyncio.sleep(0)
        return [int(index) for index in indices]


def elements(**options: Any) -> IterDataset[Any]:
    return MapDataset.range(COUNT).to_iter_dataset(ReadOptions(**options))


def waiting() -> IterDataset[Any]:
    return MapDataset.source(Waiting()).to_iter_dataset(ReadOptions(prefetch_buffer_size=3))


def double(x: Any) -> Any:
    return x * 2


def data_loader(**options: Any) -> granular.DataLoader:
    sampler = granular.IndexSampler(COUNT, shuffle=True, num_epochs=1, seed=1)
    return granular.DataLoader(data_source=range(COUNT), sampler=sampler, operations=[double], **options)


def loader(**options: Any) -> granular.Loader:
    source = granular.sources.Transform(
        granular.sources.Epochs(range(COUNT), shuffle=False), lambda x, seed: {'x': np.int64(x)}
    )
    return granular.Loader(source, 2, prefetch=2, **options)


STREAMS: dict[str, Callable[[], Any]] = {
    'plain': elements,
    'without read-ahead': lambda: elements(prefetch_buffer_size=0),
    'source that waits': waiting,
    'map': lambda: elements().map(double),
    'filter': lambda: elements().filter(lambda x: x % 3),
    'flat_map': lambda: elements().flat_map(lambda x: [x, x]),
    'batch': lambda: elements().batch(2),
    'pack': lambda: elements().map(lambda x: {'t': np.full(x % 3 + 1, x)}).pack({'t': 4}, num_packing_bins=2),
    'cache': lambda: elements().cache().repeat(2),
    'cache of a mix by name': lambda: IterDataset.mix({'a': elements(), 'b': waiting()}).cache().repeat(2),
    'window_shuffle': lambda: elements().window_shuffle(4, seed=1),
    'zip': lambda: IterDataset.zip([elements(), elements().map(double)]),
    'mix': lambda: IterDataset.mix([elements(), waiting()], [2, 1]),
    'mix by name': lambda: IterDataset.mix({'a': elements(), 'b': elements().map(double)}),
    'interleave': lambda: IterDataset.interleave([elements(), waiting(), elements()], cycle_length=2),
    'prefetch': lambda: elements().prefetch(3),
    'prefetch of a mix': lambda: IterDataset.mix([elements(), waiting()]).prefetch(2),
    'prefetch and batch': lambda: waiting().map(double).prefetch(2).batch(2),
    'processes': lambda: elements().map(double).mp_prefetch(MultiprocessingOptions(1, start_method='fork')),
    'DataLoader': data_loader,
    'Loader': loader,
    'Loader, processes': lambda: loader(mp='fork', workers=1),
    'Loader, batches of torch': lambda: torch_batches(loader(), 'cpu', 2),
    'batches of torch of a stream': lambda: torch_batches(elements().batch(2), 'cpu'),
}  # fmt: skip


def running(made: Any) -> Any:
    return made if isinstance(made, granular.Loader) else iter(made)


def save(iterator: Any) -> Any:
    return iterator.save() if isinstance(iterator, granular.Loader) else iterator.get_state()


def consume(iterator: Iterator[Any], result: list[Any], most: int) -> None:
    """Append elements up to the given number. Between two instructions behind ``__next__``, no interrupt comes."""
    while len(result) < most:
        try:
            element = iterator.__next__()
        except StopIteration:
            return
        result.append(element)


# --- iterators without states


NUMBERS = list(range(COUNT))


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory, fakegcs: Any) -> dict[str, granular.Path]:
    """A folder on a disk and one in a bucket, with the same files of each kind."""
    folders = {'disk': granular.Path(tmp_path_factory.mktemp('data')), 'bucket': fakegcs.place()}
    for folder in folders.values():
        with granular.BagWriter(folder / 'records.bag') as bag:
            for number in NUMBERS:
                bag.append(b'%d' % number)
        for kind, name, options in (
            (granular.DatasetWriter, 'dataset', {}),
            (granular.ShardedDatasetWriter, 'shards', {'shardlen': 3}),
        ):
            with kind(folder / name, {'n': 'int', 'tokens': 'array'}, granular.encoders, **options) as writer:
                for number in NUMBERS:
                    writer.append({'n': number, 'tokens': np.full(2, number)})
        for suffix, make in FILES.items():
            (folder / f'file.{suffix}').write_bytes(make(NUMBERS))
        (folder / 'lines').write_bytes(b''.join(b'%d\n' % number for number in NUMBERS))
        for number in NUMBERS:
            (folder / f'listed/{number % 4}').mkdir(parents=True, exist_ok=True)
            (folder / f'listed/{number % 4}/{number}').write_bytes(b'')
    return folders


def shards(folder: granular.Path) -> Any:
    return granular.ShardedDatasetReader(folder / 'shards', granular.decoders)


ITERATORS: dict[str, Callable[[granular.Path], Any]] = {
    'BagReader': lambda folder: granular.BagReader(folder / 'records.bag'),
    'DatasetReader': lambda folder: granular.DatasetReader(folder / 'dataset', granular.decoders),
    'ShardedDatasetReader': shards,
    'MapDataset': lambda folder: MapDataset.source(shards(folder)),
    'TokenWindows': lambda folder: granular.TokenWindows(shards(folder), 'tokens', 2),
    'ParquetDataSource': lambda folder: granular.ParquetDataSource(folder / 'file.parquet'),
    'TFRecordDataSource': lambda folder: granular.TFRecordDataSource(folder / 'file.tfrecord'),
    'WebDatasetDataSource': lambda folder: granular.WebDatasetDataSource(folder / 'file.tar'),
    'ArrayRecordDataSource': lambda folder: granular.ArrayRecordDataSource(folder / 'file.array_record'),
    'TFRecordIterDataset': lambda folder: granular.TFRecordIterDataset(folder / 'file.tfrecord'),
    'ParquetIterDataset': lambda folder: granular.ParquetIterDataset(folder / 'file.parquet'),
    'lines of a file': lambda folder: (folder / 'lines').open(),
    'iterdir': lambda folder: (folder / 'listed' / '1').iterdir(),
    'glob': lambda folder: (folder / 'listed').glob('*/*'),
    'rglob': lambda folder: (folder / 'listed').rglob('*'),
    'walk': lambda folder: (folder / 'listed').walk(),
    'batches of torch': lambda folder: torch_batches(loader()),
    'batches of torch of a list': lambda folder: torch_batches([np.full(2, number) for number in NUMBERS], 'cpu', 2),
}  # fmt: skip


def torch_batches(*args: Any) -> Any:
    from granular.integrations import torch

    return torch.Batches(*args)


@pytest.mark.filterwarnings('ignore:unclosed scandir iterator')  # interrupted before the next instruction
@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function WeakSet')  # Python drops interrupts there
@pytest.mark.parametrize(
    ('name', 'place', 'kind'), pairwise(itertools.product(ITERATORS, ['disk', 'bucket'], [MainThread, Loop]))
)
def test_interrupted_iterator_loses_and_repeats_no_item(name: str, place: str, kind: Any, data: Any) -> None:
    @contextlib.contextmanager
    def started() -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            made = ITERATORS[name](data[place])
            if hasattr(made, '__exit__'):
                stack.enter_context(made)
            yield stack.enter_context(contextlib.closing(iter(made)))

    expected: list[Any] = []
    with started() as iterator, kind() as counted:
        consume(iterator, expected, 6 if name.startswith('batches') else 30)
    assert len(expected) > 2
    expected = list(map(repr, plain(expected)))
    middle = counted.count // 2
    for at in itertools.chain(points(counted.count), range(middle, middle + 5)):
        result: list[Any] = []
        with started() as iterator:
            interrupt = kind(at)
            try:
                with interrupt:
                    consume(iterator, result, len(expected))
            except KeyboardInterrupt:
                pass
            consume(iterator, result, len(expected))
            assert list(map(repr, plain(result))) == expected, f'{name}, point {at}: {interrupt.where}'


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')  # the interrupt came before its first step
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function WeakSet')  # Python drops interrupts there
@pytest.mark.parametrize('kind', [MainThread, Loop])
@pytest.mark.parametrize('name', STREAMS)
def test_interrupted_next_loses_and_repeats_no_element(name: str, kind: Any) -> None:
    make, most, few = STREAMS[name], 6 if name.startswith('Loader') else 30, 'processes' in name
    expected: list[Any] = []
    with running(make()) as iterator, kind() as counted:
        consume(iterator, expected, most)
    expected = plain(expected)
    assert len(expected) > 3
    middle = counted.count // 2
    for at in itertools.chain(points(counted.count, few), range(middle, middle + (3 if few else 5))):
        result: list[Any] = []
        with running(make()) as iterator:
            interrupt = kind(at)
            try:
                with interrupt:
                    consume(iterator, result, most)
            except KeyboardInterrupt:
                pass
            states = [(len(result), save(iterator))]
            consume(iterator, result, min(most, len(result) + 2))
            states.append((len(result), save(iterator)))
            consume(iterator, result, most)
            assert plain(result) == expected, f'{name}, point {at}: {interrupt.where}'
        for position, state in states:
            with running(make()) as resumed:
                resumed.load_state_dict(state)
                rest = expected[:position]
                consume(resumed, rest, most)
                assert plain(rest) == expected, f'{name}, point {at}, from its state: {interrupt.where}'


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function WeakSet')  # Python drops interrupts there
@pytest.mark.parametrize('name', ['prefetch', 'prefetch of a mix', 'window_shuffle', 'TFRecordIterDataset'])
def test_second_ctrl_c_while_the_first_is_undone_loses_and_repeats_no_element(name: str, data: Any) -> None:
    """The call that follows an interrupt goes back to the element that was not received: it may be interrupted, too."""
    make, most = STREAMS.get(name) or (lambda: ITERATORS[name](data['disk'])), 9
    expected: list[Any] = []
    with running(make()) as iterator:
        consume(iterator, expected, most)

    def interrupted(iterator: Any, result: list[Any], interrupt: MainThread) -> None:
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            consume(iterator, result, len(result) + 1)

    with running(make()) as iterator:
        consume(iterator, result := [], 2)
        interrupted(iterator, result, whole := MainThread())
    for first in range(1 + whole.count // 8, whole.count + 1, 1 + whole.count // 4):
        second = 0
        undone = MainThread()
        while undone.count >= second:
            second += 1
            result = []
            with running(make()) as iterator:
                consume(iterator, result, 2)
                interrupted(iterator, result, MainThread(first))
                interrupted(iterator, result, undone := MainThread(second))
                consume(iterator, result, most)
            assert plain(result) == plain(expected), f'{name}, points {first}, {second}: {undone.where}'


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function WeakSet')  # Python drops interrupts there
@pytest.mark.parametrize('name', [name for name in STREAMS if 'processes' not in name])
def test_interrupted_load_of_a_state_is_done_or_not(name: str) -> None:
    def interrupted(at: int) -> MainThread:
        with running(STREAMS[name]()) as iterator:
            beginning = save(iterator)
            consume(iterator, [], 2)
            with contextlib.suppress(KeyboardInterrupt), MainThread(at) as interrupt:
                iterator.load_state_dict(beginning)
            state = save(iterator)
            consume(iterator, rest := [], 3)
        with running(STREAMS[name]()) as resumed:
            resumed.load_state_dict(state)
            consume(resumed, same := [], 3)
        assert plain(rest) == plain(same) and plain(rest) in (expected[:3], expected[2:5]), interrupt.where
        return interrupt

    with running(STREAMS[name]()) as iterator:
        consume(iterator, elements := [], 5)
    expected = plain(elements)
    for at in points(interrupted(-1).count):
        interrupted(at)


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
def test_memory_is_used_again_by_one_batch_although_a_state_is_loaded_after_ctrl_c() -> None:
    for at in itertools.count(1):
        with loader(recycle_after=1) as iterator:
            for _ in range(3):
                next(iterator)
            with contextlib.suppress(KeyboardInterrupt), MainThread(at) as interrupt:
                iterator.__next__()
            if not interrupt.where:
                break
            iterator.load(iterator.save())
            for step in range(iterator.consumed, iterator.consumed + 8, 2):
                assert next(iterator)['x'].tolist() == [step % COUNT, step % COUNT + 1], interrupt.where


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
def test_failures_of_a_batch_that_comes_again_after_ctrl_c_are_counted_once() -> None:
    source = MapDataset.range(6).map(lambda x: {'x': x if x % 3 else int('no number')})
    for at in itertools.count(1):
        with granular.Loader(source, 3, on_error='skip') as iterator:
            with contextlib.suppress(KeyboardInterrupt), MainThread(at) as interrupt:
                iterator.__next__()
            if not interrupt.where:
                break
            consume(iterator, [], 2)
            assert [step for step, _ in iterator.errors][-2:] == [0, 3]
            assert iterator.stats()['errors'] == 2, interrupt.where


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function WeakSet')  # Python drops interrupts there
@pytest.mark.parametrize('name', [name for name in ITERATORS if name.endswith('IterDataset')])
def test_ctrl_c_inside_a_stream_of_files_is_raised_as_itself(name: str, data: Any) -> None:
    """Interrupts also come in a frame that awaits, between those of coroutines, where no counted point is."""
    listening, draw, caught = [False], random.Random(0), 0

    def interrupt(*args: Any) -> None:
        if listening[0]:
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # as Python drops interrupts in what others, such as JAX, call at a collection
    try:
        while caught < 1000:
            with iter(ITERATORS[name](data['disk'])) as iterator:
                while caught < 1000:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-4))
                    try:
                        listening[0] = True
                        iterator.__next__()
                        listening[0] = False
                    except KeyboardInterrupt:
                        listening[0] = False
                        caught += 1
                    except StopIteration:
                        listening[0] = False
                        break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, handler)
