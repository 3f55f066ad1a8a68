"""Ctrl-C at counted points of writers, readers, conversions and copies, which are then resumed as documented.

The interpreter looks for signals where functions begin, and where calls of C functions return. An interrupt comes at
the n-th of these points: on the main thread as KeyboardInterrupt itself, and on the loop of the library as a signal to
the main thread, which waits for it. ``make test-full`` interrupts at 500 of them in each program.
"""

import contextlib
import dis
import gc
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import granular
from granular import IOConfig
from granular.aio.runtime.bridge import run
from granular.aio.runtime.loops import ensure_event_loop
from granular.errors import AlreadyExistsError, GranularError
from tests.support.programs import run_python
from tests.support.tables import FULL_TABLES

SPEC = {'n': 'int', 'x': 'bytes'}
COUNT = 7
POINTS = [{'n': i * i, 'x': bytes([i]) * (i * 37 % 50)} for i in range(COUNT)]
RESUME = dis.opmap['RESUME']
CALLBACKS = ('finalize.__call__', 'WeakSet.__init__.<locals>._remove')  # of weak references
REMOVAL = ('rmtree', '_rmtree_safe_fd')  # of shutil, which close a descriptor twice if they are interrupted there


# --- programs, which resume what is there


def write_bag(root: granular.Path, version: int) -> None:
    root.mkdir(exist_ok=True)
    with granular.BagWriter(root / 'x.bag', version) as writer:
        for point in POINTS[len(writer) :]:
            writer.append(point['x'])


def write_dataset(root: granular.Path, layout: Any) -> None:
    with granular.DatasetWriter(root, SPEC, granular.encoders, layout) as writer:
        for point in POINTS[writer.found :]:
            writer.append(point)


def write_shards(root: granular.Path, layout: Any) -> None:
    with granular.ShardedDatasetWriter(root, SPEC, granular.encoders, 2, layout=layout) as writer:
        for point in POINTS[writer.found :]:
            writer.append(point)


def convert(root: granular.Path, iterable: bool) -> None:
    granular.convert((point for point in POINTS) if iterable else POINTS, root, spec=SPEC, shardlen=2)


def write_file(root: granular.Path, streamed: bool) -> None:
    root.mkdir(exist_ok=True)
    if not streamed:
        (root / 'x').write_bytes(bytes(5000))
        return
    with (root / 'x').open('wb') as file:
        for _ in range(5):
            file.write(bytes(1000))


def copy_file(root: granular.Path) -> None:
    root.mkdir(exist_ok=True)
    (sources(root) / 'refs' / 'spec.json').copy(root / 'copy.json')


def copy_folder(root: granular.Path) -> None:
    (sources(root) / 'shards').copy(root)


def copy_to_local(root: granular.Path, name: str) -> None:
    granular.copy_to_local(sources(root) / name, root / 'copy')


def read(root: granular.Path, name: str) -> None:
    kind: Any = granular.ShardedDatasetReader if name == 'shards' else granular.DatasetReader
    with kind(sources(root) / name, granular.decoders) as reader:
        assert list(reader) == POINTS
        assert reader.fetch([3, 1]) == [POINTS[3], POINTS[1]]
        assert reader[5] == POINTS[5]
        assert reader[2:4]['n'] == [4, 9]


def read_cached(root: granular.Path, kind: str) -> None:
    folder = sources(root) / 'refs'
    with tempfile.TemporaryDirectory() as blocks:
        if kind == 'blocks':
            store = folder.store
            folder = granular.Path.of(type(store)(store.root, IOConfig(cache_dir=blocks), store.options), folder.key)
        with granular.DatasetReader(folder, granular.decoders) as reader:
            with (
                contextlib.nullcontext(reader)
                if kind == 'blocks'
                else granular.SharedMemoryCache(reader, max_bytes=1 << 20) as cache
            ):
                for _ in range(2):
                    assert [cache[i] for i in range(COUNT)] == POINTS


def load(root: granular.Path, **options: Any) -> None:
    with granular.DatasetReader(sources(root) / 'refs', granular.decoders) as reader:
        batches = granular.sources.Transform(
            granular.sources.Epochs(reader, shuffle=False), lambda point, seed: {'n': point['n']}
        )
        with granular.Loader(batches, 2, **options) as loader:
            assert [next(loader)['n'].tolist() for _ in range(3)] == [[0, 1], [4, 9], [16, 25]]


