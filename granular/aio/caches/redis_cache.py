"""A cache in a Redis server, shared by several machines."""

import asyncio
import contextlib
import functools
import math
import numbers
import os
import re
import secrets
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from granular._support.lazy import import_extra
from granular._support.text import logger
from granular.aio.caches.base import Cache, Function, digest, storable
from granular.aio.pipeline.data_source import restored
from granular.aio.runtime.lifecycle import Running
from granular.aio.runtime.loop_resources import PerLoop, scope
from granular.errors import GranularError, InvalidArgumentError
from granular.formats.checksums import seal

T = TypeVar('T')

VARIABLE: Final = 'GRANULAR_REDIS_URL'
_DEFAULT: Final = 'redis://localhost:6379/0'
_NAMESPACE: Final = re.compile(r'[^\s:*?\[\]]{1,200}')
_MAGIC: Final = b'grv2'
_HEAD: Final = len(_MAGIC) + 8
_POLL: Final = 0.02  # seconds between two polls for values that other processes are reading
_COUNTERS: Final = ('hits', 'misses', 'waited', 'bypassed', 'damaged', 'not_kept', 'errors')
# Release a lock only if we still own it (it may have expired and been taken over).
_UNLOCK: Final = """
for i, key in ipairs(KEYS) do
    if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
"""


