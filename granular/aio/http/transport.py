"""The hot path: plain GET requests for byte ranges, with limits, retries and a check of every reply."""

import asyncio
import datetime
import logging
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Literal, NamedTuple, TypeVar

from granular._redact import hidden
from granular.aio.http.buffers import Space
from granular.aio.http.connection import Sink
from granular.aio.http.digests import check_said, digest, etag_md5
from granular.aio.http.download import Download, coding_of
from granular.aio.http.limits import Budget, Limit, Pauses
from granular.aio.http.messages import Head, ProtocolError, Target, http_date, shown
from granular.aio.http.pool import Pool
from granular.aio.http.reply import Reply, changed, counters
from granular.config import IOConfig, MiB
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    GranularError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
    StoreTimeoutError,
)

logger = logging.getLogger('granular')

RETRIED: Final = frozenset((408, 429, 500, 502, 503, 504))
_EXPIRED: Final = frozenset(('ExpiredToken', 'ExpiredTokenException', 'TokenRefreshRequired', 'InvalidToken'))
# S3 sends these codes with status 400 for a body that arrived damaged or too late.
_DAMAGED: Final = frozenset(('BadDigest', 'IncompleteBody', 'RequestTimeout', 'XAmzContentChecksumMismatch'))
_PATIENT: Final = 3  # the attempt from which on failures are logged as warnings
_REDIRECTS: Final = 10
_THROTTLED: Final = 0.5  # maximum seconds before the first retry after throttling
_REMEMBERED: Final = 65536
_CODE: Final = re.compile(rb'<Code>(\w+)</Code>')


Prepare = Callable[[], Awaitable[Target]]
"""Returns the URL and signed headers of an object at the time when its request is sent."""

RecoverableKind = Literal['expired', 'region', 'skewed']
"""A recoverable request error reported by the store: expired credentials, wrong region, or clock skew."""

Recover = Callable[[RecoverableKind, str], Awaitable[bool]]
"""Called with a recoverable error and the region or time that the store reports; returns whether to try again."""

T = TypeVar('T')


class Outgoing(NamedTuple):
    """A request other than a range read. It is created anew for every attempt, so that its signature is fresh.

    Attributes:
      target: the server, the path with its query, and the signed headers.
      method: the HTTP method.
      body: the body; the transport adds its Content-Length.
    """

    target: Target
    method: str
    body: bytes | memoryview = b''


class Answer(NamedTuple):
    """The reply to a request: its head, its whole body, and its URL after all redirects."""

    head: Head
    body: bytes
    url: str = ''


class _Collector(Sink):
    """Collects the body of a reply, up to a limit; the end of the body must be recognisable."""

    def __init__(self, name: str, bodiless: bool, limit: int) -> None:
        self._name, self._bodiless, self._limit = name, bodiless, limit
        self.body = bytearray()

    def place(self, head: Head) -> memoryview | int:
        if head.status >= 300:
            return super().place(head)
        framed = head.length is not None or 'transfer-encoding' in head.headers
        if not framed and not self._bodiless and head.status != 204:
            # The body ends with the connection, so a truncated one could not be recognised.
            raise BadReplyError(f'{self._name}: status {head.status} without a length, by which to tell its end')
        coding = coding_of(head.headers.get('content-encoding', ''))
        if coding and not self._bodiless:
            raise BadReplyError(f'{self._name}: status {head.status} with Content-Encoding {shown(coding)}')
        if (head.length or 0) > self._limit and not self._bodiless:
            raise BadReplyError(f'{self._name}: the answer has {head.length} bytes, more than {self._limit}')
        return self._limit + 1


