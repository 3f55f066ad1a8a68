"""Plans of training runs: requests, bytes, dollars, time, memory and mixing of orders."""

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import granular
from granular import metrics, shuffle
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.sharded_reader import columns_of_shards, indexed_shards_of
from granular.aio.stores import ranges
from granular.cli.describe import refuse_other_formats
from granular.config import GiB, KiB
from granular.errors import InvalidArgumentError, NotFoundError
from granular.indexing import Ints, check_integer
from granular.sync.datasets import DatasetReader, ShardedDatasetReader

_LABELS: Final = 100  # of the sorted dataset by which mixing is measured
_SAMPLES: Final = 64  # batches, and times 4 blocks, up to which all are planned
_CACHE_BLOCK: Final = 64 * KiB
_PREFETCH: Final = 8  # batches that a Loader reads ahead by default
_BUFFER: Final = GiB  # bytes that the blocks of an order may take
_ADDRESS: Final = 46  # bits of a position in an object
_WELL_MIXED: Final = 0.97


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of a store in dollars.

    Attributes:
      name: the store, its storage class and region.
      date: the date of the prices.
      read: for 1,000 requests that read.
      egress: for 1 GB (10**9 bytes) that leaves the store; 0 for machines in its region.
      source: the address of the price list.
    """

    name: str
    date: str
    read: float
    egress: float
    source: str

    def __post_init__(self) -> None:
        _check('price of 1,000 reads', self.read, at_least=0)
        _check('price of 1 GB', self.egress, at_least=0)

    @classmethod
    def of(cls, scheme: str, read: float | None = None, egress: float | None = None) -> 'Prices':
        """Return the prices of a store by its scheme, with those that are given; 0 for a store of unknown prices."""
        table = json.loads((importlib.resources.files('granular.cli') / 'prices.json').read_text())
        store = table['stores'].get(
            scheme, {'name': scheme or 'local disk', 'read_per_1000': 0.0, 'egress_per_gb': 0.0, 'source': ''}
        )
        return cls(
            store['name'],
            table['date'] if scheme in table['stores'] else '',
            store['read_per_1000'] if read is None else read,
            store['egress_per_gb'] if egress is None else egress,
            store['source'],
        )


@dataclasses.dataclass(frozen=True)
class Rates:
    """The bytes and requests a second that one host can read; None if unknown."""

    bytes_per_second: float | None = None
    requests_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (('bytes', self.bytes_per_second), ('requests', self.requests_per_second)):
            if rate is not None:
                _check(f'{name} a second', rate, above=0)


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
      batch: datapoints in a batch of one host.
      epochs: passes over the dataset.
      hosts: machines that share each epoch.
      memory: bytes that the data may take on a host.
      disk: bytes that a block cache may take on a host.
      seed: of the orders.
    """

    batch: int
    epochs: int = 1
    hosts: int = 1
    memory: float = GiB
    disk: float = 10 * GiB
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ('batch', 'epochs', 'hosts'):
            check_integer(name, getattr(self, name), 1)
        _check('memory', self.memory, above=0)
        _check('disk', self.disk, at_least=0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a run in one order, of all hosts and epochs.

    Attributes:
      order: the order, as in Python; with ``own shards``, each host reads every ``hosts``-th shard only.
      requests: requests that read data and references, without those of opening; see ``exact``.
      bytes: bytes of their replies.
      opening: requests that open the dataset on all hosts, and read one datapoint, of whose spec a Loader learns.
      dollars: the price of all requests and bytes.
      seconds: time for the reads at the given rates; None if there are none.
      memory: bytes in the memory of a host, at most.
      disk: bytes on the disk of a host.
      mixing: labels in a batch of a dataset that is sorted by 100 labels / labels in a batch drawn at random.
      exact: ``exact`` if every request was planned, ``estimate`` if a part of them was, ``at most`` for an upper bound.
        Retries and hedged requests come on top of each.
      obstacle: why the order is out of the question; empty if it is not.
    """

    order: str
    requests: int
    bytes: int
    opening: int
    dollars: float
    seconds: float | None
    memory: int
    disk: int
    mixing: float
    exact: str
    obstacle: str = ''


@dataclasses.dataclass(frozen=True)
class Report:
    """The plans of a run, and the one to choose.

    Attributes:
      datapoints, bytes: of the dataset.
      prices: the prices.
      plans: one for each order.
      choice: the order to choose; None if each has an obstacle.
      reason: why.
    """

    datapoints: int
    bytes: int
    prices: Prices
    plans: list[Plan]
    choice: str | None
    reason: str


class Planner:
    """Plans the requests for datapoints of an opened dataset, by the tables that its reader holds.

    Args:
      path: the dataset.
      keys: the keys that are read; None for all.
      cached: the keys that the reader holds in memory (``cache_keys``).
    """

    def __init__(self, path: granular.Path, keys: Sequence[str] | None = None, cached: Sequence[str] = ()) -> None:
        self._reader, self.opening = _open(path, cached)
        indexed = indexed_shards_of(self._reader.aio) is not None
        self._reads_references = self._reader.layout == 'refs' and 'refs' not in cached and not indexed
        if self._reads_references or indexed:
            # References tell which records a datapoint has, so that they are held here in any case. An index holds
            # tables in another form.
            held = {*cached, 'refs'} if self._reader.layout == 'refs' else cached
            self._reader.close()
            self._reader, _ = _open(path, tuple(held), index=False)
        self._parts: list[Columns] = columns_of_shards(self._reader.aio)
        self.lengths = np.array([part.length for part in self._parts], np.int64)
        self._stops = np.cumsum(self.lengths)
        self._cached = frozenset(cached)
        self._choices = self._parts[0].choose(keys)
        self.merge, self.local = path.store.merge, path.store.local
        self.length = int(self._stops[-1])
        if not self.length:
            raise InvalidArgumentError(f'{path}: expected a dataset with datapoints, got an empty one')
        names = [choice.field.key for choice in self._choices if choice.field.key not in self._cached]
        self.nbytes = sum(part.bags[name].datasize for part in self._parts for name in names)
        self.blocks = sum(-(-part.bags[name].size // _CACHE_BLOCK) for part in self._parts for name in names)
        if self._reads_references:
            self.blocks += sum(-(-part.refs.size // _CACHE_BLOCK) for part in self._parts if part.refs is not None)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def reads(self, indices: Ints) -> tuple[int, int]:
        """Return the requests, and the bytes of their replies, that fetch these datapoints together."""
        shards = np.searchsorted(self._stops, indices, side='right')
        references: list[tuple[Ints, Ints]] = []
        records: list[tuple[Ints, Ints]] = []
        for number in np.unique(shards).tolist():
            part = self._parts[number]
            own = indices[shards == number] - (self._stops[number] - self.lengths[number])
            base = number * (len(self._choices) + 1)
            if self._reads_references:
                references.append(self._located(part.refs, own, base))
            if part.references is None:
                firsts, counts = own[:, None], np.ones((1, 1), np.int64)
            else:
                firsts, counts = part.references.at(own)
            for i, choice in enumerate(self._choices, 1):
                if choice.field.key not in self._cached:
                    chosen, _ = part.record_indices(own, choice, firsts, counts)
                    records.append(self._located(part.bags[choice.field.key], chosen, base + i))
        plans = [self._planned(found) for found in (references, records)]
        return sum(count for count, _ in plans), sum(nbytes for _, nbytes in plans)

    def _located(self, bag: Any, indices: Ints, number: int) -> tuple[Ints, Ints]:
        if (limits := bag.limits(indices)) is None:
            raise InvalidArgumentError(f'{bag.name}: expected its table in memory')
        return limits[0] + (number << _ADDRESS), limits[1] + (number << _ADDRESS)

    def _planned(self, located: Sequence[tuple[Ints, Ints]]) -> tuple[int, int]:
        if not located:
            return 0, 0
        starts, stops = (np.concatenate([limits[i] for limits in located]) for i in (0, 1))
        plan = ranges.plan(starts, stops, max_gap=self.merge.max_gap)
        sizes = plan.stops - plan.starts
        return int((-(-sizes // self.merge.max_request)).sum()), int(sizes.sum())


def plan(
    path: granular.Path,
    run: Run,
    orders: Sequence[str] = (),
    keys: Sequence[str] | None = None,
    cached: Sequence[str] = (),
    rates: Rates = Rates(),
    prices: Prices | None = None,
) -> Report:
    """Plan a run over a dataset in several orders, and choose one of them.

    It opens the dataset and reads its tables and references, but no records.

    Args:
      path: the dataset.
      run: the run.
      orders: ``full``, ``blocks``, ``blocks:64,512`` (block and window), ``cache`` (a full shuffle with a block cache
        on each host); by default, all of these with several settings.
      keys: the keys that are read; by default, all.
      cached: the keys that readers hold in memory, as ``cache_keys``.
      rates: what a host can read.
      prices: by default, those of the store.

    Raises:
      InvalidArgumentError: for an unknown order, or a dataset that has fewer datapoints than a batch of all hosts.
    """
    planner = Planner(path, keys, cached)
    try:
        if planner.length < run.batch * run.hosts:
            raise InvalidArgumentError(
                f'{path}: expected {run.batch * run.hosts} datapoints or more for a batch of {run.batch} on '
                f'{run.hosts} hosts, got {planner.length}'
            )
        prices = prices or Prices.of(path.store.root.partition('://')[0])
        estimate = _Estimate(planner, run, rates, prices)
        plans = [one for order in orders or estimate.defaults() for one in estimate.plans(order)]
        choice, reason = choose(plans)
        return Report(planner.length, planner.nbytes, prices, plans, choice, reason)
    finally:
        planner.close()


class _Subset:
    """The datapoints of every ``step``-th shard."""

    def __init__(self, lengths: Ints, step: int) -> None:
        mine = lengths[::step]
        self._stops = np.cumsum(mine)
        self._shift = (np.cumsum(lengths) - lengths)[::step] - (self._stops - mine)
        self.length = int(self._stops[-1])

    def locate(self, positions: Ints) -> Ints:
        """Return the indices in the whole dataset of positions in the subset."""
        located: Ints = positions + self._shift[np.searchsorted(self._stops, positions, side='right')]
        return located


class _Estimate:
    def __init__(self, planner: Planner, run: Run, rates: Rates, prices: Prices) -> None:
        self._planner, self._run, self._rates, self._prices = planner, run, rates, prices
        self._mean = planner.nbytes / planner.length
        self._random = np.random.default_rng(run.seed)
        self._full: tuple[int, int, str] | None = None

    def defaults(self) -> list[str]:
        """Return the orders to compare."""
        sized = shuffle.Blocks().sized(self._mean)
        variants = {(sized.block, sized.window), (max(1, sized.block // 4), sized.window), (64, 128)}
        blocks = [f'blocks:{block},{window}' for block, window in sorted(variants, reverse=True)]
        return ['full', *blocks, *([] if self._planner.local else ['cache'])]  # a disk needs no cache on a disk

    def plans(self, order: str) -> list[Plan]:
        """Return the plans for an order: for blocks on several hosts, also with shards of their own."""
        name, _, settings = order.partition(':')
        match name:
            case 'full' if not settings:
                requests, nbytes, exact = self._shuffled()
                return [self._plan('shuffle.Index()', requests, nbytes, exact, self._mixing(shuffle.Index()))]
            case 'cache' if not settings:
                return [self._with_cache()]
            case 'blocks':
                blocks = self._blocks(settings)
                own = self._run.hosts > 1 and len(self._planner.lengths) >= self._run.hosts
                return [self._in_blocks(blocks, False), *([self._in_blocks(blocks, True)] if own else [])]
        raise InvalidArgumentError(f'order: expected full, blocks, blocks:BLOCK,WINDOW or cache, got {order!r}')

    def _blocks(self, settings: str) -> shuffle.Blocks:
        if not settings:
            return shuffle.Blocks().sized(self._mean)
        try:
            block, window = map(int, settings.split(','))
        except ValueError:
            raise InvalidArgumentError(f'order: expected blocks:BLOCK,WINDOW, got blocks:{settings!r}') from None
        return shuffle.Blocks(block, window)

    def _plan(
        self, order: str, requests: float, nbytes: float, exact: str, mixing: float, buffered: int = 0, disk: int = 0
    ) -> Plan:
        run, rates = self._run, self._rates
        first = shuffle.Index().lookup(np.zeros(1, np.int64), self._planner.length, run.seed, 0)
        opening = (self._planner.opening + self._planner.reads(first)[0]) * run.hosts
        dollars = (requests + opening) / 1000 * self._prices.read + nbytes / 1e9 * self._prices.egress
        times = [
            amount / run.hosts / rate
            for amount, rate in ((nbytes, rates.bytes_per_second), (requests, rates.requests_per_second))
            if rate
        ]
        batches = int((_PREFETCH + 1) * run.batch * self._mean)
        memory, obstacle = batches + buffered, ''
        if memory > run.memory:
            obstacle = f'takes {readable_size(memory)} of memory, {readable_size(run.memory)} are allowed'
        elif disk > run.disk:
            obstacle = f'takes {readable_size(disk)} of disk, {readable_size(run.disk)} are allowed'
        return Plan(
            order, round(requests), round(nbytes), opening, dollars, max(times) if times else None, memory, disk,
            mixing, exact, obstacle,
        )  # fmt: skip

    def _shuffled(self) -> tuple[int, int, str]:
        """Return requests and bytes of a full shuffle."""
        if self._full is None:
            run, planner = self._run, self._planner
            # A Loader leaves out the last datapoints that give no full batch on each host.
            steps = planner.length // (run.batch * run.hosts) * run.hosts
            chosen = self._sample(steps * run.epochs, _SAMPLES)
            reads = [self._batch(shuffle.Index(), step, steps) for step in chosen.tolist()]
            planned = np.array([planner.reads(indices) for indices in reads])
            factor = steps * run.epochs / len(chosen)
            requests, nbytes = (planned.sum(0) * factor).tolist()
            self._full = requests, nbytes, 'exact' if len(chosen) == steps * run.epochs else 'estimate'
        return self._full

    def _sample(self, count: int, most: int) -> Ints:
        return np.arange(count) if count <= most else np.sort(self._random.choice(count, most, replace=False))

    def _batch(self, order: shuffle.Order, step: int, steps: int, subset: '_Subset | None' = None) -> Ints:
        epoch, number = divmod(step, steps)
        positions = np.arange(number * self._run.batch, (number + 1) * self._run.batch)
        length = self._planner.length if subset is None else subset.length
        indices = order.lookup(positions, length, self._run.seed, epoch)
        return indices if subset is None else subset.locate(indices)

    def _mixing(self, order: shuffle.Order, subset: '_Subset | None' = None) -> float:
        """Return the labels in a batch of a sorted dataset, relative to those of a batch drawn at random."""
        length, batch = self._planner.length, self._run.batch
        steps = (length if subset is None else subset.length) // batch
        if not steps:
            return 0.0
        epochs = max(1, _SAMPLES // steps)
        batches = [self._batch(order, step, steps, subset) for step in self._sample(steps * epochs, _SAMPLES).tolist()]
        uniform = [self._random.choice(length, batch, replace=False) for _ in batches]

        def labels(found: Sequence[Ints]) -> float:
            return float(np.mean([len(np.unique(indices * _LABELS // length)) for indices in found]))

        return labels(batches) / labels(uniform)

    def _in_blocks(self, order: shuffle.Blocks, own: bool) -> Plan:
        """Plan blocks: each host reads all of them, or those of its own shards."""
        planner, run = self._planner, self._run
        subset = _Subset(planner.lengths, run.hosts) if own else _Subset(planner.lengths, 1)
        count = -(-subset.length // order.block)
        chosen = self._sample(count, 4 * _SAMPLES)
        edges = np.minimum(np.stack((chosen, chosen + 1)) * order.block, subset.length)
        planned = np.array([planner.reads(subset.locate(np.arange(*edge))) for edge in edges.T.tolist()])
        # Neighbouring blocks that are prefetched together may share a request, so this is an upper bound.
        requests, nbytes = (planned.sum(0) * (count / len(chosen)) * run.epochs * run.hosts).tolist()
        window = int(min(order.block * order.window, subset.length) * self._mean)
        name = f'shuffle.Blocks({order.block}, {order.window})'
        plan = self._plan(
            f'{name}, own shards' if own else name,
            requests,
            nbytes,
            'at most' if len(chosen) == count and not own else 'estimate',
            self._mixing(order, subset),
            min(2 * window, _BUFFER),
        )
        if window > _BUFFER and not plan.obstacle:
            return dataclasses.replace(plan, obstacle=f'a window takes {readable_size(window)}, more than is buffered')
        return plan

    def _with_cache(self) -> Plan:
        """Plan a full shuffle with a block cache on each host: each host fetches each block at most once."""
        planner, run = self._planner, self._run
        requests = self._shuffled()[0]
        records = planner.length / max(1, planner.blocks)  # datapoints in a block, on average
        reached = 1 - (1 - 1 / run.hosts) ** (run.epochs * max(1.0, records))
        blocks = planner.blocks * reached * run.hosts
        disk = planner.blocks * _CACHE_BLOCK
        exact = 'at most' if run.hosts == 1 else 'estimate'
        return self._plan(
            'shuffle.Index() with cache_dir',
            min(requests, blocks) if run.epochs == 1 else blocks,
            blocks * _CACHE_BLOCK,
            exact,
            self._mixing(shuffle.Index()),
            disk=disk,
        )


def choose(plans: Sequence[Plan]) -> tuple[str | None, str]:
    """Return the order to choose, and why."""
    possible = [plan for plan in plans if not plan.obstacle]
    if not possible:
        return None, 'every order has an obstacle: allow more memory or disk'
    mixed = [plan for plan in possible if plan.mixing >= _WELL_MIXED]
    among = mixed or [max(possible, key=lambda plan: plan.mixing)]
    if all(plan.seconds is not None for plan in among):
        fastest = min(plan.seconds or 0.0 for plan in among)
        quick = [plan for plan in among if (plan.seconds or 0.0) <= 1.05 * fastest]
        best, criterion = min(quick, key=_cost), 'the shortest time, and of those within 5 % of it the lowest price'
    else:
        best, criterion = min(among, key=_cost), 'the lowest price'
    if not mixed:
        return best.order, f'it fits and mixes best; none that fits mixes {_WELL_MIXED:.0%} as well as random batches'
    return best.order, f'it fits, mixes at least {_WELL_MIXED:.0%} as well as random batches, and has {criterion}'


def _cost(plan: Plan) -> tuple[float, int, float]:
    return plan.dollars, plan.requests, -plan.mixing


def _open(
    path: granular.Path, cached: Sequence[str], index: bool = True
) -> tuple[DatasetReader | ShardedDatasetReader, int]:
    """Open a dataset. Returns its reader, and the number of requests that opened it."""
    store = path.store
    # Caches would hide requests.
    config = dataclasses.replace(store.config, index_cache='', cache_dir='')
    plain = granular.Path(str(path), config=config, **store.options)
    failed: NotFoundError | None = None
    readers: tuple[Callable[[], DatasetReader | ShardedDatasetReader], ...] = (
        lambda: DatasetReader(plain, None, cache_keys=cached),
        lambda: ShardedDatasetReader(plain, None, cache_keys=cached, index=index),
    )
    for open_reader in readers:
        before = metrics.snapshot().total('requests')
        try:
            reader = open_reader()
            reader.spec  # noqa: B018 - which opens it
        except NotFoundError as error:
            failed = failed or error
            continue
        return reader, metrics.snapshot().total('requests') - before
    refuse_other_formats(path)
    raise NotFoundError(f'{path}: is not a dataset') from failed


def _check(name: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    if not math.isfinite(value) or value <= above or value < at_least:
        bound = f'more than {above:g}' if math.isfinite(above) else f'{at_least:g} or more'
        raise InvalidArgumentError(f'{name}: expected a number, {bound}, got {value:g}')


def readable_size(nbytes: float) -> str:
    """Return a number of bytes for people, such as 1.5 GB (10**9 bytes)."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if nbytes >= size:
            return f'{nbytes / size:,.1f} {unit}'
    return f'{nbytes:,.0f} B'
