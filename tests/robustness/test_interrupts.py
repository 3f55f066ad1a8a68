"""One Ctrl-C, wherever a call waits: what it had not handed over comes next, and what it wrote is whole or absent.

The source that is read, the server, and the functions of the system that publish files send SIGINT to this process.
``python -m tests.robustness.interrupts`` interrupts whole programs at random moments.
"""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import granular
from granular import MapDataset
from granular.errors import AlreadyExistsError, ClosedError
from granular.grain.experimental import ParquetIterDataset
from tests.robustness.interrupts import WRITES, damage_of, main, write
from tests.support import streams
from tests.support.fault_proxy import FaultProxy
from tests.support.files import FILES
from tests.support.states import plain
from tests.support.streams import COUNT, STREAMS, consume, running, save
from tests.support.tables import FULL_TABLES

# An interrupt may come between the making of a coroutine and its first step: nothing is lost, and Python says so.
pytestmark = pytest.mark.filterwarnings('ignore:coroutine .* was never awaited:RuntimeWarning')


class Interrupts:
    """Calls of any thread or process, some of which, counted from 1, interrupt the main thread: by then, it waits."""

    def __init__(self, *numbers: int) -> None:
        self._numbers, self._pid, self.count = numbers, os.getpid(), 0
        self._sending = 0

    def __call__(self, *args: object) -> str:
        self.count += 1
        if self.count in self._numbers:
            self._sending += 1
            if threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid:
                time.sleep(0.005)
            os.kill(self._pid, signal.SIGINT)
            self._sending -= 1
            time.sleep(0.001)
        return ''

    def settle(self) -> None:
        """Wait for an interrupt that is sent at this moment, as by the server of a request that was read ahead."""
        while self._sending:
            time.sleep(0.001)