class RedisCache(Cache):
    """Caches a source's values in Redis: each is read from the source once for all machines that use the server.

    ::

        cache = granular.RedisCache(reader, 'redis://cache-host:6379/0', expire=24 * 3600)
        loader = granular.Loader(cache, batch=64)

    A batch is one MGET. If several processes miss a value, one reads it from the source, and the others wait for it up
    to ``wait`` seconds before they read it themselves. A server that fails or is slow costs one ``timeout``: reads then
    bypass it, and it is tried again after ``retry`` seconds. A value that is damaged on the server counts as a miss.

    Keys are ``namespace:fingerprint:index``; no other keys on the server are touched, and nothing is ever flushed. The
    server limits how much is cached (``maxmemory``, with a policy such as ``allkeys-lru``), and ``expire`` for how
    long.

    Args:
      source: any source that a MapDataset accepts.
      url: ``redis://[[user]:password@]host[:port][/database]``, ``rediss://`` for TLS, ``unix://`` for a socket. By
        default the environment variable ``GRANULAR_REDIS_URL``, else ``redis://localhost:6379/0``. A password is never
        shown or pickled: a worker process, or another machine, takes it from that variable, if it names the same
        server.
      transform: a function of each value, or an object with ``map``, that runs at each read, in threads.
      namespace: prefix of all keys.
      fingerprint: identifies the source; must be the same on all machines. By default derived from its stages and its
        length, and from a reader's address, spec, versions and decoders. Functions are identified by their code and the
        values that they hold (defaults, closures, attributes, and global constants), not by other functions that they
        call, nor by global lists, dicts and other objects: choose another ``namespace`` when these change. A list, an
        array or tensor, an object without a ``__repr__`` of its own or with one that is cut (``...``), or files without
        versions (of fsspec, or of web servers that send no ETag), require an explicit fingerprint.
      expire: seconds after which a value is dropped; None for never.
      timeout: seconds that the server may take to answer.
      wait: seconds to wait for a value that another process is reading.
      retry: seconds until a server that failed is tried again.
      pack: converts a value into a cacheable one; see ``SharedMemoryCache``.
      unpack: converts a packed value back.

    Raises:
      MissingExtraError: without redis-py: ``pip install 'granular-stream[redis]'``.
    """

    def __init__(
        self,
        source: Any,
        url: str | None = None,
        transform: Function | None = None,
        *,
        namespace: str = 'granular',
        fingerprint: str | None = None,
        expire: float | None = None,
        timeout: float = 2.0,
        wait: float = 2.0,
        retry: float = 5.0,
        pack: Function | None = None,
        unpack: Function | None = None,
    ) -> None:
        options = {'namespace': namespace, 'expire': expire, 'timeout': timeout, 'wait': wait, 'retry': retry}
        super().__init__(source, transform, pack, unpack, fingerprint, options)
        self._redis = import_extra('redis.asyncio', 'redis')
        self._url = os.environ.get(VARIABLE, _DEFAULT) if url is None else url
        self._public_url, secret = _without_credentials(self._url)
        self._uses_variable = secret or url is None
        for name, value in (('namespace', namespace), ('fingerprint', fingerprint)):
            if value is not None and not (isinstance(value, str) and _NAMESPACE.fullmatch(value)):
                raise InvalidArgumentError(f'{name}: expected text without spaces and :*?[], got {value!r:.100}')
        seconds = (timeout, wait, retry, 1 if expire is None else expire)
        if not all(isinstance(value, numbers.Real) for value in seconds) or not (
            0 < timeout < math.inf and 0 <= wait < math.inf and retry >= 0 and 0.001 <= seconds[-1] < math.inf
        ):
            raise InvalidArgumentError(
                f'expected seconds, got timeout={timeout}, wait={wait}, retry={retry}, expire={expire}'
            )
        self._expire = None if expire is None else round(float(expire) * 1000)
        self._timeout = timeout
        self._wait = wait
        self._retry = retry
        self._namespace = namespace
        make = functools.partial(_Connections, self._redis, self._url, self._public_url, timeout)
        self._connections: PerLoop[_Connections] = PerLoop(make)
        self._down_until = 0.0
        self._failing = False
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._public_url, *self._copy_args(_uses_variable=self._uses_variable))

    @property
    def url(self) -> str:
        """The server's address, without user and password."""
        return self._public_url

    async def _connect(self) -> None:
        if self._print is None:
            self._print = (await self._fingerprint(True)).hex()
        self._prefix = f'{self._namespace}:{self._print}:'
        self._seed = int.from_bytes(digest(self._prefix)[:8], 'big')

    async def _close(self) -> None:
        # Those of other event loops are closed when the cache is dropped, or their loop ends.
        if (connections := await self._connections.peek()) is not None:
            await connections.aclose()

    def stats(self) -> dict[str, int]:
        """Return the counters of this process.

        Returns:
          ``hits``; ``misses``, read from the source; ``waited``, hits that another process was reading; ``bypassed``,
          read from the source because the server was unavailable; ``damaged`` values; ``not_kept``, values that the
          server refused; ``errors`` of the server.
        """
        return dict(self._counts)

    async def _ask(self, request: Callable[[Any], Awaitable[T]]) -> T | None:
        """Return the server's answer, or None if it is unavailable or the cache is closed."""
        if self.closed or time.monotonic() < self._down_until:
            return None
        try:
            async with asyncio.timeout(self._timeout):
                answer = await request(await (await self._connections.get()).begin(self))
        except GranularError:
            raise  # an invalid address, or a closed cache
        except Exception as error:
            # Only the server's answers are handled here, and malformed ones raise errors of many kinds.
            if self.closed:  # meanwhile, by another task
                return None
            self._counts['errors'] += 1
            self._down_until = time.monotonic() + self._retry
            await self._disconnect()
            if not self._failing:
                # Do not log the error's text: it may quote the command, including the password.
                kind = type(error).__name__
                hint = (
                    f' (a password that was not pickled is taken from {VARIABLE})' if 'Authentication' in kind else ''
                )
                logger.warning('%s: %s: Redis cache bypassed for %g s%s', self._public_url, kind, self._retry, hint)
            self._failing = True
            return None
        if self._failing:
            logger.warning('%s: Redis connection restored', self._public_url)
        self._failing = False
        return answer

    async def _disconnect(self) -> None:
        """Close all connections, so that a late answer is not read as the answer to a later request."""
        if (connections := await self._connections.peek()) is not None:
            with contextlib.suppress(Exception):  # the server has already failed
                async with asyncio.timeout(self._timeout):
                    await connections.client.connection_pool.disconnect()

    async def _find(self, indices: Sequence[int]) -> list[Any]:
        await scope()
        keys = [f'{self._prefix}{index}' for index in indices]
        answers = await self._ask(lambda client: _values(client, keys)) if keys else []
        if answers is None:
            return [None] * len(indices)
        records = self._valid_records(indices, answers)
        self._counts['damaged'] += records.count(None) - answers.count(None)
        return records

    def _valid_records(self, indices: Sequence[int], answers: Sequence[bytes | None]) -> list[bytes | None]:
        """Return the valid records of answers, and count them."""
        records = list(map(self._checked, answers, indices))
        self._counts['hits'] += len(records) - records.count(None)
        return records

    async def _fill(self, missing: Sequence[int]) -> Mapping[int, Any]:
        token = secrets.token_hex(8)
        claim = await self._ask(lambda client: self._lock(client, missing, token))
        if claim is None:
            self._counts['bypassed'] += len(missing)
            return await self._read(missing)
        locked, arrived = claim
        records: dict[int, Any] = dict(arrived)
        if locked:
            try:
                if unread := [index for index in locked if index not in arrived]:
                    new = await self._read(unread)
                    await self._ask(lambda client: self._store(client, new))
                    records |= new
                    self._counts['misses'] += len(unread)
            finally:
                names = [self._lock_key(index) for index in locked]
                await self._ask(lambda client: client.eval(_UNLOCK, len(names), *names, token))
        if awaited := [index for index in missing if index not in records]:
            records |= await self._await(awaited)
        if late := [index for index in awaited if index not in records]:
            self._counts['misses'] += len(late)
            records |= await self._read(late)
        return records

    async def _await(self, indices: Sequence[int]) -> dict[int, bytes]:
        """Wait for values that other processes are reading. Returns those that arrive in time."""
        records: dict[int, bytes] = {}
        until = time.monotonic() + self._wait
        waiting = list(indices)
        while waiting and time.monotonic() < until:
            await asyncio.sleep(_POLL)
            keys = [f'{self._prefix}{index}' for index in waiting] + [self._lock_key(index) for index in waiting]
            answers = await self._ask(functools.partial(_values, keys=keys))
            if answers is None:
                break
            still = []
            for index, answer, lock in zip(waiting, answers, answers[len(waiting) :], strict=False):
                if (record := self._checked(answer, index)) is not None:
                    records[index] = record
                elif lock is not None:
                    still.append(index)
            waiting = still
        self._counts['waited'] += len(records)
        return records

    async def _lock(self, client: Any, indices: Sequence[int], token: str) -> tuple[list[int], dict[int, bytes]]:
        """Claim indices for reading. Returns those claimed, and the records that other processes stored meanwhile."""
        # The lock outlasts every waiter's ``wait``, so that a slow reader is not duplicated.
        milliseconds = max(1000, round(self._wait * 2000))
        async with client.pipeline(transaction=False) as pipeline:
            for index in indices:
                pipeline.set(self._lock_key(index), token, nx=True, px=milliseconds)
            pipeline.mget([f'{self._prefix}{index}' for index in indices])
            *locks, answers = await pipeline.execute(raise_on_error=False)
        if isinstance(answers, Exception):
            raise answers
        records = self._valid_records(indices, _checked_values(answers, len(indices)))
        # A full server refuses to lock. Its error is truthy, so that we read the value ourselves.
        locked = [index for index, lock in zip(indices, locks, strict=True) if lock]
        return locked, {index: record for index, record in zip(indices, records, strict=True) if record is not None}

    async def _store(self, client: Any, records: Mapping[int, Any]) -> None:
        async with client.pipeline(transaction=False) as pipeline:
            for index, record in storable(records):
                framed = _MAGIC + self._seal(record, index) + record
                pipeline.set(f'{self._prefix}{index}', framed, px=self._expire)
            answers = await pipeline.execute(raise_on_error=False)
        self._counts['not_kept'] += sum(isinstance(answer, Exception) for answer in answers)

    def _lock_key(self, index: int) -> str:
        return f'{self._prefix}{index}:lock'

    def _checked(self, answer: bytes | None, index: int) -> bytes | None:
        """Return the record if it was written for this source and index and is undamaged, else None."""
        if answer is None:
            return None
        record = answer[_HEAD:]
        return record if answer[:_HEAD] == _MAGIC + self._seal(record, index) else None

    def _seal(self, record: bytes, index: int) -> bytes:
        """Return a checksum of the record's bytes and of the fingerprint and index in its key."""
        half = len(record) // 2
        number = index.to_bytes(8, 'little')
        return seal(seal(self._seed, number, number), record[:half], record[half:]).to_bytes(8, 'little')


