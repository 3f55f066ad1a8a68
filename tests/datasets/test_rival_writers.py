"""Two writers of one path in a bucket, or a writer and a cleaner, in many orders of their requests."""

import asyncio
import contextlib
import functools
import logging
import random
import re
import threading
from collections.abc import Callable

import pytest

import granular
from granular.errors import CorruptRecordError, GranularError
from tests.support.fault_proxy import FaultProxy
from tests.support.tables import examples

SPEC = {'n': 'int', 'x': 'bytes'}
CONDITIONS = (b'if-none-match', b'if-match')


class TurnsProxy(FaultProxy):
    """A proxy that has two clients take turns, known by their access keys.

    Attributes:
      turns: the clients, by the first letter of their access keys, in the order of their next requests; once it is
        empty, none waits.
      ended: the clients that have ended, whose turns are skipped.
    """

    untimed: tuple[bytes, ...] = ()  # methods of the requests that do not wait

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.turns: list[str] = []
        self.ended: set[str] = set()
        self._passed = asyncio.Condition()

    async def _forward(self, request: bytes) -> bytes:
        client = re.search(rb'Credential=(\w)', request)
        if request.startswith(self.untimed) or client is None:
            return await super()._forward(request)
        name = client[1].decode()
        async with self._passed:
            await self._passed.wait_for(lambda: not self.turns or self.turns[0] == name)
        reply = await super()._forward(request)
        await self._pass(name)
        return reply

    async def _pass(self, name: str) -> None:
        async with self._passed:
            if self.turns and self.turns[0] == name:
                del self.turns[0]
            while self.turns and self.turns[0] in self.ended:
                del self.turns[0]
            self._passed.notify_all()

    def end(self, name: str) -> None:
        """Skip the further turns of a client."""
        self.ended.add(name)
        asyncio.run_coroutine_threadsafe(self._pass(name), self.loop).result()

    def run(self, **calls: Callable[[], object]) -> dict[str, GranularError]:
        """Make the calls of some clients at the same time; return their failures."""
        failures: dict[str, GranularError] = {}

        def run(name: str, call: Callable[[], object]) -> None:
            try:
                call()
            except GranularError as error:
                failures[name] = error
            finally:
                self.end(name)

        threads = [threading.Thread(target=run, args=call) for call in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return failures

    def path(self, path: granular.Path, key: str) -> granular.Path:
        """Return the same path, reached through this proxy as a client."""
        return granular.Path(str(path), endpoint_url=self.endpoint, key=key, secret='secret')


class UnconditionalProxy(TurnsProxy):
    """A proxy that takes all conditions from requests, and has two clients take turns with their changes."""

    untimed = (b'GET', b'HEAD')

    async def _forward(self, request: bytes) -> bytes:
        head, gap, body = request.partition(b'\r\n\r\n')
        lines = [line for line in head.split(b'\r\n') if line.partition(b':')[0].lower() not in CONDITIONS]
        return await super()._forward(b'\r\n'.join(lines) + gap + body)


class HoldingProxy(FaultProxy):
    """A proxy that holds the first request whose first line has a pattern until it is released."""

    def __init__(self, upstream: str, pattern: bytes) -> None:
        super().__init__(upstream)
        self._pattern, self._released = re.compile(pattern), asyncio.Event()
        self.reached = threading.Event()

    async def _forward(self, request: bytes) -> bytes:
        if not self.reached.is_set() and self._pattern.search(request.partition(b'\r\n')[0]):
            self.reached.set()
            await self._released.wait()
        return await super()._forward(request)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self._released.set)