class Transport:
    """The connections to a store and their limits, under one event loop.

    Args:
      config: the settings.
      version_header: the reply header that identifies the version of an object.
      bucket: True if each object has a version, and redirects are not followed because requests are signed.
      tls_verify: whether to verify certificates, or the file of the CA bundle to trust.
    """

    def __init__(self, config: IOConfig, version_header: str, bucket: bool, tls_verify: bool | str = True) -> None:
        self._config = config
        self._version_header = version_header.lower()
        self._bucket = bucket
        self._limit = Limit(config.concurrency, config.memory)
        self._budget = Budget()
        self._pauses = Pauses()
        self._etags_are_md5: bool | None = None  # for objects that may have such ETags; None until known
        self._stored: dict[tuple[str, str], str] = {}  # the coding that a version of an object is stored with
        self.pool = Pool(config, tls_verify)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.pool.aclose()

    async def read(
        self,
        prepare: Prepare,
        recover: Recover,
        name: str,
        start: int,
        stop: int | None,
        version: str | None,
        into: Space | None = None,
    ) -> Reply:
        """Read one byte range of an object.

        Args:
          prepare: returns URL and headers.
          mend: obtains new credentials, the right region, or the time.
          name: the object, for errors.
          start: the first byte, or, if negative, the number of bytes from the object's end.
          stop: the position after the last byte; None for the object's end.
          version: the version that the reply must have; None for any.
          into: memory for exactly the requested bytes, to use instead of newly allocated memory.

        Raises:
          OutOfRangeError: if the object ends before ``stop``, or before ``start``.
          ObjectChangedError: if the reply is of another version.
          NotFoundError, AccessDeniedError, StoreError: for errors that the store reports.
        """
        download = Download(name, start, stop, version, self._version_header, into, self._bucket)
        weight = -start if start < 0 else (1 << 20 if stop is None else stop - start)

        async def attempt() -> Reply:
            target = await _prepared(prepare)
            try:
                head, _ = await self._follow(target, 'GET', download, download.range())
                if download.is_doubtful(head):
                    head, _ = await self._follow(target, 'GET', download, download.everything())
                reply = download.take(head)
                if reply is not None and (download.unproven or len(download.content(reply)) == reply.size):
                    await self._prove(target, download, head, reply, name)
            except (ProtocolError, BadReplyError):
                download.restart()  # the received bytes cannot be trusted
                raise
            except ObjectChangedError as error:
                download.restart()
                raise _DoubtfulError(error) from None
            if reply is None:
                raise _refusal(head, download, name)
            self._limit.succeeded(time.monotonic())
            return reply

        reply = await self._retry(attempt, recover, name, weight, download)
        counters.bytes += len(reply.data) if into is None else len(into.view)
        return reply

    async def _prove(self, target: Target, download: Download, head: Head, reply: Reply, name: str) -> None:
        """Verify what a reply leaves open: its coding and length, and the checksum of a whole object.

        Raises:
          BadReplyError: if the object differs.
        """
        data = download.content(reply)
        complete = len(data) == reply.size and head.status != 416
        checked = complete and await check_said(head.headers, data, name, download.ranged)
        if download.unproven and not checked:
            await self._prove_stored(target, download, reply, name)
        expected = etag_md5(head.headers) if complete and not checked else None
        if expected is None:
            return
        computed = (await digest('md5', data)).hex()
        if computed == expected:
            self._etags_are_md5 = True
            return
        if self._etags_are_md5 is None and await self._brings_again(target, reply, computed, name):
            self._etags_are_md5 = False  # the ETags of this store are not MD5s
        if self._etags_are_md5 is not False:
            raise BadReplyError(f'{name}: {len(data)} bytes came with MD5 {computed}, the ETag says {expected}')

    async def _brings_again(self, target: Target, reply: Reply, md5: str, name: str) -> bool:
        """Return whether the whole object, requested in two halves, has the same bytes, by their MD5."""
        if not reply.size:
            single = self._beside(name, reply, 0, 1)
            head, _ = await self._follow(target, 'GET', single, single.range())
            return head.status == 416
        middle, pieces = reply.size // 2, []
        for start, stop in ((0, middle), (middle, reply.size)):
            if start < stop:
                half = self._beside(name, reply, start, stop)
                head, _ = await self._follow(target, 'GET', half, half.range())
                piece = half.take(head)
                if piece is None:
                    raise _refusal(head, half, name)
                if piece.size != reply.size:
                    return False
                pieces.append(piece.data)
        return (await digest('md5', b''.join(pieces))).hex() == md5

    async def _prove_stored(self, target: Target, download: Download, reply: Reply, name: str) -> None:
        """Verify that an object is stored with the Content-Encoding, or the length, that a reply has.

        Data compressed in transit carries the same header as data stored compressed, and may have the length of the
        range by chance. Its last byte, requested alone, is one byte with the same header only if it is stored so: no
        compression turns one byte into one byte.
        """
        coding, place = download.coding, (name, reply.version or '')
        if coding and self._stored.get(place) == coding:
            return
        data = download.content(reply)
        last = max(0, reply.start + len(data) - 1)
        single = self._beside(name, reply, last, last + 1)
        head, _ = await self._follow(target, 'GET', single, single.range())
        if head.status == 206:
            byte = single.take(head)
            if byte is not None and (byte.size, byte.data, single.coding) == (reply.size, bytes(data[-1:]), coding):
                if coding and reply.version is not None:
                    if len(self._stored) >= _REMEMBERED:
                        self._stored.clear()
                    self._stored[place] = coding
                return
        elif head.status == 416 and not data:
            return
        elif head.status != 200:
            raise _refusal(head, single, name)
        elif not self._bucket and not coding:
            return  # a server without ranges
        what = f'with Content-Encoding {coding[:80]}' if coding else 'without a length'
        raise BadReplyError(f'{name}: {len(data)} bytes came {what}, but the object is not stored so')

    def _beside(self, name: str, reply: Reply, start: int, stop: int) -> Download:
        """Return a download of a range of the object that a reply is of."""
        return Download(name, start, stop, reply.version, self._version_header, None, self._bucket)

    async def call(
        self,
        make: Callable[[], Awaitable[Outgoing]],
        recover: Recover,
        name: str,
        check: Callable[[Answer], T],
        *,
        statuses: Collection[int] = (200,),
        limit: int = 64 * MiB,
    ) -> T:
        """Send a request other than a range read, with the limits, timeouts and retries of reads. It is never hedged.

        A request whose reply is lost is sent again although the store may have executed it: the caller interprets the
        reply to the second one, such as that the object exists already. Redirects are followed as for reads: not from a
        bucket, and not with a body.

        Args:
          make: returns the request, anew for each attempt.
          mend: obtains new credentials, the right region, or the time.
          name: the object, for errors.
          check: returns the result of an answer, and raises BadReplyError for one that does not answer the request.
          statuses: the statuses passed to ``check``; others raise the same errors as for reads.
          limit: maximum bytes of the answer's body.

        Raises:
          BadReplyError: if two answers do not answer the request.
          NotFoundError, AccessDeniedError, StoreError: for errors that the store reports.
        """

        async def attempt() -> T:
            target, method, body = await _prepared(make)
            length = f'Content-Length: {len(body)}\r\n' if body or method in ('PUT', 'POST') else ''
            sink = _Collector(name, method == 'HEAD', limit)
            head, target = await self._follow(target, method, sink, length, body, hedged=False)
            if head.status not in statuses:
                raise _refusal(head, sink, name)
            if len(sink.body) > limit:
                raise BadReplyError(f'{name}: the answer has more than {limit} bytes')
            result = check(Answer(head, bytes(sink.body), target.url))
            self._limit.succeeded(time.monotonic())
            return result

        return await self._retry(attempt, recover, name, min(limit, MiB))

    async def _follow(
        self,
        target: Target,
        method: str,
        sink: Sink,
        more: str,
        body: bytes | memoryview = b'',
        hedged: bool = True,
    ) -> tuple[Head, Target]:
        """Send a request and follow permitted redirects. Returns the head of the reply, and the target that sent it."""
        for _ in range(_REDIRECTS):
            request = target.request(method, more)
            head = await self.pool.exchange(target, request, sink, method == 'HEAD', body, hedged)
            if self._bucket or body or head.status not in (301, 302, 303, 307, 308) or 'location' not in head.headers:
                return head, target
            target = target.follow(head.headers['location'])
        raise BadReplyError(f'{hidden(target.url)}: more than {_REDIRECTS} redirections')

    async def _retry(
        self,
        attempt: Callable[[], Awaitable[T]],
        recover: Recover,
        name: str,
        weight: int,
        download: Download | None = None,
    ) -> T:
        """Retry until an attempt succeeds, the error is permanent, or the attempts or the time are used up.

        An attempt of a download that made progress uses up neither: it renews the attempts, and also the time if the
        bytes gained since the last renewal came at the minimum rate. So the number of such attempts is bounded by the
        size of the download, and a download that gains next to nothing ends.
        """
        config, tries, sent, wrong, began, paid = self._config, 0, 0, 0, time.monotonic(), 1.0
        renewed, gained = began, 0  # time of the last renewal, and bytes gained since
        recovered: set[RecoverableKind] = set()
        while True:
            tries += 1
            sent += 1
            ground = throttled = False
            counters.requests += 1
            base, least, permitted, cost = config.backoff, 0.0, config.attempts, 5.0
            error: StoreError
            cause: Exception | None
            held = await self._limit.acquire(weight)
            counters.in_flight += 1
            try:
                result = await attempt()
                self._budget.give(paid)
                self._pauses.succeeded()
                return result
            except (ProtocolError, BadReplyError) as bad:
                # Retry once, on another connection: a store that answers wrongly twice will not improve. The error may
                # quote a header of the request that the server repeats, so it is redacted.
                error = BadReplyError(hidden(f'{bad}' if isinstance(bad, BadReplyError) else f'{name}: {bad}'))
                wrong += 1
                cause, permitted = None, permitted if wrong < 2 else tries
            except _DoubtfulError as doubtful:
                error, cause = doubtful.error, None
                wrong += 1
                permitted = permitted if wrong < 2 else tries
            except _AilingError as ailing:
                if ailing.what in recovered or not await recover(ailing.what, ailing.said):
                    raise ailing.error from None
                recovered.add(ailing.what)
                counters.retries += 1
                continue
            except GranularError:
                raise
            except _RetryableError as again:
                error, cause, least = again.error, None, min(again.after, config.backoff_cap)
                if again.throttled and self._limit.throttled(time.monotonic()):
                    self.pool.throttled()
                    base, throttled = max(base, _THROTTLED), True
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
            now = time.monotonic()
            if download is not None and (more := download.gained()):
                ground, tries, gained = True, 1, gained + more
                if gained >= config.min_rate * (now - renewed):
                    renewed, gained = now, 0
            wait = max(least, random.uniform(0, min(config.backoff_cap, base * 2 ** (tries - 1))))
            if tries >= permitted or now - renewed + wait > config.retry_time:
                error.add_note(f'gave up after {sent} attempts in {now - began:.1f} s')
                raise error from cause
            counters.retries += 1
            # Occasional failures are normal for a bucket: warn only from the third consecutive one on.
            level = logging.INFO if tries < _PATIENT else logging.WARNING
            logger.log(level, 'attempt %d failed, once more in %.2f s: %s', sent, wait, error)
            if ground:
                tries = 0  # take no token: an attempt that makes progress does not burden a failing store
            else:
                try:
                    async with asyncio.timeout(config.retry_time - (now - renewed)):
                        await self._budget.take(cost)
                except TimeoutError:
                    error.add_note(f'gave up after {sent} attempts in {time.monotonic() - began:.1f} s: too many fail')
                    raise error from cause
                paid = cost
            await asyncio.sleep(wait if not throttled else least)
            if throttled and await self._pauses.wait(wait - least):
                tries -= 1  # woken early, since the store answers again


