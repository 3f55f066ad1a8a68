"""The hot path: bare GETs of byte ranges, with limits, retries and a check of every reply."""

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, TypeVar

from granular.aio.digests import check_whole
from granular.aio.download import Download
from granular.aio.http1 import Head, ProtocolError, Target
from granular.aio.limit import Budget, Limit
from granular.aio.memory import Space
from granular.aio.pool import Pool
from granular.aio.reply import Reply, changed, counters
from granular.aio.wire import Sink
from granular.config import IOConfig
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    GranularError,
    NotFoundError,
    StoreError,
    StoreTimeoutError,
)
from granular.hiding import hidden

logger = logging.getLogger('granular')

RETRIED: Final = frozenset((408, 429, 500, 502, 503, 504))
_EXPIRED: Final = frozenset(('ExpiredToken', 'ExpiredTokenException', 'TokenRefreshRequired', 'InvalidToken'))
_PATIENT: Final = 3  # attempts that fail in silence
_REDIRECTS: Final = 10
_CODE: Final = re.compile(rb'<Code>(\w+)</Code>')


Prepare = Callable[[], Awaitable[Target]]
"""Gives the address and the signed headers of an object at the time that its request is sent."""

Ail = Literal['expired', 'region', 'skewed']
"""What a store says of a request that a better one would not suffer: of its credentials, region or clock."""

Mend = Callable[[Ail, str], Awaitable[bool]]
"""Called with what a store says, and the region or time that it says: whether another try is worth it."""

T = TypeVar('T')


class Transport:
    """The connections to a store and their limits, under one event loop.

    Args:
      config: the knobs.
      version_header: the reply header that tells one version of an object from the next.
      bucket: whether each object has a version, and no Location header is followed, as requests are signed.
      tls_verify: whether servers must be who they say, or the file of the authorities that say so.
    """

    def __init__(self, config: IOConfig, version_header: str, bucket: bool, tls_verify: bool | str = True) -> None:
        self._config = config
        self._version_header = version_header.lower()
        self._bucket = bucket
        self._limit = Limit(config.concurrency, config.memory)
        self._budget = Budget()
        self.pool = Pool(config, tls_verify)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.pool.aclose()

    async def read(
        self,
        prepare: Prepare,
        mend: Mend,
        name: str,
        start: int,
        stop: int | None,
        version: str | None,
        into: Space | None = None,
    ) -> Reply:
        """One byte range of an object.

        Args:
          prepare: gives address and headers.
          mend: finds new credentials, the right region, or the time.
          name: the object, for errors.
          start: the first byte, or, if negative, how many bytes of the object's end.
          stop: behind the last byte; None for all that follows.
          version: what the reply's version must be; None for any.
          into: memory for exactly the bytes asked for, to use instead of the reply's own.

        Raises:
          OutOfRangeError: if the object ends before ``stop``, or before ``start``.
          ObjectChangedError: if the reply is of another version.
          NotFoundError, AccessDeniedError, StoreError: for what the store says.
        """
        download = Download(name, start, stop, version, self._version_header, into, self._bucket)
        weight = -start if start < 0 else (1 << 20 if stop is None else stop - start)

        async def attempt() -> Reply:
            target = await _prepared(prepare)
            try:
                head = await self._exchange(target, 'GET', download, download.range())
                if download.is_doubtful(head):
                    head = await self._exchange(target, 'GET', download, '')
                reply = download.take(head)
                if reply is not None and download.whole:
                    await check_whole(head.headers, reply.data, name)
            except (ProtocolError, BadReplyError):
                download.restart()  # nothing of what came can be relied on
                raise
            if reply is None:
                raise _refusal(head, download, name)
            self._limit.succeeded(time.monotonic())
            return reply

        reply = await self._retry(attempt, mend, name, weight)
        counters.bytes += len(reply.data) if into is None else len(into.view)
        return reply

    async def head(self, prepare: Prepare, mend: Mend, name: str) -> Mapping[str, str]:
        """The headers of an object, their names in lower case."""

        async def attempt() -> Mapping[str, str]:
            sink = Sink()
            head = await self._exchange(await _prepared(prepare), 'HEAD', sink, '')
            if head.status != 200:
                raise _refusal(head, sink, name)
            return head.headers

        return await self._retry(attempt, mend, name, 0)

    async def _exchange(self, target: Target, method: str, sink: Sink, more: str) -> Head:
        for _ in range(_REDIRECTS):
            head = await self.pool.exchange(target, target.request(method, more), sink, method == 'HEAD')
            if self._bucket or head.status not in (301, 302, 303, 307, 308) or 'location' not in head.headers:
                return head
            target = target.follow(head.headers['location'])
        raise BadReplyError(f'{hidden(target.url)}: more than {_REDIRECTS} redirections')

    async def _retry(self, attempt: Callable[[], Awaitable[T]], mend: Mend, name: str, weight: int) -> T:
        """Try until it works, the error is permanent, or the attempts or the time are used up."""
        config, tries, wrong, began, paid = self._config, 0, 0, time.monotonic(), 1.0
        mended: set[Ail] = set()
        while True:
            tries += 1
            counters.requests += 1
            base, least, permitted, cost = config.backoff, 0.0, config.attempts, 5.0
            error: StoreError
            cause: Exception | None
            held = await self._limit.acquire(weight)
            counters.in_flight += 1
            try:
                result = await attempt()
                self._budget.give(paid)
                return result
            except (ProtocolError, BadReplyError) as bad:
                # Once more, on another connection; a store that answers wrongly twice will not do better.
                # It may quote a header of the request that the server repeats.
                error = BadReplyError(hidden(f'{bad}' if isinstance(bad, BadReplyError) else f'{name}: {bad}'))
                wrong += 1
                cause, permitted = None, permitted if wrong < 2 else tries
            except _AilingError as ailing:
                if ailing.what in mended or not await mend(ailing.what, ailing.said):
                    raise ailing.error from None
                mended.add(ailing.what)
                counters.retries += 1
                continue
            except GranularError:
                raise
            except _RetryableError as again:
                error, cause, least = again.error, None, again.after
                if again.throttled and self._limit.throttled(time.monotonic()):
                    self.pool.throttled()
                    base = max(base, 1.0)
            except ssl.SSLCertVerificationError as permanent:
                raise StoreError(f'{name}: {permanent}') from permanent
            except TimeoutError as late:
                error, cause = StoreTimeoutError(f'{name}: no answer: {late or type(late).__name__}'), late
                cost = 10.0
            except OSError as failed:
                error, cause = StoreError(f'{name}: {type(failed).__name__}: {failed}'), failed
            finally:
                counters.in_flight -= 1
                self._limit.release(held)
            wait = max(least, random.uniform(0, min(config.backoff_cap, base * 2 ** (tries - 1))))
            spent = time.monotonic() - began
            if tries >= permitted or spent + wait > config.retry_time:
                error.add_note(f'gave up after {tries} attempts in {spent:.1f} s')
                raise error from cause
            counters.retries += 1
            # One failure in a while is a bucket's everyday life; several in a row are news.
            level = logging.INFO if tries < _PATIENT else logging.WARNING
            logger.log(level, 'attempt %d failed, once more in %.2f s: %s', tries, wait, error)
            try:
                async with asyncio.timeout(config.retry_time - spent):
                    await self._budget.take(cost)
            except TimeoutError:
                error.add_note(f'gave up after {tries} attempts in {time.monotonic() - began:.1f} s: too many fail')
                raise error from cause
            paid = cost
            await asyncio.sleep(wait)