def points(name: str, alike: bool) -> list[dict[str, object]]:
    content = b'same' if alike else name.encode() * 4
    return [{'n': i, 'x': content} for i in range(5)]


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_rivals_on_a_server_without_conditions_leave_the_dataset_of_one_that_succeeded_or_files_that_are_refused(
    moto, layout, caplog
):
    rng = random.Random(layout)
    whole = 0
    with UnconditionalProxy(moto.endpoint) as proxy:
        for number in range(examples(24)):
            folder, alike = moto.place(), bool(number % 2)
            proxy.turns, proxy.ended = rng.choices('ab', k=rng.choice([4, 12, 24])), set()
            met = threading.Barrier(2)

            def write(name, folder=folder, alike=alike, met=met):
                with granular.DatasetWriter(proxy.path(folder, name), SPEC, granular.encoders, layout) as writer:
                    met.wait()
                    for point in points(name, alike):
                        writer.append(point)

            failures = proxy.run(**{name: functools.partial(write, name) for name in 'ab'})
            succeeded = [name for name in 'ab' if name not in failures]
            if not succeeded:
                assert not (folder / 'spec.json').exists()
                continue
            with granular.DatasetReader(folder, granular.decoders, verify=True) as reader:
                with contextlib.suppress(CorruptRecordError):  # the last files of both: each replaced one of the other
                    assert list(reader) in [points(name, alike) for name in succeeded]
                    whole += 1
    assert whole
    assert 'ignores the condition' in caplog.text


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_a_copy_that_succeeds_beside_a_writer_stays_whole(moto, layout):
    """It takes files of the writer that equal its own for copied, and replaces others, until the writer fails."""
    source = moto.place()
    with granular.DatasetWriter(source, SPEC, layout=layout) as writer:
        for point in points('c', False):
            writer.append(point)
    with TurnsProxy(moto.endpoint) as proxy:
        for number in range(0, 24, 3):
            folder = moto.place()
            proxy.turns, proxy.ended = [], set()
            writer = granular.DatasetWriter(proxy.path(folder, 'w'), SPEC, layout=layout)
            for point in points('w', False):
                writer.append(point)
            proxy.turns = [*'w' * number, *'c' * 200]
            copy = functools.partial(proxy.path(source, 'c').copy, proxy.path(folder, 'c'))
            failures = proxy.run(w=writer.close, c=copy)
            succeeded = [name for name in 'cw' if name not in failures]
            assert succeeded, number
            with granular.DatasetReader(folder, verify=True) as reader:
                assert list(reader) == points(min(succeeded), False), number  # a copy replaces a finished dataset


@pytest.mark.parametrize('pattern', [rb'^PUT \S*/n\.bag', rb'^PUT \S*/x\.bag', rb'^PUT \S*/spec\.json'])
@pytest.mark.parametrize('layouts', [('refs', 'columns'), ('columns', 'refs')], ids=' beside '.join)
def test_a_copy_beside_a_writer_of_another_layout_is_whole_or_fails(moto, layouts, pattern):
    source, folder, failures = moto.place(), moto.place(), []
    with granular.DatasetWriter(source, SPEC, layout=layouts[1]) as writer:
        for point in points('c', False):
            writer.append(point)

    def copy(proxy):
        options = {**moto.options, 'endpoint_url': proxy.endpoint}
        try:
            granular.Path(f'{source}', **options).copy(granular.Path(f'{folder}', **options))
        except GranularError as error:
            failures.append(error)

    with HoldingProxy(moto.endpoint, pattern) as proxy:
        writer = granular.DatasetWriter(folder, SPEC, layout=layouts[0])
        for point in points('w', False):
            writer.append(point)
        thread = threading.Thread(target=copy, args=(proxy,))
        thread.start()
        while thread.is_alive() and not proxy.reached.wait(0.05):
            pass
        with pytest.raises(GranularError):
            writer.close()
        proxy.release()
        thread.join(60)
    assert bool(failures) != (folder / 'spec.json').exists()
    if not failures:
        with granular.DatasetReader(folder, verify=True) as reader:
            assert list(reader) == points('c', False)


def through(path, proxy, server):
    return granular.Path(f'{path}', **{**server.options, 'endpoint_url': proxy.endpoint})


def opened(path, name, layout):
    """Return a writer that has got all of its datapoints."""
    writer = granular.DatasetWriter(path, SPEC, layout=layout)
    for point in points(name, False):
        writer.append(point)
    return writer


def written(path, name, layout):
    opened(path, name, layout).close()
    return path


@contextlib.contextmanager
def held(proxy, call):
    """Run the block while a call is held at its request; yields a list that has its error afterwards, if it fails."""
    failures = []

    def run():
        try:
            call()
        except GranularError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not proxy.reached.wait(0.05):
        pass
    assert proxy.reached.is_set(), failures
    try:
        yield failures
    finally:
        proxy.release()
        thread.join(60)


def is_whole(folder, source):
    """Return whether a folder has the files of a dataset, and reads like it."""
    names = [sorted(path.name for path in place.iterdir()) for place in (folder, source)]
    with granular.DatasetReader(folder) as reader, granular.DatasetReader(source) as original:
        return names[0] == names[1] and list(reader) == list(original)


@pytest.mark.parametrize(
    ('layouts', 'pattern'),
    [
        (('refs', 'columns'), r'PUT \S*/refs\.crc'),
        (('refs', 'columns'), r'PUT \S*/n\.bag'),
        (('columns', 'refs'), r'PUT \S*/x\.idx'),
        (('columns', 'refs'), r'PUT \S*/n\.crc'),
        (('columns', 'refs'), r'PUT \S*/n\.idx'),
        (('columns', 'refs'), r'PUT \S*/spec\.json'),
    ],
)
def test_files_of_a_slow_writer_never_stay_beside_a_copy_of_another_layout(moto, layouts, pattern):
    source, folder = written(moto.place(), 'c', layouts[1]), moto.place()
    with HoldingProxy(moto.endpoint, pattern.encode()) as proxy:
        with held(proxy, opened(through(folder, proxy, moto), 'w', layouts[0]).close) as failures:
            try:
                source.copy(folder)
                is_copied = True
            except GranularError:
                is_copied = False
        assert failures or not is_copied
    assert (folder / 'spec.json').exists() == (is_copied or not failures)
    if is_copied:
        assert is_whole(folder, source)


