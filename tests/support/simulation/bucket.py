"""A model of a bucket behind connections in memory: latencies, rates of prefixes, refusals, stalls and outages."""

import asyncio
import collections
import dataclasses
import math
import re
import zlib
from typing import Any, Literal

from tests.support.simulation.objects import Objects
from tests.support.simulation.world import Host, World

_LENGTH = re.compile(rb'\r\nContent-Length: (\d+)\r\n')
_SLOW_DOWN = memoryview(b'<Error><Code>SlowDown</Code></Error>')
_REFUSED = b'HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n' % len(_SLOW_DOWN)
_CONNECT = 0.002  # seconds to connect


@dataclasses.dataclass
class Model:
    """The behaviour of a bucket. Times are in seconds, from the creation of the bucket.

    Attributes:
      rate: requests a second that each partition answers; it refuses more with status 503 SlowDown.
      burst: seconds of this rate that a partition answers at once after a pause.
      partitions: partitions, over which the folders of shards are spread.
      change: a time, and the factor of the rate from then on.
      latency: the median until a reply begins, and sigma of its log-normal distribution.
      tail: the share of replies that take longer, and by which factor.
      refusal: the latency of a refusal.
      slow: partitions that are slow, by which factor, and the share of their requests that is.
      stall: the share of replies that never come.
      faults: the share of requests that is refused at any rate.
      outage: when it begins and ends, and how requests fail meanwhile: status 503, a refused connection, no reply.
    """

    rate: float = 5500.0
    burst: float = 0.2
    partitions: int = 1
    change: tuple[float, float] = (math.inf, 1.0)
    latency: tuple[float, float] = (0.025, 0.3)
    tail: tuple[float, float] = (0.002, 10.0)
    refusal: float = 0.01
    slow: tuple[int, float, float] = (0, 1.0, 1.0)
    stall: float = 0.0
    faults: float = 0.0
    outage: tuple[float, float, Literal['503', 'refused', 'silent']] = (0.0, 0.0, '503')


class Second:
    """The requests that came in one second, and the replies that were sent in it: good and refused."""

    __slots__ = ('done', 'refused', 'requests')

    def __init__(self) -> None:
        self.requests = self.done = self.refused = 0


class _Partition:
    def __init__(self, model: Model, now: float) -> None:
        self.tokens, self.at = model.rate * model.burst, now


class Bucket:
    """A bucket in a world.

    Args:
      world: the clock.
      objects: the objects.
      model: its behaviour.

    Attributes:
      seconds: what happened, by second from its creation on.
    """

    def __init__(self, world: World, objects: Objects, model: Model) -> None:
        self._world, self._objects, self.model = world, objects, model
        self._began = world.now
        self._partitions = [_Partition(model, world.now) for _ in range(model.partitions)]
        self._number = 0
        self.seconds: collections.defaultdict[int, Second] = collections.defaultdict(Second)
        world.network = self

    def age(self) -> float:
        """Return the seconds since its creation."""
        return self._world.now - self._began

    def second(self) -> Second:
        """Return the counts of the current second."""
        return self.seconds[int(self.age())]

    def partition(self, path: str) -> int:
        """Return the partition of an object: all objects of a folder have the same."""
        return zlib.crc32(path.rpartition('/')[0].encode()) % len(self._partitions)

    async def connect(self, host: Host, protocol: asyncio.BufferedProtocol) -> asyncio.Transport:
        await asyncio.sleep(_CONNECT)
        if self._is_out() == 'refused':
            raise ConnectionRefusedError('the simulated bucket is out')
        return _Wire(host, protocol, self)

    def _is_out(self) -> str:
        start, stop, how = self.model.outage
        return how if start <= self.age() < stop else ''

    def take(self, wire: '_Wire', data: bytes) -> None:
        """Take a request and plan its reply."""
        world, model, host = self._world, self.model, wire.host
        host.requests += 1
        self.second().requests += 1
        method, target, _ = data[: data.index(b'\r\n')].decode().split(' ')
        number = self.partition(self._objects.key(target))
        out = self._is_out()
        if out == 'refused':
            wire.abort()
        elif (
            out == '503'
            or (model.faults and world.random.random() < model.faults)
            or not self._admits(self._partitions[number])
        ):
            self._plan(wire, model.refusal, _REFUSED, _SLOW_DOWN, good=False)
        elif not out and world.random.random() >= model.stall:
            median, sigma = model.latency
            latency = median * world.random.lognormvariate(0, sigma)
            latency *= model.tail[1] if world.random.random() < model.tail[0] else 1.0
            slow, factor, share = model.slow
            latency *= factor if number < slow and world.random.random() < share else 1.0
            self._plan(wire, latency, *self._objects.reply(method, target, data), good=True)

    def _plan(self, wire: '_Wire', latency: float, head: bytes, body: memoryview, good: bool) -> None:
        self._number += 1  # no head repeats another one
        head = b'%bX-Request-Id: %d\r\n\r\n' % (head, self._number)
        wire.host.call_later(latency, wire.deliver, head, body, good)

    def _admits(self, partition: _Partition) -> bool:
        """Return whether a partition answers another request: a bucket of tokens."""
        model, now = self.model, self._world.now
        start, factor = model.change
        rate = model.rate * (factor if self.age() >= start else 1.0)
        partition.tokens = min(rate * model.burst, partition.tokens + (now - partition.at) * rate)
        partition.at = now
        if partition.tokens < 1:
            return False
        partition.tokens -= 1
        return True


class _Wire(asyncio.Transport):
    """A connection in memory between a host and a bucket."""

    def __init__(self, host: Host, protocol: asyncio.BufferedProtocol, bucket: Bucket) -> None:
        self.host, self._protocol, self._bucket = host, protocol, bucket
        self._closing = False
        self._received = b''  # the beginning of a request

    def fileno(self) -> int:
        return self.host.world.silent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == 'socket' else default

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        request = self._received + data if self._received else bytes(data)
        if not request.startswith((b'GET', b'HEAD')):
            head, _, body = request.partition(b'\r\n\r\n')
            length = _LENGTH.search(head + b'\r\n')
            if length is not None and len(body) < int(length[1]):
                self._received = request
                return
            self._received = b''
        self._bucket.take(self, request)

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self.host.call_soon(self._protocol.connection_lost, None)

    close = abort

    def deliver(self, head: bytes, body: memoryview, good: bool) -> None:
        """Send a reply."""
        if self._closing:
            return
        second = self._bucket.second()
        if good:
            second.done += 1
            self.host.done += 1
        else:
            second.refused += 1
            self.host.refused += 1
        self._send(b''.join((head, body)) if len(body) < 16384 else head)
        if len(body) >= 16384:
            self._send(body)

    def _send(self, data: bytes | memoryview) -> None:
        rest, protocol = memoryview(data), self._protocol
        while rest and not self._closing:
            buffer = protocol.get_buffer(-1)
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            protocol.buffer_updated(count)
            rest = rest[count:]