class _Connections(Running):
    """Connections to the server under one event loop, closed with their cache, or with the loop."""

    def __init__(self, redis: Any, url: str, public_url: str, seconds: float) -> None:
        super().__init__()
        backoff = import_extra('redis.backoff', 'redis').NoBackoff()
        # No retries: after a failure, values are read from the source at once.
        no_retry = import_extra('redis.asyncio.retry', 'redis').Retry(backoff, 0)
        try:
            self.client = redis.from_url(url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=no_retry)
        except ValueError:
            raise InvalidArgumentError(f'{public_url}: is not an address that redis-py supports') from None

    async def begin(self, cache: RedisCache) -> Any:
        """Return the client, which is closed once the cache is dropped."""
        if self._loop is None:
            self.close_with(cache)
            await self.settle()
        return self.client

    async def _close(self) -> None:
        await self.client.aclose()


async def _values(client: Any, keys: Sequence[str]) -> list[bytes | None]:
    return _checked_values(await client.mget(keys), len(keys))


def _checked_values(answers: Any, count: int) -> list[bytes | None]:
    """Return the answer to an MGET if it is a list of ``count`` values; any error is one of the server."""
    if type(answers) is not list or len(answers) != count:
        raise ValueError(f'expected a list of {count} values')
    if not all(answer is None or type(answer) is bytes for answer in answers):
        raise ValueError('expected bytes or nothing for each key')
    return answers


def _without_credentials(url: str) -> tuple[str, bool]:
    """Return an address without its user and password, and whether it had them."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except (ValueError, AttributeError, TypeError):  # of what is no text
        raise InvalidArgumentError('url: expected an address such as redis://host:port/database') from None
    if parts.scheme not in ('redis', 'rediss', 'unix'):
        raise InvalidArgumentError(f'url: expected redis://, rediss:// or unix://, got the scheme {parts.scheme!r:.40}')
    query = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
    public = [(name, value) for name, value in query if name not in ('username', 'password')]
    host = parts.netloc.rpartition('@')[2]
    secret = '@' in parts.netloc or len(public) != len(query)
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, urllib.parse.urlencode(public), '')), secret


def _again(
    url: str, kind: type[RedisCache], args: tuple[Any], options: Mapping[str, Any], attributes: Mapping[str, Any]
) -> RedisCache:
    """Unpickle a cache, with the password that is available in this process."""
    variable = os.environ.get(VARIABLE)
    if attributes['_uses_variable'] and variable is not None and _without_credentials(variable)[0] == url:
        url = variable
    return restored(kind, args, {**options, 'url': url}, attributes)