def test_a_writer_fails_if_files_of_a_slow_one_of_another_layout_are_beside_its_own(moto):
    folder = moto.place()
    writer = opened(folder, 'c', 'columns')
    with HoldingProxy(moto.endpoint, rb'^PUT \S*/refs\.crc') as proxy:
        with held(proxy, opened(through(folder, proxy, moto), 'w', 'refs').close) as failures:
            with pytest.raises(GranularError, match='another writer'):
                writer.close()
            assert not (folder / 'spec.json').exists()
        assert bool(failures) != (folder / 'spec.json').exists()


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_a_writer_that_fails_takes_no_files_from_a_copy_that_succeeds_meanwhile(moto, layout):
    """The copy finds that they equal its own."""
    source, folder = written(moto.place(), 'w', layout), moto.place()
    with HoldingProxy(moto.endpoint, rb'^DELETE \S*/x\.bag') as proxy:
        proxy.plan = lambda call: 'status 403' if call.method == 'PUT' and call.path.endswith('n.bag') else ''
        with held(proxy, opened(through(folder, proxy, moto), 'w', layout).close) as failures:
            try:
                source.copy(folder)
                is_copied = True
            except GranularError:
                is_copied = False
        assert failures
    assert (folder / 'spec.json').exists() == is_copied
    if is_copied:
        assert is_whole(folder, source)
    source.copy(folder)
    assert is_whole(folder, source)


def test_a_writer_removes_only_its_own_generation_of_a_spec_that_a_copy_may_have_replaced(fakegcs):
    """The test server deletes an object whatever the condition."""
    folder, conditions = fakegcs.place(), []
    source = written(folder.with_name('source'), 'c', 'refs')

    def note(call):
        if call.method == 'DELETE' and call.path.endswith('/spec.json'):
            conditions.append(call.query.get('ifGenerationMatch'))
        return ''

    with (
        FaultProxy(fakegcs.endpoint, note) as writing,
        HoldingProxy(fakegcs.endpoint, rb'^GET \S*delimiter') as copying,
    ):
        writer = opened(through(folder, writing, fakegcs), 'w', 'refs')
        copy = functools.partial(through(source, copying, fakegcs).copy, through(folder, copying, fakegcs))
        with held(copying, copy) as failures, pytest.raises(GranularError, match='another writer'):
            writer.close()
        assert not failures
    assert len(conditions) == 1
    assert all(conditions)
    assert is_whole(folder, source)


def test_a_copy_that_replaces_files_of_a_writer_does_not_make_the_server_one_that_ignores_conditions(moto, caplog):
    source, folder, other = written(moto.place(), 'c', 'refs'), moto.place(), moto.place()
    with HoldingProxy(moto.endpoint, rb'^HEAD \S*/x\.crc') as proxy:
        with held(proxy, opened(through(folder, proxy, moto), 'w', 'refs').close) as failures:
            source.copy(folder)
        assert failures
        proxy.plan = lambda call: 'status 403' if call.method == 'PUT' and call.path.endswith('x.bag') else ''
        with pytest.raises(GranularError):
            written(through(other, proxy, moto), 'w', 'refs')
    assert is_whole(folder, source)
    assert not other.exists()
    assert 'ignores the condition' not in caplog.text


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_a_conversion_removes_no_bags_that_a_writer_finishes_meanwhile(moto, layout):
    """What it finds beside the record of a killed run may be of a writer that has not published its spec yet."""
    folder, succeeded = moto.place(), []
    granular.convert(points('c', False), folder, shardlen=None, spec=SPEC)
    for path in list(folder.iterdir()):
        if path.name != '.granular-conversion':
            path.unlink()

    def run(name, function, *args, **options):
        with contextlib.suppress(GranularError):
            function(*args, **options)
            succeeded.append(name)

    with (
        HoldingProxy(moto.endpoint, rb'^PUT \S*/spec\.json') as writing,
        HoldingProxy(moto.endpoint, rb'^POST \S*delete') as removing,
    ):
        options = {key: value for key, value in moto.options.items() if key != 'endpoint_url'}
        places = [granular.Path(f'{folder}', endpoint_url=proxy.endpoint, **options) for proxy in (writing, removing)]
        writer = granular.DatasetWriter(places[0], SPEC, layout=layout)
        for point in points('w', False):
            writer.append(point)
        calls = [
            threading.Thread(target=run, args=('w', writer.close)),
            threading.Thread(
                target=run,
                args=('c', granular.convert, points('c', False), places[1]),
                kwargs={'shardlen': None, 'spec': SPEC},
            ),
        ]
        for thread, proxy in zip(calls, (writing, removing), strict=True):
            thread.start()
            while thread.is_alive() and not proxy.reached.wait(0.05):
                pass
        for thread, proxy in zip(calls, (writing, removing), strict=True):
            proxy.release()
            thread.join(60)
    assert len(succeeded) == 1
    with granular.DatasetReader(folder, verify=True) as reader:
        assert list(reader) == points(succeeded[0], False)


