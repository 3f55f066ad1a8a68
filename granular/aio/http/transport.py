"""Requests to a store with limits, retries and a check of every reply: range reads, one or many, and any other."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NamedTuple, Protocol, TypeVar

from granular._support.redact import hidden
from granular._support.text import logger
from granular.aio.http.connection import Exchange, StaleError
from granular.aio.http.download import Download, Versions, coding_of
from granular.aio.http.messages import Head, ProtocolError, Target, shown
from granular.aio.http.pool import Pool
from granular.aio.http.refusals import DoubtfulError, RecoverableKind, RetryableError, refusal
from granular.aio.http.reply import Reply
from granular.aio.http.retry import Attempts, Recover, Traffic
from granular.aio.http.verification import Verifier
from granular.config import IOConfig, MiB
from granular.errors import BadReplyError, ObjectChangedError, StoreError
from granular.metrics import counters

_REDIRECTS: Final = 10
_ASKED_FOR: Final = 5.0  # seconds

T = TypeVar('T')


class Provider(Protocol):
    """Provides the signed requests of a store's objects."""

    def ready(self, key: str) -> Target | None:
        """Return the target of an object if it is signed already and can be used now, else None."""

    async def prepare(self, key: str) -> Target:
        """Return the target of an object, signed if necessary."""

    async def recover(self, kind: RecoverableKind, detail: str) -> bool:
        """Obtain new credentials, the right region, or the time. Return whether to try again."""


class Outgoing(NamedTuple):
    """A request other than a range read, without its Content-Length; each attempt signs it anew."""

    target: Target
    method: str
    body: bytes | memoryview = b''


class Answer(NamedTuple):
    """The reply to a request: its head, its whole body, and its URL after all redirects."""

    head: Head
    body: bytes
    url: str = ''


class _Collector(Exchange):
    """Collects the body of a reply, up to a limit; the end of the body must be recognisable."""

    def __init__(self, name: str, outgoing: Outgoing, limit: int) -> None:
        super().__init__()
        self.bodiless = outgoing.method == 'HEAD'
        self.body = outgoing.body
        self.hedged = False
        self._name, self._limit = name, limit
        self.collected = bytearray()

    def place(self, head: Head) -> memoryview | int:
        if head.status >= 300 or self.bodiless:
            return super().place(head)
        if head.length is None and 'transfer-encoding' not in head.headers and head.status != 204:
            # The body ends with the connection, so a truncated one could not be recognised.
            raise BadReplyError(f'{self._name}: status {head.status} without a length, by which to tell its end')
        if coding := coding_of(head.headers.get('content-encoding', '')):
            raise BadReplyError(f'{self._name}: status {head.status} with Content-Encoding {shown(coding)}')
        if (head.length or 0) > self._limit:
            raise BadReplyError(f'{self._name}: the answer has {head.length} bytes, more than {self._limit}')
        return self._limit + 1


