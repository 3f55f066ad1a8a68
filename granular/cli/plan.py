"""Plans of training runs: requests, bytes, dollars, time, memory and mixing of orders."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import granular
from granular import shuffle
from granular._words import counted
from granular.cli.model import UNKNOWN, Limit, Prices, Rates, Share, check, opening_time, readable_size, share, time_of
from granular.cli.planner import CACHE_BLOCK, Planner
from granular.config import GiB
from granular.errors import InvalidArgumentError
from granular.indexing import Ints, check_integer

_LABELS: Final = 100  # of the sorted dataset by which mixing is measured
_SAMPLES: Final = 64  # batches, and times 4 blocks, up to which all are planned
_BUFFER: Final = GiB  # bytes that the blocks of an order may take
_WELL_MIXED: Final = 0.97
_SEED: Final = 0  # of the orders
_MOST: Final = 100_000_000  # of each number of a run: int64 holds the datapoints of so many epochs


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run."""

    batch: int  # datapoints in a batch of one host
    epochs: int = 1  # passes over the dataset
    hosts: int = 1  # machines that share each epoch
    memory: float = GiB  # bytes that the data may take on a host
    disk: float = 10 * GiB  # bytes that a block cache may take on a host
    prefetch: int = 8  # batches that a Loader reads ahead

    def __post_init__(self) -> None:
        for name, least in (('batch', 1), ('epochs', 1), ('hosts', 1), ('prefetch', 0)):
            check_integer(name, getattr(self, name), least, _MOST)
        check('memory', self.memory, above=0)
        check('disk', self.disk, at_least=0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a run in one order, of all hosts and epochs."""

    order: str  # as in Python; with ``own shards``, each host reads every ``hosts``-th shard only
    requests: int  # that read data and references, without those of opening; see ``exact``
    bytes: int  # of their replies
    opening: int  # requests that open the dataset on all hosts, and read one datapoint, of whose spec a Loader learns
    dollars: float  # the price of all requests and bytes
    seconds: float | None  # to open and read, by the given rates and the limit of the store; None without rates
    limits: str  # latency, bandwidth, requests, concurrency, processor, or the store; empty if unknown
    # Batches to read ahead, from which on latency does not limit it; None if unknown, or for the order alone to decide.
    prefetch: int | None
    share: Share | None  # what the hosts get of the limit of the store; None if that is unknown
    memory: int  # bytes in the memory of a host, at most
    disk: int  # bytes on the disk of a host
    mixing: float  # labels in a batch of a dataset that is sorted by 100 labels / labels in a batch drawn at random
    # ``exact`` if every request was planned, ``estimate`` if a part was, ``at most`` for an upper bound; retries
    # and hedged requests come on top of each.
    exact: str
    obstacle: str = ''  # why the order is out of the question


@dataclasses.dataclass(frozen=True)
class Report:
    """The plans of a run over a dataset, and the one to choose."""

    datapoints: int
    bytes: int
    prices: Prices
    limit: Limit
    plans: list[Plan]  # one for each order
    choice: str | None  # the order to choose; None if each has an obstacle
    reason: str  # of the choice
    advice: list[str]  # sentences on settings, and on the limit of the store


def plan(
    path: granular.Path,
    run: Run,
    orders: Sequence[str] = (),
    keys: Sequence[str] | None = None,
    cached: Sequence[str] = (),
    rates: Rates = UNKNOWN,
    prices: Prices | None = None,
    limit: Limit | None = None,
) -> Report:
    """Plan a run over a dataset in several orders, and choose one of them.

    It opens the dataset and reads its tables and references, but no records.

    Args:
      orders: ``full``, ``sequential``, ``blocks``, ``blocks:64,512`` (block and window), ``cache`` (a full shuffle with
        a block cache on each host); by default, all of these that shuffle, with several settings.
      keys: the keys that are read; by default, all.
      cached: the keys that readers hold in memory, as ``cache_keys``.
      rates: what a host can read.
      prices, limit: by default, those of the store.

    Raises:
      InvalidArgumentError: for an unknown order, or a dataset that has fewer datapoints than a batch of all hosts.
    """
    planner = Planner(path, keys, cached)
    try:
        if planner.length < run.batch * run.hosts:
            raise InvalidArgumentError(
                f'{path}: expected {counted(run.batch * run.hosts, "datapoint")} or more for a batch of {run.batch} on '
                f'{counted(run.hosts, "host")}, got {planner.length}: choose a smaller --batch or fewer --hosts'
            )
        scheme = path.store.root.partition('://')[0]
        prices, limit = prices or Prices.of(scheme), limit or Limit.of(scheme)
        estimate = _Estimate(planner, run, rates, prices, limit)
        plans = [one for order in orders or estimate.defaults() for one in estimate.plans(order)]
        choice, reason = choose(plans)
        told = advice(run, limit, plans, choice, len(planner.lengths), planner.indexed)
        return Report(planner.length, planner.nbytes, prices, limit, plans, choice, reason, told)
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
        located: Ints = positions + self._shift[np.searchsorted(self._stops, positions, side='right')]
        return located


class _Estimate:
    def __init__(self, planner: Planner, run: Run, rates: Rates, prices: Prices, limit: Limit) -> None:
        self._planner, self._run, self._rates, self._prices, self._limit = planner, run, rates, prices, limit
        self._mean = planner.nbytes / planner.length
        self._random = np.random.default_rng(_SEED)
        # A Loader leaves out the last datapoints that give no full batch on each host.
        self._steps = planner.length // (run.batch * run.hosts) * run.hosts
        self._all = _Subset(planner.lengths, 1)

    def defaults(self) -> list[str]:
        sized = shuffle.Blocks().sized(self._mean)
        variants = {(sized.block, sized.window), (max(1, sized.block // 4), sized.window), (64, 128)}
        blocks = [f'blocks:{block},{window}' for block, window in sorted(variants, reverse=True)]
        return ['full', *blocks, *([] if self._planner.local else ['cache'])]  # a disk needs no cache on a disk

    def plans(self, order: str) -> list[Plan]:
        """Return the plans for an order: for blocks on several hosts, also with shards of their own."""
        name, _, settings = order.partition(':')
        match name:
            case 'full' if not settings:
                return [self._plan('shuffle.Index()', *self._shuffled, self._mixing(shuffle.Index(), self._all))]
            case 'sequential' if not settings:
                in_order = shuffle.Sequential()
                return [self._plan('shuffle.Sequential()', *self._batches(in_order), self._mixing(in_order, self._all))]
            case 'cache' if not settings:
                return [self._with_cache()]
            case 'blocks':
                blocks = self._blocks(settings)
                own = self._run.hosts > 1 and len(self._planner.lengths) >= self._run.hosts
                return [self._in_blocks(blocks, False), *([self._in_blocks(blocks, True)] if own else [])]
        raise InvalidArgumentError(
            f'order: expected full, sequential, blocks, blocks:BLOCK,WINDOW or cache, got {order!r}'
        )

    def _blocks(self, settings: str) -> shuffle.Blocks:
        if not settings:
            return shuffle.Blocks().sized(self._mean)
        try:
            block, window = map(int, settings.split(','))
        except ValueError:
            raise InvalidArgumentError(f'order: expected blocks:BLOCK,WINDOW, got blocks:{settings!r}') from None
        return shuffle.Blocks(block, window)

    def _plan(
        self,
        order: str,
        requests: float,
        nbytes: float,
        exact: str,
        mixing: float,
        buffered: int = 0,
        disk: int = 0,
        windows: tuple[float, float] | None = None,
        shards: float = 1.0,
    ) -> Plan:
        """Return the plan of an order, given the windows that a host reads and how many at a time, if it reads any, and
        the share of the shards that it opens.
        """
        run, planner = self._run, self._planner
        first = shuffle.Index().lookup(np.zeros(1, np.int64), planner.length, _SEED, 0)
        first_requests, first_nbytes = planner.reads(first)
        if planner.indexed:
            shards = 1.0  # the index is of all shards
        of_host = math.ceil(shards * planner.opening) + first_requests
        opening = of_host * run.hosts
        dollars = (requests + opening) / 1000 * self._prices.read + nbytes / 1e9 * self._prices.egress
        batches = self._steps * run.epochs / run.hosts
        units, ahead = windows or (batches, run.prefetch + 1)
        seconds, limits, enough = None, '', None
        if self._rates != UNKNOWN:
            seconds, limits, enough = time_of(
                self._rates, units=units, ahead=ahead, rounds=planner.rounds, requests=requests / run.hosts,
                nbytes=nbytes / run.hosts, batches=batches, batch=run.batch, concurrency=planner.concurrency,
            )  # fmt: skip
        shared = share(self._limit, run.hosts, requests, seconds)
        if seconds is not None:
            received = shards * planner.opening_nbytes + first_nbytes
            began = opening_time(self._rates, of_host, received, planner.rounds)
            opened = share(self._limit, run.hosts, opening, began)
            if shared is not None and opened is not None:
                shared = dataclasses.replace(shared, refused=shared.refused + opened.refused)
                began = max(began, opened.seconds)
                if shared.seconds > seconds:
                    seconds, limits = shared.seconds, 'the store'
            seconds += began
        memory, obstacle = int((run.prefetch + 1) * run.batch * self._mean) + buffered, ''
        if memory > run.memory:
            obstacle = f'takes {readable_size(memory)} of memory, {readable_size(run.memory)} are allowed'
        elif disk > run.disk:
            obstacle = f'takes {readable_size(disk)} of disk, {readable_size(run.disk)} are allowed'
        return Plan(
            order, round(requests), round(nbytes), opening, dollars, seconds, limits,
            None if windows or enough is None else enough - 1, shared, memory, disk, mixing, exact, obstacle,
        )  # fmt: skip

    @functools.cached_property
    def _shuffled(self) -> tuple[int, int, str]:
        return self._batches(shuffle.Index())

    def _batches(self, order: shuffle.Order) -> tuple[int, int, str]:
        """Return requests and bytes of an order that is read in batches, and whether these are exact."""
        count = self._steps * self._run.epochs
        chosen = self._sample(count, _SAMPLES)
        planned = [self._planner.reads(self._batch(order, step, self._steps, self._all)) for step in chosen.tolist()]
        requests, nbytes = (np.array(planned).sum(0) * (count / len(chosen))).tolist()
        return requests, nbytes, 'exact' if len(chosen) == count else 'estimate'

    def _sample(self, count: int, most: int) -> Ints:
        return np.arange(count) if count <= most else np.sort(self._random.choice(count, most, replace=False))

    def _batch(self, order: shuffle.Order, step: int, steps: int, subset: _Subset) -> Ints:
        epoch, number = divmod(step, steps)
        positions = np.arange(number * self._run.batch, (number + 1) * self._run.batch)
        return subset.locate(order.lookup(positions, subset.length, _SEED, epoch))

    def _mixing(self, order: shuffle.Order, subset: _Subset) -> float:
        """Return the labels in a batch of a sorted dataset, relative to those of a batch drawn at random."""
        length, batch = self._planner.length, self._run.batch
        if not (steps := subset.length // batch):
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
        subset = _Subset(planner.lengths, run.hosts) if own else self._all
        count = -(-subset.length // order.block)
        # The blocks of the first window are read one by one, later ones in groups of which requests are shared.
        ahead = order.groups_per_window(subset.length)
        size = len(order.group(0, subset.length, _SEED))
        groups = max(0, -(-count * run.epochs // size) - ahead)
        single = min(ahead * size, count)
        singles = self._sample(single, 4 * _SAMPLES)
        chosen = self._sample(groups, 4 * _SAMPLES) + ahead

        def planned(parts: Sequence[Ints], of: int) -> Any:
            reads = [planner.reads(subset.locate(self._datapoints(part, order.block, subset.length))) for part in parts]
            return np.array(reads).sum(0) * (of / len(reads)) if reads else np.zeros(2)

        sums = planned([np.array([i]) for i in singles.tolist()], single)
        blocks = [order.group(i, subset.length, _SEED) for i in chosen.tolist()]
        sums += planned([part[part < count * run.epochs] % count for part in blocks], groups)
        requests, nbytes = (sums * run.hosts).tolist()
        whole = len(singles) == single and len(chosen) == groups and not own
        most = min(order.block * order.window, subset.length)
        window = int(most * self._mean)
        # Batches that are read ahead may reach over several windows.
        stride = run.batch * (1 if own else run.hosts)
        windows = subset.length * run.epochs / most, max(1.0, (run.prefetch + 1) * stride / most)
        name = f'shuffle.Blocks({order.block}, {order.window})'
        plan = self._plan(
            f'{name}, own shards' if own else name,
            requests,
            nbytes,
            'at most' if whole else 'estimate',
            self._mixing(order, subset),
            min(2 * window, _BUFFER),
            windows=windows,
            shards=len(planner.lengths[:: run.hosts]) / len(planner.lengths) if own else 1.0,
        )
        if window > _BUFFER and not plan.obstacle:
            return dataclasses.replace(plan, obstacle=f'a window takes {readable_size(window)}, more than is buffered')
        return plan

    def _datapoints(self, blocks: Ints, block: int, length: int) -> Ints:
        found: Ints = (blocks[:, None] * block + np.arange(min(block, length))).ravel()
        return found[found < length]

    def _with_cache(self) -> Plan:
        """Plan a full shuffle with a block cache on each host: each host fetches each block at most once."""
        planner, run = self._planner, self._run
        requests = self._shuffled[0]
        records = planner.length / max(1, planner.blocks)  # datapoints in a block, on average
        reached = 1 - (1 - 1 / run.hosts) ** (run.epochs * max(1.0, records))
        blocks = planner.blocks * reached * run.hosts
        disk = planner.blocks * CACHE_BLOCK
        exact = 'at most' if run.hosts == 1 else 'estimate'
        return self._plan(
            'shuffle.Index() with cache_dir',
            min(requests, blocks) if run.epochs == 1 else blocks,
            blocks * CACHE_BLOCK,
            exact,
            self._mixing(shuffle.Index(), self._all),
            disk=disk,
        )


def choose(plans: Sequence[Plan]) -> tuple[str | None, str]:
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


def advice(run: Run, limit: Limit, plans: Sequence[Plan], choice: str | None, shards: int, indexed: bool) -> list[str]:
    """Return sentences on the settings of the order to choose, on opening, and on the limit of the store."""
    told: list[str] = []
    chosen = next((one for one in plans if one.order == choice), None)
    if chosen is not None and shards > 1 and not indexed and chosen.opening > chosen.requests:
        told.append(
            f'each host opens the dataset by {chosen.opening // run.hosts:,} requests, more than it reads by: with an '
            f'index (`granular index`), a few open it'
        )
    slow = [one for one in plans if one.order == choice and one.limits == 'latency']
    if slow and slow[0].prefetch is None:
        told.append('latency limits it, as one window is read at a time: larger windows take fewer round trips')
    elif slow:
        most = int(run.memory * (run.prefetch + 1) / max(1, slow[0].memory)) - 1  # that fit into the memory
        if (ahead := min(slow[0].prefetch or 0, most)) > run.prefetch:
            told.append(f'latency limits it: Loader(prefetch={ahead}) reads more batches at a time (--prefetch)')
    needed = {one.order: one.share.prefixes or 0 for one in plans if one.share is not None and not one.obstacle}
    if (count := needed.get(choice or '', 0)) <= limit.prefixes:
        return told
    calm = [order for order, prefixes in needed.items() if prefixes <= limit.prefixes]
    told += [
        f'the store refuses a part of the requests: {f"read by {calm[0]}" if calm else "read larger blocks"}, '
        f'or on fewer hosts',
        f'or write the data in {count:,} parts, each in a {limit.per} of its own, read them as '
        f'MapDataset.concatenate([...]), and plan that with --prefixes {count}',
    ]
    if limit.growth:
        told.append(f'or wait: {limit.growth} (this dataset has {shards:,} folders of shards)')
    return told


def _cost(plan: Plan) -> tuple[float, int, float]:
    return plan.dollars, plan.requests, -plan.mixing