def test_clean_beside_a_writer_leaves_a_whole_dataset_or_fails_the_writer(moto):
    """``older=0`` takes bags from a live writer: then it fails, and no ``spec.json`` stands over missing bags."""
    rng, succeeded = random.Random(1), 0
    with TurnsProxy(moto.endpoint) as proxy:
        for _ in range(examples(40)):
            folder, kind = moto.place(), rng.choice(['refs', 'columns', 'shards'])
            proxy.turns, proxy.ended = [], set()
            clean = functools.partial(granular.clean, proxy.path(folder, 'c'), remove=True, older=0, bags=True)
            path = proxy.path(folder, 'w')
            if kind == 'shards':
                writer = granular.ShardedDatasetWriter(path, SPEC, granular.encoders, shardlen=6)
            else:
                writer = granular.DatasetWriter(path, SPEC, granular.encoders, kind)
            for point in points('w', True):
                writer.append(point)
            proxy.turns = [*'w' * rng.randrange(24), *rng.choices('wc', [rng.random(), 0.5], k=40)]
            if failures := proxy.run(w=writer.close, c=clean):
                shards = [folder / '000000', folder]
                assert not any((shard / 'spec.json').exists() for shard in shards), failures
                continue
            with granular.open(folder, verify=True) as reader:
                assert list(reader) == points('w', True)
            succeeded += 1
    assert 0 < succeeded < examples(40)


def test_clean_beside_a_copy_leaves_a_whole_dataset_or_fails_the_copy(moto, tmp_path):
    """``older=0`` takes files, and the claim, from a live copy: then no ``spec.json`` stands over missing bags."""
    rng, succeeded = random.Random(2), 0
    for kind in ('refs', 'columns', 'shards'):
        whole = tmp_path / kind
        if kind == 'shards':
            writer = granular.ShardedDatasetWriter(whole, SPEC, granular.encoders, shardlen=2)
        else:
            writer = granular.DatasetWriter(whole, SPEC, granular.encoders, kind)
        with writer:
            for point in points('w', True):
                writer.append(point)
    with TurnsProxy(moto.endpoint) as proxy:
        for _ in range(examples(40)):
            folder, kind = moto.place(), rng.choice(['refs', 'columns', 'shards'])
            proxy.turns, proxy.ended = [*'w' * rng.randrange(40), *rng.choices('wc', [rng.random(), 0.5], k=60)], set()
            copy = functools.partial(granular.Path(tmp_path / kind).copy, proxy.path(folder, 'w'))
            clean = functools.partial(granular.clean, proxy.path(folder, 'c'), remove=True, older=0, bags=True)
            failures = proxy.run(w=copy, c=clean)
            specs = list(folder.rglob('spec.json'))
            if failures:
                for path in specs:  # of a shard that is complete
                    with granular.DatasetReader(path.parent, verify=True) as reader:
                        list(reader)
                granular.Path(tmp_path / kind).copy(folder)
            with granular.open(folder, verify=True) as reader:
                assert list(reader) == points('w', True)
            succeeded += not failures
    assert 0 < succeeded < examples(40)


@pytest.mark.parametrize('honours', [True, False])
def test_a_server_is_asked_once_if_it_honours_conditions(moto, honours, caplog):
    caplog.set_level(logging.WARNING)
    with (FaultProxy if honours else UnconditionalProxy)(moto.endpoint) as proxy:
        proxy.plan = lambda call: 'status 403' if call.path.endswith('x.bag') and call.method == 'PUT' else ''
        for _ in range(3):
            folder = granular.Path(str(moto.place()), endpoint_url=proxy.endpoint, key='a', secret='b')
            with pytest.raises(GranularError), granular.DatasetWriter(folder, SPEC, granular.encoders) as writer:
                writer.append(points('a', True)[0])
            left = sorted(path.name for path in folder.rglob('*'))
            assert left == [] if honours else 'refs.bag' in left
        assert len({path for _, path in proxy.calls if '.granular-conditions' in path}) == 1
    assert caplog.text.count('ignores the condition') == (not honours)
