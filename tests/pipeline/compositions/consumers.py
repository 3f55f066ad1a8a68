"""Consumers of the elements of pipelines: Loaders, DataLoaders of granular and of torch, adapters of frameworks.

Each trial ends an epoch, saves between two batches, continues in another consumer, ends there, and begins again.
"""

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

import granular
from granular import ReadOptions, ShardOptions, sources
from granular.errors import InvalidArgumentError, StateError
from tests.pipeline.compositions import functions as f
from tests.pipeline.compositions.atoms import Stream, name_of, plain
from tests.pipeline.compositions.generator import composition
from tests.pipeline.compositions.map_operations import finite
from tests.pipeline.compositions.plans import Node, Setting
from tests.pipeline.compositions.rules import Draw
from tests.pipeline.compositions.runs import MOST, Refused, counted, run, stage_in, through_json
from tests.pipeline.compositions.samplers import Backwards, IsKept, operations
from tests.pipeline.compositions.trials import Result, difference, place, refused

_END: Final = object()
_STEPS: Final = 60  # of a source that has no end


def consumers(seed: int) -> Result:
    """Continue in another consumer of the same class, for a Loader also with other batches and numbers of hosts."""
    draw, node = composition('consumers', seed)
    try:
        return _TRIALS.get(draw.consumer, loader)(draw, node)
    except Wrong as error:
        return Result('wrong', node, text=f'{draw.consumer}, {error}')


class Wrong(Exception):
    """Other elements than expected."""


def readable(batch: Any) -> Any:
    """Return a batch of rows as lists of atoms with marks."""
    if isinstance(batch, dict) and 'row' in batch:
        rows = np.ascontiguousarray(np.asarray(batch['row'])).view(np.int64)
        return [[value for value in row if value] for row in np.atleast_2d(rows).tolist()]
    return [readable(part) for part in batch] if isinstance(batch, list) else plain(batch)


def expect(text: str, found: Iterable[Any], expected: list[Any]) -> None:
    found = list(found)
    if found != expected:
        at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        lengths = f'{len(found)} elements instead of {len(expected)}'
        raise Wrong(f'{text}: {lengths}; {"those are equal" if at is None else f"element {at} is another one"}')


def taken(iterator: Iterator[Any], count: int) -> list[Any]:
    """Return the next elements, without another ``iter()``, by which a Loader that has ended begins again."""
    nexts = (next(iterator, _END) for _ in range(count))
    return [readable(batch) for batch in itertools.takewhile(lambda batch: batch is not _END, nexts)]


def check_rest(text: str, consumer: Any, iterator: Iterator[Any], rest: list[Any], epoch: list[Any] | None) -> None:
    """Compare the elements up to the end, and those of the next iteration; an epoch of None has no end."""
    expect(f'{text}: the rest', taken(iterator, len(rest)), rest)
    if epoch is None:
        return
    for _ in range(2):
        expect(f'{text}: behind the end', taken(iterator, 1), [])
    if consumer is not iterator or hasattr(consumer, 'load_state_dict'):
        expect(f'{text}: iterated again', taken(iter(consumer), len(epoch) + 1), epoch)


