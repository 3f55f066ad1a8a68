"""Models for plans: the prices and limits of a store, the time of reads, and hosts that share a limit."""

import dataclasses
import importlib.resources
import json
import math
from typing import Any, Final, Self

from granular.errors import InvalidArgumentError
from granular.indexing import MOST, check_integer

_OPENING: Final = 5  # requests after each other that open a dataset
_START: Final = 0.05  # seconds of the first reads of a process: imports, its event loop, connections
_DATAPOINT: Final = 15e-6  # seconds of processor time of a Loader for a datapoint of bytes, without its request
_BATCH: Final = 400e-6  # and for a batch
_LARGEST: Final = 1e18  # number that is taken; 1 / it is the least above 0


def stores() -> dict[str, Any]:
    """Return the prices and limits of stores, and what hosts that share a limit get of it."""
    table: dict[str, Any] = json.loads((importlib.resources.files('granular.cli') / 'stores.json').read_text())
    return table


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of a store in dollars."""

    name: str  # the store, its storage class and region
    date: str  # of the prices
    read: float  # for 1,000 requests that read
    egress: float  # for 1 GB (10**9 bytes) that leaves the store; 0 for machines in its region
    source: str  # the address of the price list

    def __post_init__(self) -> None:
        check('price of 1,000 reads', self.read, at_least=0)
        check('price of 1 GB', self.egress, at_least=0)

    @classmethod
    def of(cls, scheme: str, read: float | None = None, egress: float | None = None) -> Self:
        """Return the prices of a store by its scheme, with those that are given; 0 for a store of unknown prices."""
        table = stores()
        store = table['stores'].get(scheme)
        if store is None:
            name = scheme or 'local disk'
            if scheme and read is None and egress is None:
                name += ' (unknown: pass --read-price and --egress-price)'
            return cls(name, '', read or 0.0, egress or 0.0, '')
        read = store['read_per_1000'] if read is None else read
        egress = store['egress_per_gb'] if egress is None else egress
        return cls(store['name'], table['date'], read, egress, store['source'])


@dataclasses.dataclass(frozen=True)
class Limit:
    """The requests that a store answers; it refuses more."""

    rate: float | None = None  # requests a second for each of these parts; None if unknown
    per: str = 'prefix'  # the part of a store that has this limit: a prefix or a bucket
    growth: str = ''  # a sentence on limits that grow
    source: str = ''  # where the store documents it
    prefixes: int = 1  # the number of these parts, over which the data is spread

    @property
    def parts(self) -> str:
        """The plural of ``per``."""
        return 'prefixes' if self.per == 'prefix' else f'{self.per}s'

    def __post_init__(self) -> None:
        if self.rate is not None:
            check('requests a second of a prefix', self.rate, above=0)
        check_integer('prefixes', self.prefixes, 1, MOST)

    @classmethod
    def of(cls, scheme: str, rate: float | None = None, prefixes: int = 1) -> Self:
        """Return the limit of a store by its scheme, or the one that is given."""
        store = stores()['stores'].get(scheme)
        if rate is not None or store is None:
            return cls(rate, prefixes=prefixes)
        return cls(store['reads_per_second'], store['per'], store['growth'], store['limit_source'], prefixes)


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one host can read, at most; None if unknown."""

    bytes_per_second: float | None = None
    requests_per_second: float | None = None
    latency: float | None = None  # seconds until a small reply is complete

    def __post_init__(self) -> None:
        for name, rate in (
            ('bytes a second', self.bytes_per_second),
            ('requests a second', self.requests_per_second),
            ('seconds of latency', self.latency),
        ):
            if rate is not None:
                check(name, rate, above=0)


UNKNOWN: Final = Rates()