class Transport:
    """The connections to a store and their limits, under one event loop.

    ``root`` is the address of the store, without a key, for metrics. In a ``bucket``, each object has a version, and
    redirects are not followed because requests are signed.
    """

    def __init__(
        self, config: IOConfig, root: str, version_header: str, bucket: bool, tls_verify: bool | str = True
    ) -> None:
        self.versions: Versions = Versions(version_header, bucket)
        self._metrics = metrics = counters.store(root)
        self.pool: Pool = Pool(config, metrics, tls_verify)
        self.traffic: Traffic = Traffic(config, metrics, self.pool.throttled, self.pool.has_replied, self._ask)
        # The last two objects, or lists of them, that were read.
        self._read: tuple[Target | None, Target | None] = (None, None)
        self._verifier = Verifier(self._send_read, self.versions)

    async def aclose(self) -> None:
        await self.pool.aclose()

    async def read(self, provider: Provider, download: Download, first: Head | Exception | None = None) -> Reply:
        """Read one byte range of an object; ``first`` is the outcome of a first attempt, if one was made: the head of a
        reply to be looked at, or the error.

        Raises:
          OutOfRangeError: if the object ends before the range does, or before it starts.
          ObjectChangedError: if the reply is of another version.
          NotFoundError, AccessDeniedError, StoreError: for errors that the store reports.
        """

        async def attempt() -> Reply:
            nonlocal first
            outcome, first = first, None
            try:
                if isinstance(outcome, Exception) and not isinstance(outcome, StaleError):
                    raise outcome
                if isinstance(outcome, Head):
                    target = download.target
                    head, _ = await self._follow(target, 'GET', download, download.range, outcome)
                else:
                    target = await _prepared(lambda: provider.prepare(download.key))
                    head, _ = await self._follow(target, 'GET', download, download.range)
                if download.is_doubtful(head):
                    head, _ = await self._follow(target, 'GET', download, download.everything)
                reply = download.take(head)
                if reply is not None and (download.unproven or len(download.content(reply)) == reply.size):
                    await self._verifier.verify(target, download, head, reply)
            except (ProtocolError, BadReplyError):
                download.restart()  # the received bytes cannot be trusted
                raise
            except ObjectChangedError as error:
                download.restart()
                raise DoubtfulError(error) from None
            finally:
                del outcome  # an error refers to this frame once it is raised
            if reply is None:
                raise refusal(head, download.collected, download.name)
            return reply

        has_slot, download.has_slot = download.has_slot, False
        attempts = Attempts(self.traffic, provider.recover, download.name, download)
        reply = await attempts.run(attempt, download.weight, has_slot)
        self._metrics.bytes += len(download.content(reply))
        self.note_read(download.target)
        download.data, download.version = reply.data, reply.version
        return reply

    async def call(
        self,
        make: Callable[[], Awaitable[Outgoing]],
        recover: Recover,
        name: str,
        check: Callable[[Answer], T],
        *,
        statuses: Collection[int] = (200,),
        limit: int = 64 * MiB,
        follow: bool = True,
    ) -> T:
        """Send a request other than a range read, with the limits, timeouts and retries of reads. It is never hedged.

        A request whose reply is lost is sent again although the store may have executed it: the caller interprets the
        reply to the second one, such as that the object exists already. Redirects are followed as for reads: not from a
        bucket, and not with a body.

        Args:
          make: returns the request, anew for each attempt.
          check: returns the result of an answer, and raises BadReplyError for one that does not answer the request.
          statuses: the statuses passed to ``check``; others raise the same errors as for reads.
          limit: maximum bytes of the answer's body.
          follow: False to take a redirection as the answer, if its status is one of ``statuses``.
        """

        async def attempt() -> T:
            return await self.send(await _prepared(make), name, check, statuses=statuses, limit=limit, follow=follow)

        return await Attempts(self.traffic, recover, name).run(attempt, min(limit, MiB))

    async def send(
        self,
        outgoing: Outgoing,
        name: str,
        check: Callable[[Answer], T],
        *,
        statuses: Collection[int] = (200,),
        limit: int = MiB,
        follow: bool = True,
    ) -> T:
        """Send a request once, as part of an attempt of ``call`` or ``read``, which retries it."""
        length = len(outgoing.body)
        line = f'Content-Length: {length}\r\n' if length or outgoing.method in ('PUT', 'POST') else ''
        collector = _Collector(name, outgoing, limit)
        head, target = await self._follow(outgoing.target, outgoing.method, collector, lambda: line, follow=follow)
        if head.status not in statuses:
            raise refusal(head, collector.collected, name)
        if len(collector.collected) > limit:
            raise BadReplyError(f'{name}: the answer has more than {limit} bytes')
        result = check(Answer(head, bytes(collector.collected), target.url))
        if outgoing.method in ('GET', 'HEAD'):
            self.note_read(target)
        return result

    def note_read(self, target: Target) -> None:
        """Record an object, or a list of objects, that was read well."""
        last, before = self._read
        if last is not target:
            self._read = target, before if last is not None and last.path == target.path else last

    async def _ask(self) -> bool:
        """Return whether the store replies to a request for one of the last two objects that were read.

        Of two, as the last one may be the object that fails.
        """
        return any(await asyncio.gather(*(self._answers_for(target) for target in self._read if target is not None)))

    async def _answers_for(self, target: Target) -> bool:
        """Request a byte of an object; return whether the store replies soon, and not by its failure."""
        collector = _Collector('', Outgoing(target, 'GET'), 1)
        collector.target, collector.request = target, target.request('GET', 'Range: bytes=0-0\r\n')
        try:
            async with asyncio.timeout(_ASKED_FOR):
                return (await self.pool.exchange(collector)).status < 500
        except BadReplyError:  # such as the whole object, of a server without ranges
            return True
        except (OSError, ProtocolError) as error:
            logger.debug('%s: does not answer: %s', hidden(target.url), error)
            return False

    async def _send_read(self, target: Target, download: Download) -> Head:
        """Send the request of a download that verifies another one; return the head of the reply."""
        return (await self._follow(target, 'GET', download, download.range))[0]

    async def _follow(
        self,
        target: Target,
        method: str,
        exchange: Exchange,
        lines: Callable[[], str],
        head: Head | None = None,
        follow: bool = True,
    ) -> tuple[Head, Target]:
        """Send a request, follow permitted redirects, and return the last reply's head and the target that sent it.

        Args:
          lines: returns further header lines for each of the requests.
          head: the head of the reply, if it has arrived already.
          follow: False to return the first reply.
        """
        for _ in range(_REDIRECTS):
            if head is None:
                exchange.target, exchange.request = target, target.request(method, lines())
                head = await self.pool.exchange(exchange)
            followed = head.status in (301, 302, 303, 307, 308) and 'location' in head.headers
            if not followed or not follow or self.versions.required or exchange.body:
                return head, target
            target, head = target.follow(head.headers['location']), None
        raise BadReplyError(f'{hidden(target.url)}: more than {_REDIRECTS} redirections')


async def _prepared(prepare: Callable[[], Awaitable[T]]) -> T:
    try:
        return await prepare()
    except StoreError as error:
        # The provider of the credentials may fail temporarily, as the store may.
        raise RetryableError(error, throttled=False, after=0.0, outcome='credentials') from error