def source_of(draw: Draw, node: Node) -> tuple[Any, str, dict[str, Any]]:
    """Return a source of rows for a Loader, what it is, and the options of the Loader."""
    dataset, kind = node.build(Setting()), draw.one_of(['MapDataset'] * 4 + ['Epochs', 'Sample', 'Truncate', 'Mix'])
    if kind == 'MapDataset' or not finite(draw, node):
        if finite(draw, node) and draw.maybe(0.2):
            failing = dataset.map(f.fails_for_some).map(f.as_row)
            if any(datapoints(failing, len(failing))):
                return failing, 'failing MapDataset', {'on_error': draw.one_of(['skip', f.replaced])}
        return dataset.map(f.as_row), 'MapDataset', {}
    seed = draw.number(0, 2)
    epochs = sources.Epochs(dataset, shuffle=draw.maybe(), seed=seed)
    made: Callable[[], Any] = {
        'Epochs': lambda: epochs,
        'Sample': lambda: sources.Sample(dataset, seed=seed),
        'Truncate': lambda: sources.Truncate(dataset, 1 + len(dataset) // 2),
        'Mix': lambda: sources.Mix([epochs, sources.Epochs(Stream(99, 7))], [2, 1], seed=seed),
    }[kind]
    return sources.Transform(made(), f.as_row_with_seed, seed=seed), kind, {}


def datapoints(source: Any, count: int, start: int = 0) -> list[Any]:
    """Return so many datapoints; None for those that fail."""
    out: list[Any] = []
    for step in range(start, start + count):
        try:
            out.append(readable(source.fetch([step])[0])[0])
        except f.Failed:
            out.append(None)
    return out


def loader(draw: Draw, node: Node) -> Result:
    """A Loader, or device batches of one: its state fits other batch sizes and any number of hosts."""
    source, kind, policy = source_of(draw, node)
    try:
        length = len(granular.Loader(source, 1))
    except TypeError:
        length = 0
    endless = length == 0 or length > 1 << 40
    length = _STEPS if endless else length
    # Of a source that recurs, in whose later epochs selections stay.
    recurring = source if endless else granular.MapDataset(granular.Loader(source, 1, **policy).aio.source)
    rows = [datapoints(recurring, length, epoch * length) for epoch in range(1 if endless else 5)]
    expect('the first epoch', rows[0], datapoints(source, length))

    def batches(at: tuple[int, int], size: int, host: int, hosts: int) -> list[Any]:
        """Return the batches of a host in the rest of an epoch from a place on."""
        epoch, start = at
        rounds = (length - start) // (size * hosts)
        firsts = [start + (turn * hosts + host) * size for turn in range(rounds)]
        return [[row for row in rows[epoch][first : first + size] if row is not None] for first in firsts]

    def settled(at: tuple[int, int], stride: int) -> tuple[int, int]:
        """Return the place of the next round: in the next epoch, if this one has no whole round left."""
        return at if endless or at[1] + stride <= length else (at[0] + 1, 0)

    hosts = draw.number(1, min(3, length))
    size = draw.number(1, min(5, length // hosts))
    count, states, twice = place(draw, length // (size * hosts)), [], not endless and draw.maybe(0.3)
    at = settled((2 * twice, count * size * hosts), size * hosts)
    text = f'{kind}, {hosts} x {size}, saved after {count} batches each'
    for host in range(hosts):
        epochs = [batches((epoch, 0), size, host, hosts) for epoch in range(len(rows))]
        with opened(draw, source, size, host, hosts, policy) as first:
            if twice:
                check_rest(f'{text}: host {host}', first, iter(first), epochs[0], epochs[1])
            expected = epochs[2 * twice][:count]
            expect(f'{text}: host {host}', taken(iter(first), count), expected)
            states.append(through_json(first.state_dict()))
    expect(f'{text}: states', states, states[:1] * hosts)
    expect(f'{text}: step', [states[0]['step']], [at[0] * length + at[1]])
    others = draw.number(1, min(3, length))
    fitting = [other for other in range(1, length // others + 1) if at[1] % other == 0 and other < 8]
    if not fitting:
        others, fitting = hosts, [size]
    size = draw.one_of(fitting)
    at = settled(at, size * others)
    text = f'{text}, restored with {others} x {size}'
    for host in range(others):
        with opened(draw, source, size, host, others, policy) as second:
            expect(
                text, taken(iter(second), used := draw.one_of([0, 0, 1])), batches((0, 0), size, host, others)[:used]
            )
            second.load_state_dict(states[host % len(states)])
            state = {**states[0], 'step': at[0] * length + at[1], 'round': size * others}
            expect(f'{text}: state', [through_json(second.state_dict())], [state])
            if draw.maybe(0.2):
                second.load_state_dict(through_json(second.state_dict()))
            following = None if endless else batches((at[0] + 1, 0), size, host, others)
            check_rest(f'{text}: host {host}', second, iter(second), batches(at, size, host, others), following)
    return Result('exact', node)


def opened(draw: Draw, source: Any, size: int, host: int, hosts: int, policy: dict[str, Any]) -> Any:
    """Open a Loader, or device batches of one."""
    options = {'prefetch': draw.number(0, 4), 'workers': draw.number(1, 3), 'shard_id': host, 'num_shards': hosts}
    if draw.consumer == 'Loader' and draw.maybe(0.12):
        options |= {'mp': 'spawn' if draw.maybe(0.04) else 'fork'}
    return adapted(draw, granular.Loader(source, size, **options, **policy))


def adapted(draw: Draw, batches: Any) -> Any:
    buffer = draw.number(0, 3)
    if draw.consumer.startswith('torch.Batches'):
        import granular.integrations.torch

        return granular.integrations.torch.Batches(batches, draw.one_of([None, 'cpu']), buffer)
    if draw.consumer == 'jax.Batches':
        import jax

        import granular.integrations.jax

        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return granular.integrations.jax.Batches(batches, sharding, buffer)
    return batches


def stream_batches(draw: Draw, node: Node) -> Result:
    """Device batches of a stream, which can be iterated again, or of an iterator, which cannot."""
    node = node.then('map', f.as_row)
    again = node.build(Setting(read=ReadOptions(draw.number(0, 3), draw.number(0, 9))))
    whole, once = run(node.build(Setting())), draw.maybe()
    elements = [readable(element) for element in whole.elements]
    at = place(draw, len(elements))
    with adapted(draw, node.build(Setting())) as first:
        expect(f'first {at}', taken(first, at), elements[:at])
        state = through_json(first.state_dict())
    with adapted(draw, iter(again) if once else again) as second:
        taken(second, draw.one_of([0, 0, 2]))
        second.load_state_dict(state)
        epoch = elements if whole.ended and not once else None
        rest = elements[at:] or epoch or []  # no loop is empty
        check_rest(f'saved after {at} of {len(elements)}', second, iter(second), rest, epoch)
        if whole.ended and once:
            expect('behind the end', taken(second, 1), [])
            try:
                iter(second)
            except InvalidArgumentError:
                return Result('exact', node)
            raise Wrong('an exhausted iterator is iterated again, without an error')
    return Result('exact', node)


def device_put(draw: Draw, node: Node) -> Result:
    import granular.integrations.jax

    def put() -> Any:
        sizes = {'cpu_buffer_size': draw.number(1, 4), 'device_buffer_size': draw.number(1, 3)}
        return granular.integrations.jax.device_put(node.then('map', f.as_row).build(Setting()), **sizes)

    return iterated(draw, node, put, put)


def iterated(draw: Draw, node: Node, first: Callable[[], Any], second: Callable[[], Any]) -> Result:
    """Continue a dataset, or a DataLoader, of which each iteration begins from the beginning."""
    whole = run(first())
    elements = [readable(element) for element in whole.elements]
    at = place(draw, len(elements))
    dataset = second()
    with iter(dataset) as iterator:
        taken(iterator, draw.one_of([0, 0, 3]))
        iterator.set_state(through_json(whole.states[at]))
        epoch = elements if whole.ended else None
        check_rest(f'saved after {at} of {len(elements)}', dataset, iterator, elements[at:], epoch)
    return Result('exact', node)


def data_loader(draw: Draw, node: Node) -> Result:
    """A DataLoader with samplers: its state fits other workers, and is refused with other numbers of hosts."""
    dataset, length = node.build(Setting()), min(node.built.__len__(), 40)
    names, on_error = operations(draw, node)
    kind, epochs, shuffled = draw.one_of(['Index', 'Index', 'Sequential', 'Backwards']), draw.number(1, 3), draw.maybe()
    drop, seed = draw.maybe(0.2), draw.number(0, 9)
    ends = seed > 0 or on_error != 'raise' or any(isinstance(operation, IsKept) for operation in names)

    def make(host: int, hosts: int, workers: int = 0, method: str = 'fork') -> Any:
        shard = ShardOptions(host, hosts, drop)
        sampler: Any = Backwards(length)
        if kind == 'Index':
            sampler = granular.grain.samplers.IndexSampler(length, shard, shuffled, epochs if ends else None, seed)
        elif kind == 'Sequential':
            sampler = granular.grain.samplers.SequentialSampler(length, shard, seed)
        read = ReadOptions(draw.number(0, 3), draw.number(0, 9))
        return granular.grain.DataLoader(
            data_source=dataset, sampler=sampler, operations=names, worker_count=workers, start_method=method,
            read_options=read, on_error=on_error, shard_options=shard,
        )  # fmt: skip

    def other(host: int, hosts: int) -> Any:
        workers = draw.number(1, 2) if draw.maybe(0.1) else 0
        return make(host, hosts, workers, 'spawn' if draw.maybe(0.04) else 'fork')

    hosts = draw.number(1, min(3, length))
    if hosts == 1 or not ends or draw.maybe(0.6):
        host = draw.number(0, hosts - 1)
        return iterated(draw, node, lambda: make(host, hosts), lambda: other(host, hosts))
    whole = [run(make(host, hosts)) for host in range(hosts)]
    at, others = place(draw, min(len(part.elements) for part in whole)), draw.number(1, 3)
    given, expected = counted([named(part.elements[:at]) for part in whole]), [named(part.elements) for part in whole]
    text = f'saved after {at} elements each on {hosts} hosts, restored on {others}'
    for host in range(others):
        part = other(host, others)
        try:
            with iter(part) as iterator:
                iterator.set_state(through_json(whole[host % hosts].states[at]))
                given += counted([named(iterator)])
        except StateError as error:
            return refused(node, Refused(stage_in(str(error), str(part)), error), text)
    loses = drop or any(isinstance(operation, granular.grain.transforms.Batch) for operation in names)
    if not loses and given != counted(expected):
        raise Wrong(f'{text}: {difference(given, counted(expected))}')
    return Result('exact', node, checked=not loses)


def named(elements: Iterable[Any]) -> list[int]:
    """Return the atoms of rows, without their marks."""
    return [name_of(value) for element in elements for row in readable(element) for value in row]


def torch_loader(draw: Draw, node: Node) -> Result:
    """torch's DataLoader, which has no states: all elements in each epoch, with any workers."""
    from torch.utils.data import DataLoader

    import granular.integrations.torch

    dataset = node.build(Setting())
    size, workers, whole = draw.number(1, 5), draw.number(1, 2) if draw.maybe(0.08) else 0, datapoints_of(dataset)
    options = {'num_workers': workers, 'collate_fn': f.as_it_is, **forked(workers)}
    batches = [readable(whole[first : first + size]) for first in range(0, len(whole), size)]
    mapped = DataLoader(dataset, batch_size=size, **options)
    check_rest('map-style', mapped, iter(mapped), batches, batches)
    streamed = DataLoader(granular.integrations.torch.IterableDataset(dataset), batch_size=None, **options)
    dense = counted([list(map(hash_of, (element for element in whole if element is not None)))])
    for epoch in range(2):
        if counted([list(map(hash_of, streamed))]) != dense:
            raise Wrong(f'epoch {epoch} of a stream with {workers} workers has other elements')
    return Result('exact', node)


def hash_of(element: Any) -> int:
    return hash(repr(plain(element)))


def datapoints_of(dataset: Any) -> list[Any]:
    return list(dataset.fetch(range(len(dataset))))


def forked(workers: int) -> dict[str, Any]:
    return {'multiprocessing_context': 'fork'} if workers else {}


def stateful(draw: Draw, node: Node) -> Result:
    """torchdata's StatefulDataLoader, over a MapDataset or a stream: its state fits the same number of workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    import granular.integrations.torch

    workers = draw.number(1, 2) if draw.maybe(0.08) else 0
    size: int | None = draw.number(1, 4)
    streamed = draw.consumer.endswith('stream')
    if streamed and draw.maybe():
        size = None

    def make() -> Any:
        dataset = node.build(Setting())
        if streamed:
            dataset = granular.integrations.torch.IterableDataset(dataset)
        return StatefulDataLoader(
            dataset, batch_size=size, num_workers=workers, collate_fn=f.as_it_is, **forked(workers)
        )

    try:
        epoch = taken(iter(make()), MOST)
    except granular.errors.InvalidArgumentError as error:
        if workers and 'divide' in str(error):  # a stage that shards cannot divide has no workers
            return Result('exact', node, checked=False)
        raise
    if not streamed:
        whole = datapoints_of(node.build(Setting()))
        assert size is not None
        expected = [readable(whole[first : first + size]) for first in range(0, len(whole), size)]
        expect('uninterrupted', epoch, expected[:MOST])
    ended, at = len(epoch) < MOST, place(draw, len(epoch))
    first = make()
    iterator = iter(first)
    expect(f'first {at}', taken(iterator, at), epoch[:at])
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del iterator, first
    second = make()
    second.load_state_dict(state)
    text = f'batches of {size}, {workers} workers, saved after {at} of {len(epoch)}'
    check_rest(text, second, iter(second), epoch[at:], epoch if ended else None)
    with contextlib.suppress(AttributeError):
        second._iterator._shutdown_workers()
    return Result('exact', node)


_TRIALS: Final[dict[str, Callable[[Draw, Node], Result]]] = {
    'DataLoader': data_loader,
    'torch.DataLoader': torch_loader,
    'StatefulDataLoader': stateful,
    'StatefulDataLoader of a stream': stateful,
    'torch.Batches of a stream': stream_batches,
    'jax.device_put': device_put,
}