class _AilingError(Exception):
    """A reply that reports a recoverable error of the request."""

    def __init__(self, error: GranularError, what: RecoverableKind, said: str = '') -> None:
        super().__init__(str(error))
        self.error, self.what, self.said = error, what, said


class _DoubtfulError(Exception):
    """A reply of another version, which may be the late reply to another request: retry on another connection."""

    def __init__(self, error: ObjectChangedError) -> None:
        super().__init__(str(error))
        self.error = error


class _RetryableError(Exception):
    """A reply after which the request is retried."""

    def __init__(self, error: StoreError, throttled: bool, after: float) -> None:
        super().__init__(str(error))
        self.error, self.throttled, self.after = error, throttled, after


async def _prepared(prepare: Callable[[], Awaitable[T]]) -> T:
    try:
        return await prepare()
    except StoreError as error:
        # The provider of the credentials may fail temporarily, as the store may.
        raise _RetryableError(error, throttled=False, after=0.0) from error


def _refusal(head: Head, sink: Sink, name: str) -> Exception:
    """Return the error for a reply that is neither a success nor about ranges."""
    status, body = head.status, bytes(sink.body)
    code = _CODE.search(body)
    said = hidden(code[1].decode()[:80] if code else _text(body) or _text(head.reason.encode()))
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
    region = head.headers.get('x-amz-bucket-region', '')[:40]
    if status in (301, 307, 400) and region:
        where = f'{name}: the bucket is in region {region} (status {status}, {said}): pass region={region!r}'
        return _AilingError(StoreError(where), 'region', region)
    error = StoreError(f'{name}: status {status}, {said}')
    if status not in RETRIED and said not in _DAMAGED:
        return error
    return _RetryableError(error, throttled=status in (429, 503), after=_after(head))


def _after(head: Head) -> float:
    """Return the seconds to wait that a reply asks for; 0 if it states none that can be parsed."""
    said = head.headers.get('retry-after', '')
    if said.isdecimal():
        return float(said[:9])
    until, now = http_date(said), http_date(head.headers.get('date', '')) or datetime.datetime.now(datetime.UTC)
    return 0.0 if until is None else max(0.0, (until - now).total_seconds())


def _text(body: bytes) -> str:
    # Servers may quote the request.
    return ' '.join(hidden(body.decode(errors='replace')).split())[:200]