def time_of(
    rates: Rates,
    *,
    units: float,
    ahead: float,
    rounds: int,
    requests: float,
    nbytes: float,
    batches: float,
    batch: int,
    concurrency: int,
) -> tuple[float, str, int | None]:
    """Return the seconds that the reads of one host take once the dataset is open.

    Args:
      rates: what it can read.
      units: batches or windows. Each is requested as a whole.
      ahead: units that are read at a time.
      rounds: requests after each other that a unit takes: references, then records.
      requests, nbytes, batches: of all units.
      batch: datapoints in a batch.
      concurrency: requests in flight, at most; 0 if that adapts.

    Returns:
      The seconds; what limits them: latency, bandwidth, requests, concurrency or processor; and the units to read at a
      time, from which on latency does not limit them, None if nothing else is known.
    """
    latency = rates.latency or 0.0
    shares = {
        'bandwidth': nbytes / (rates.bytes_per_second or math.inf),
        'requests': requests / (rates.requests_per_second or math.inf),
        'concurrency': requests * latency / (concurrency or math.inf),
    }
    # One thread sends the requests and makes the batches, also while units wait for their replies.
    making = batches * (_DATAPOINT * batch + _BATCH)
    thread = shares['requests'] + making
    waiting, transfer = rounds * latency * units, max(shares.values())
    seconds, busy = (waiting + transfer) / ahead, max(transfer, thread)
    if seconds > busy:
        limit = 'latency'
    elif thread > transfer and making > shares['requests']:
        limit = 'processor'
    else:
        limit = max(shares, key=lambda name: shares[name])
    return (
        max(_in_turns(units, ahead, rounds * latency, transfer / units), busy),
        limit,
        math.ceil((waiting + transfer) / busy) if busy else None,
    )


def opening_time(rates: Rates, requests: float, nbytes: float, rounds: int) -> float:
    """Return the seconds until a host has opened a dataset, by some requests, and waited for the first reads."""
    # Beside opening, the first datapoint, of whose spec a Loader learns, and the first unit are waited for.
    waiting = _START + (_OPENING + 2 * rounds) * (rates.latency or 0.0)
    return waiting + max(
        requests / (rates.requests_per_second or math.inf), nbytes / (rates.bytes_per_second or math.inf)
    )


def _in_turns(units: float, ahead: float, wait: float, transfer: float) -> float:
    """Return the seconds of units of which some wait at a time, and then transfer one after another.

    A unit that has waited finds others that transfer: their number is that of the mean value analysis of a closed
    queue, in the approximation of Bard and Schweitzer.
    """
    excess = ahead * transfer - wait
    return units / ahead * (wait + (excess + math.sqrt(excess**2 + 4 * transfer * wait)) / 2)


@dataclasses.dataclass(frozen=True)
class Share:
    """The requests of hosts that share the limit of a store."""

    wanted: float | None  # reads a second of all hosts if none was refused; None if the rates of a host are unknown
    refused: int  # requests that are refused, at most, and sent again; 0 if that is unknown
    goodput: float  # requests a second that are answered for each host, at most
    prefixes: int | None  # over which the data must be spread so that no read is refused; None if that is unknown
    seconds: float  # the time that the limit demands


def share(limit: Limit, hosts: int, requests: float, seconds: float | None) -> Share | None:
    """Return what hosts get of a limit for requests that take them some seconds without it; None if there is none."""
    if limit.rate is None:
        return None
    measured = stores()['shared_limit']
    allowed = limit.rate * limit.prefixes
    wanted = None if seconds is None else requests / seconds
    if wanted is not None and wanted <= allowed:
        return Share(wanted, 0, wanted / hosts, math.ceil(wanted / limit.rate) or 1, requests / allowed)
    goodput = allowed * measured['goodput']
    refused = 0 if wanted is None else math.ceil(requests * measured['wasted'] / (1 - measured['wasted']))
    prefixes = None if wanted is None else math.ceil(wanted / limit.rate)
    return Share(wanted, refused, goodput / hosts, prefixes, requests / goodput)


def check(name: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """Raise ``InvalidArgumentError`` unless a number is within bounds, and not so huge or tiny that others overflow."""
    if not max(at_least, above + 1 / _LARGEST) <= value <= _LARGEST:
        bound = f'more than {above:g}' if math.isfinite(above) else f'{at_least:g} or more'
        raise InvalidArgumentError(f'{name}: expected a number, {bound} and at most {_LARGEST:g}, got {value:g}')


def readable_size(nbytes: float) -> str:
    """Return a number of bytes for people, such as 1.5 GB (10**9 bytes)."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if nbytes >= size:
            return f'{nbytes / size:,.1f} {unit}'
    return f'{nbytes:,.0f} B'