PROGRAMS: dict[str, Callable[[granular.Path], None]] = {
    'bag, version 1': lambda root: write_bag(root, 1),
    'bag, version 2': lambda root: write_bag(root, 2),
    'bag, version 3': lambda root: write_bag(root, 3),
    'dataset, refs': lambda root: write_dataset(root, 'refs'),
    'dataset, columns': lambda root: write_dataset(root, 'columns'),
    'shards, refs': lambda root: write_shards(root, 'refs'),
    'shards, columns': lambda root: write_shards(root, 'columns'),
    'conversion': lambda root: convert(root, False),
    'conversion of an iterable': lambda root: convert(root, True),
    'file': lambda root: write_file(root, False),
    'file, streamed': lambda root: write_file(root, True),
    'copy of a file': copy_file,
    'copy of a folder': copy_folder,
    'local copy of a file': lambda root: copy_to_local(root, 'refs/x.bag'),
    'local copy of a folder': lambda root: copy_to_local(root, 'shards'),
    'reader': lambda root: read(root, 'refs'),
    'reader of shards': lambda root: read(root, 'shards'),
    'loader': load,
    'loader, processes': lambda root: load(root, mp='fork', workers=1),
    'block cache': lambda root: read_cached(root, 'blocks'),
    'shared memory': lambda root: read_cached(root, 'shared memory'),
}  # fmt: skip


def sources(root: granular.Path) -> granular.Path:
    """Return the folder with the datasets that are read and copied."""
    return root.parent / 'sources'


def contents(root: granular.Path) -> dict[str, bytes | None]:
    """Return what is below a folder, with None for folders."""
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob('*')}


# --- interrupts


class Interrupt:
    """One interrupt of a block, at the n-th point where the interpreter looks for signals.

    Attributes:
      count: the points that the block has passed.
      where: the frames at the point; empty if the block has ended before.
    """

    def __init__(self, at: int = -1) -> None:
        self._at = at
        self._function = self._event  # Python 3.11 does not keep a function that removes itself while it runs
        self.count = 0
        self.where: list[str] = []

    def _event(self, frame: Any, event: str, arg: object) -> None:
        if event in ('call', 'c_return') and not self.where:
            self.count += 1
            if 0 < self._at <= self.count and self._is_point(frame, event):
                sys.setprofile(None)
                self._interrupt()

    def _interrupt(self) -> None:
        raise NotImplementedError

    def _is_point(self, frame: Any, event: str) -> bool:
        if event == 'call':  # not where an exception is thrown into a generator, nor where one resumes after an await
            code, position = frame.f_code.co_code, frame.f_lasti
            if code[position] != RESUME or code[position + 1] > 1:
                return False
        if is_ignored(frame):
            return False
        while frame is not None and len(self.where) < 12:
            self.where.append(f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}')
            frame = frame.f_back
        return True


def is_ignored(frame: Any) -> bool:
    """Return whether Python itself ignores what is raised in a frame, in finalizers and callbacks, or fails by it."""
    collecting = [getattr(callback, '__code__', None) for callback in gc.callbacks]  # also of hypothesis and JAX
    while frame is not None:
        code = frame.f_code
        if code.co_name == '__del__' or code.co_qualname in (*CALLBACKS, *REMOVAL) or code in collecting:
            return True
        frame = frame.f_back
    return False


class MainThread(Interrupt):
    """An interrupt that comes between two instructions of the main thread."""

    def __enter__(self) -> 'MainThread':
        sys.setprofile(self._function)
        return self

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def __exit__(self, *args: object) -> None:
        sys.setprofile(None)