class InThreads:
    """Numbers that are read after a call of interrupts."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts = interrupts

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.interrupts()
        return index


class OnTheLoop(InThreads):
    async def fetch(self, indices: Any) -> list[int]:
        self.interrupts()
        await asyncio.sleep(0.002)  # where it is cancelled
        return [int(index) for index in indices]


class Endless(InThreads):
    """A source that waits, and that cleans up for a long time."""

    ended = False  # True once it has cleaned up

    async def fetch(self, indices: Any) -> list[int]:
        try:
            self.interrupts()
            await asyncio.sleep(60)
        finally:
            self.interrupts()
            await asyncio.sleep(60)
            self.ended = True
        return []


soon = signal.default_int_handler


def late(*_: object) -> None:
    """Raise KeyboardInterrupt once the call has a result, which it cannot hand over."""
    time.sleep(0.02)
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a program of its own: one that is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- iterators


@pytest.mark.parametrize(('kind', 'handler'), [(OnTheLoop, soon), (InThreads, soon), (InThreads, late)])
@pytest.mark.parametrize('name', STREAMS)
def test_interrupted_next_loses_and_repeats_no_element(name: str, kind: Any, handler: Any, monkeypatch: Any) -> None:
    def made(*numbers: int) -> tuple[Any, Interrupts]:
        interrupts = Interrupts(*numbers)
        monkeypatch.setattr(streams, 'numbers', lambda: MapDataset.source(kind(interrupts)))
        monkeypatch.setattr(streams, 'Waiting', lambda: kind(interrupts))
        return running(STREAMS[name]()), interrupts

    signal.signal(signal.SIGINT, handler)
    most = 6 if name.startswith('Loader') else 30
    counted, interrupts = made()
    with counted as iterator:
        consume(iterator, elements := [], most)
    expected = plain(elements)
    for number in range(1, max(2, interrupts.count // 2)) if 'processes' not in name else (2, 5):
        result: list[Any] = []
        with made(number)[0] as iterator:
            with pytest.raises(KeyboardInterrupt):
                consume(iterator, result, most)
            states = [(len(result), save(iterator))]
            consume(iterator, result, min(most, len(result) + 2))
            states.append((len(result), save(iterator)))
            consume(iterator, result, most)
            assert plain(result) == expected, number
        for position, state in states:
            with made()[0] as resumed:
                resumed.load_state_dict(state)
                consume(resumed, rest := expected[:position], len(expected))
                assert plain(rest) == expected, (number, position)


@pytest.fixture(scope='module')
def proxy(fakegcs: Any) -> Iterator[FaultProxy]:
    with FaultProxy(fakegcs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultProxy, fakegcs: Any) -> granular.Path:
    """A folder in a bucket behind the proxy, whose requests are counted: none is sent twice."""
    root = fakegcs.place()
    options = {**root.store.options, 'endpoint_url': proxy.endpoint}
    return granular.Path(str(root), config=granular.IOConfig(hedge=0), **options)


@contextlib.contextmanager
def interrupting(place: str, proxy: FaultProxy, patch: pytest.MonkeyPatch, *numbers: int) -> Iterator[Interrupts]:
    """Interrupt at requests; on a disk before values are encoded, and files appear, disappear or are made durable."""
    interrupts = Interrupts(*numbers)

    def after(function: Any) -> Any:
        return lambda *args, **options: (interrupts(), function(*args, **options))[1]

    with patch.context() as patch:
        if place == 'bucket':
            patch.setattr(proxy, 'plan', interrupts)
        else:
            for name in ('link', 'replace', 'rename', 'unlink', 'rmdir', 'fsync', 'mkdir'):
                patch.setattr(os, name, after(getattr(os, name)))
            patch.setitem(granular.encoders, 'int', after(granular.encoders['int']))
        yield interrupts
    with contextlib.suppress(KeyboardInterrupt):  # of a request that nobody waited for
        time.sleep(0.002)
        interrupts.settle()
        time.sleep(0.002)


ITERATORS: dict[str, Callable[[granular.Path], Any]] = {
    'BagReader': lambda folder: granular.BagReader(folder / 'data/000000/n.bag'),
    'ShardedDatasetReader': lambda folder: granular.ShardedDatasetReader(folder / 'data', granular.decoders),
    'Windows': lambda folder: granular.Windows(ITERATORS['ShardedDatasetReader'](folder), {'x': 2}),
    'ParquetDataSource': lambda folder: granular.ParquetDataSource(folder / 'file.parquet'),
    'ParquetIterDataset': lambda folder: ParquetIterDataset(folder / 'file.parquet'),
    'lines of a file': lambda folder: (folder / 'lines').open(),
}  # fmt: skip


@pytest.mark.parametrize('handler', [soon, late])
def test_interrupted_iteration_in_a_bucket_loses_and_repeats_no_item(handler, bucket, proxy, monkeypatch):
    def iterate(make: Any, *numbers: int) -> tuple[list[str], int]:
        with contextlib.ExitStack() as stack:
            made = make(bucket)
            if hasattr(made, '__exit__'):
                stack.enter_context(made)
            iterator = stack.enter_context(contextlib.closing(iter(made)))
            items: list[Any] = []
            with interrupting('bucket', proxy, monkeypatch, *numbers) as interrupts:
                while True:  # what is read ahead on a busy machine may be interrupted later, or not at all
                    with contextlib.suppress(KeyboardInterrupt):
                        consume(iterator, items, 99)
                        interrupts.settle()
                        break
        return list(map(repr, plain(items))), interrupts.count

    signal.signal(signal.SIGINT, handler)
    write('ShardedDatasetWriter', bucket / 'data', 9)
    (bucket / 'file.parquet').write_bytes(FILES['parquet'](range(7)))
    (bucket / 'lines').write_bytes(b'line\n' * 9)
    for name, make in ITERATORS.items():
        expected, count = iterate(make)
        assert len(expected) > 2
        for number in range(1, count + 1):
            assert iterate(make, number)[0] == expected, f'{name}, request {number}'


@pytest.mark.parametrize('most', [0, 1, 2])
def test_interrupted_listing_begins_anew_or_is_refused(most, tmp_path, monkeypatch):
    for name in 'abc':
        (tmp_path / name).mkdir()
    expected = list(granular.Path(tmp_path).walk())
    levels, scandir, begun = granular.Path(tmp_path).walk(), os.scandir, []

    def interrupted(path: str) -> Any:
        begun.append(path)
        if len(begun) == most + 1:
            raise KeyboardInterrupt
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', interrupted)
    found: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        consume(levels, found, 9)
    if most == 0:
        assert list(levels) == expected
    else:
        for _ in range(2):
            with pytest.raises(ClosedError, match='the listing was interrupted: list again'):
                consume(levels, found, 9)
        assert 0 < len(found) <= most and found == expected[: len(found)]


# --- writers and copies


def contents(root: granular.Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if not path.is_dir()}


@pytest.mark.filterwarnings('ignore')  # writers that were not closed
@pytest.mark.parametrize('place', ['disk', 'bucket'])
@pytest.mark.parametrize('name', WRITES)
def test_what_is_written_is_whole_or_absent_and_is_resumed(name, place, bucket, proxy, tmp_path, monkeypatch):
    write('DatasetWriter', granular.Path(tmp_path) / 'data')
    where = granular.Path(tmp_path) if place == 'disk' else bucket

    def interrupted(root: granular.Path, *numbers: int) -> int:
        with interrupting(place, proxy, monkeypatch, *numbers) as interrupts:
            WRITES[name](granular.Path(tmp_path), root / '0')
        return interrupts.count

    count, expected = interrupted(where / 'whole'), contents(where / 'whole')
    assert count > 1
    for number in range(1, count + 1, 1 if FULL_TABLES else max(1, count // 7)):
        root = where / f'{number}'
        with pytest.raises(KeyboardInterrupt):
            interrupted(root, number)
        assert damage_of(root) == ''
        with contextlib.suppress(AlreadyExistsError):  # it was published before the interrupt
            WRITES[name](granular.Path(tmp_path), root / '0')
        assert contents(root) == expected, number


@pytest.mark.parametrize('place', ['disk', 'bucket'])
def test_interrupted_conversion_to_megatron_leaves_both_files_or_none(place, bucket, proxy, tmp_path, monkeypatch):
    where = granular.Path(tmp_path) if place == 'disk' else bucket
    tokens = [np.arange(length, dtype=np.uint16) for length in range(20)]

    def interrupted(root: granular.Path, *numbers: int) -> int:
        with interrupting(place, proxy, monkeypatch, *numbers) as interrupts:
            granular.convert(tokens, root / 'x.idx')
        return interrupts.count

    count, expected = interrupted(where / 'whole'), contents(where / 'whole')
    assert count > 1
    for number in range(1, count + 1):
        root = where / f'{number}'
        with pytest.raises(KeyboardInterrupt):
            interrupted(root, number)
        found = contents(root) if root.exists() else {}
        assert found in ({}, expected), number
        if not found:
            granular.convert(tokens, root / 'x.idx')
            assert contents(root) == expected, number


# --- the end of a call and of a program


@pytest.mark.parametrize('numbers', [[1], [1, 2]])
def test_interrupt_waits_for_the_clean_up_for_seconds_and_a_second_one_ends_that(numbers):
    count = itertools.count(1)

    def numbered(*_: object) -> None:
        raise KeyboardInterrupt(next(count))

    signal.signal(signal.SIGINT, numbered)
    source = Endless(Interrupts(*numbers))
    with granular.Loader(MapDataset.source(source), 2) as loader:
        with pytest.raises(KeyboardInterrupt) as caught:
            next(loader)
        # The first one is raised after the wait, a second one at once.
        assert (caught.value.args, source.ended) == ((len(numbers),), False)


def test_programs_end_or_go_on_after_interrupts_at_random_moments(capsys):
    assert main(['--times', '9', '--seed', f'{random.randrange(1 << 30)}']) == 0, capsys.readouterr().out