class _AilingError(Exception):
    """A reply that says what is wrong with a request, so that a better one may be made."""

    def __init__(self, error: GranularError, what: Ail, said: str = '') -> None:
        super().__init__(str(error))
        self.error, self.what, self.said = error, what, said


class _RetryableError(Exception):
    """A reply after which a request is worth another try."""

    def __init__(self, error: StoreError, throttled: bool, after: float) -> None:
        super().__init__(str(error))
        self.error, self.throttled, self.after = error, throttled, after


async def _prepared(prepare: Prepare) -> Target:
    try:
        return await prepare()
    except StoreError as error:
        # Who gives the credentials may be out for a while, as the store may.
        raise _RetryableError(error, throttled=False, after=0.0) from error


def _refusal(head: Head, sink: Sink, name: str) -> Exception:
    """What a reply means that is neither success nor a matter of ranges."""
    status, body = head.status, bytes(sink.body)
    code = _CODE.search(body)
    said = hidden(code[1].decode() if code else _text(body) or head.reason)
    if status in (404, 410):
        what = 'no such bucket' if 'NoSuchBucket' in said else 'no such object'
        return NotFoundError(f'{name}: {what} (status {status})')
    if status in (401, 403) or said in _EXPIRED:
        denied = AccessDeniedError(
            f'{name}: access denied (status {status}, {said}): check the credentials and their right to read it, '
            f'or pass anon=True for a public bucket'
        )
        if said == 'RequestTimeTooSkewed':
            return _AilingError(denied, 'skewed', head.headers.get('date', ''))
        return _AilingError(denied, 'expired') if status == 401 or said in _EXPIRED else denied
    if status == 412:
        return changed(name, 'asked for', None)
    region = head.headers.get('x-amz-bucket-region')
    if status in (301, 307, 400) and region:
        where = f'{name}: the bucket is in region {region} (status {status}, {said}): pass region={region!r}'
        return _AilingError(StoreError(where), 'region', region)
    error = StoreError(f'{name}: status {status}, {said}')
    if status not in RETRIED:
        return error
    after = head.headers.get('retry-after', '')
    return _RetryableError(error, throttled=status in (429, 503), after=float(after) if after.isdecimal() else 0.0)


def _text(body: bytes) -> str:
    # Servers quote what they were asked.
    return ' '.join(hidden(body.decode(errors='replace')).split())[:200]