class Loop(Interrupt):
    """An interrupt of the main thread, which mostly waits for the loop, when that has come to a point."""

    def __enter__(self) -> 'Loop':
        self._received = threading.Event()
        self._before = signal.signal(signal.SIGINT, self._handle)
        run(self._set_profile(self._function))
        return self

    async def _set_profile(self, function: Any) -> None:
        await ensure_event_loop()
        sys.setprofile(function)

    def _interrupt(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self._received.wait(60)

    def _handle(self, number: int, frame: Any) -> None:
        if ignored := is_ignored(frame):  # at a timer of the loop, for which the main thread does not wait
            self.where = []
        self._received.set()
        if not ignored:
            raise KeyboardInterrupt

    def __exit__(self, *args: object) -> None:
        run(self._set_profile(None))
        signal.signal(signal.SIGINT, self._before)


def points(count: int, few: bool = False) -> range:
    """Return the points at which a block that has ``count`` of them is interrupted; ``few`` if it starts processes."""
    return range(1, count + 1, max(1, count // (500 if FULL_TABLES else 3 if few else 6)))


@pytest.fixture(scope='module')
def originals(tmp_path_factory: pytest.TempPathFactory, fakegcs: Any) -> dict[str, granular.Path]:
    """A folder on a disk and one in a bucket, with the datasets that are read and copied."""
    roots = {'disk': granular.Path(tmp_path_factory.mktemp('interrupts')), 'bucket': fakegcs.place()}
    for root in roots.values():
        write_dataset(root / 'sources' / 'refs', 'refs')
        write_shards(root / 'sources' / 'shards', 'refs')
    return roots


def rows() -> list[tuple[str, Any, str]]:
    """Return programs, kinds of interrupts, and where the data is: of a bucket, by default every second row."""
    table = itertools.product(PROGRAMS, [MainThread, Loop], ['disk', 'bucket'])
    chosen = [row for i, row in enumerate(table) if FULL_TABLES or row[2] == 'disk' or i // 4 % 2 == (row[1] is Loop)]
    return [row for row in chosen if not (row[2] == 'bucket' and row[0].startswith(('bag', 'local')))]


@contextlib.contextmanager
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the exceptions that Python ignores, such as those of finalizers."""
    ignored: list[str] = []
    monkeypatch.setattr(sys, 'unraisablehook', lambda found: ignored.append(f'{found.exc_type} in {found.object}'))
    yield ignored


def descriptors() -> int:
    gc.collect()
    links = []
    for fd in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):  # a connection that the loop has closed meanwhile
            links.append(os.readlink(f'/proc/self/fd/{fd}'))
    return len([link for link in links if '/sources/' not in link])


@pytest.mark.filterwarnings('ignore')  # writers that were not closed, and coroutines that were not awaited
@pytest.mark.parametrize(('name', 'kind', 'place'), rows())
def test_interrupted_program_is_resumed(name: str, kind: Any, place: str, originals, monkeypatch, caplog):
    program = PROGRAMS[name]
    whole, root = (originals[place] / f'{folder}, {name}, {kind.__name__}' for folder in ('whole', 'data'))
    program(whole)
    expected = contents(whole) if whole.exists() else {}
    with kind() as counted:
        program(root)
    remove(root, whole)
    before = descriptors()
    with unraisable(monkeypatch) as ignored:
        for at in points(counted.count, 'processes' in name):
            interrupt = kind(at)
            try:
                with interrupt:
                    program(root)
                swallowed = bool(interrupt.where)
            except KeyboardInterrupt:
                swallowed = False
            problem = f'{name}, point {at}: {interrupt.where}'
            assert not swallowed, problem
            assert not ignored, f'{problem}: {ignored}'
            try:
                program(root)
            except AlreadyExistsError as error:  # it was published before the interrupt
                assert 'another writer' not in str(error), problem
            except (GranularError, AssertionError) as error:
                raise AssertionError(problem) from error
            assert (contents(root) if root.exists() else {}) == expected, problem
            remove(root)
        if place == 'disk':  # a bucket's connections stay open
            # An interrupt between the system call that opens a file and the next instruction loses its descriptor.
            deadline = time.monotonic() + 60  # the loop stops workers whose close was interrupted
            while (left := descriptors()) > before + 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left <= before + 2


def test_interrupts_lose_no_descriptor_of_a_file_that_is_opened(tmp_path) -> None:
    (tmp_path / 'x').write_bytes(b'x')
    code = """
    import os, signal, sys
    from granular.aio.stores.local.files import OpenFile
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    before = len(os.listdir('/proc/self/fd'))
    for i in range(3000):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-6 * (i % 97))
            while True:
                file = OpenFile(sys.argv[1])
        except KeyboardInterrupt:
            file = None
    print(len(os.listdir('/proc/self/fd')) - before)
    """
    done = run_python(code, f'{tmp_path}/x')
    assert (done.returncode, done.stdout, done.stderr) == (0, '0\n', '')


@pytest.mark.filterwarnings('ignore')  # writers that were not closed
@pytest.mark.parametrize(
    'name', ['file, streamed', 'dataset, refs', 'copy of a folder', 'reader', 'loader', 'shared memory']
)
def test_interrupt_is_freed_with_all_that_its_frames_hold(name: str, originals) -> None:
    root = originals['disk'] / f'freed, {name}'
    with MainThread() as counted:
        PROGRAMS[name](root)
    gc.collect()
    gc.disable()  # a reference cycle would keep files and memory until the next collection
    try:
        for at in range(1, counted.count + 1, max(1, counted.count // (500 if FULL_TABLES else 90))):
            remove(root)
            with contextlib.suppress(KeyboardInterrupt, AlreadyExistsError), MainThread(at):
                PROGRAMS[name](root)
        assert not [found for found in gc.get_objects() if isinstance(found, KeyboardInterrupt)]
    finally:
        gc.enable()


@pytest.mark.filterwarnings('ignore')  # coroutines that were not awaited
def test_no_interrupt_of_a_program_that_opens_small_files_is_missed(tmp_path: Any, monkeypatch: Any) -> None:
    path = granular.Path(tmp_path) / 'x'
    path.write_bytes(b'x')
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with unraisable(monkeypatch) as ignored:
            for i in range(300):
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at any point
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + i * 1e-6)
                    for _ in range(10_000):
                        path.read_bytes()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ignored == []


def remove(*folders: granular.Path) -> None:
    for folder in folders:
        if folder.exists():
            folder.rmtree()


@pytest.mark.filterwarnings('ignore')  # writers that were not closed
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_interrupted_publication_in_a_bucket_is_withdrawn(layout: str, originals: Any) -> None:
    # A request that was cut there would be carried out later, behind the one that removes what it has made.
    root = originals['bucket'] / f'publication, {layout}'
    with Loop() as counted:
        write_dataset(root, layout)
    remove(root)
    for at in range(counted.count // 4, counted.count, counted.count // 50):
        interrupt = Loop(at)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            write_dataset(root, layout)
        try:
            write_dataset(root, layout)
        except AlreadyExistsError as error:  # it was published before the interrupt
            assert 'another writer' not in str(error), f'point {at}: {interrupt.where}'
        remove(root)
