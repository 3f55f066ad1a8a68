"""Retries: which failures are temporary, when the next attempt starts, and what all requests to a store share."""

import asyncio
import logging
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from granular._support.redact import hidden
from granular._support.text import counted, logger
from granular.aio.http.connection import CutReplyError, PoolClosedError, StalledReplyError
from granular.aio.http.download import Download
from granular.aio.http.governor import Governor
from granular.aio.http.messages import ProtocolError
from granular.aio.http.pool import ConnectTimeoutError, UnreachableError
from granular.aio.http.refusals import DoubtfulError, RecoverableError, RecoverableKind, RetryableError
from granular.config import IOConfig
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    GranularError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
    StoreTimeoutError,
)
from granular.metrics import StoreMetrics

T = TypeVar('T')

_WARN_FROM: Final = 3  # the attempt from which on failures are logged as warnings
_QUIET: Final = 10.0  # seconds after the first warning of an operation in which there is no other one; doubles
_SILENT: Final = ': the store answers no request: check that it and the network are up; a longer retry_time waits'
_THROTTLED: Final = 0.5  # maximum seconds before the first retry after throttling
_DOUBTFUL: Final = 3  # failures in a row before a store is asked whether it answers
_ASKED_EVERY: Final = 2.0  # seconds
_OUTAGE_WAIT: Final = 4.0  # maximum seconds between two attempts while the store answers no request
_NEVER_REPLIED: Final = 2.0  # times connect_timeout, for which a server is tried that has never replied
_ATTEMPTS_OF_NO_NAME: Final = 2  # for a host name that does not exist: the first answer of a resolver may be wrong

Recover = Callable[[RecoverableKind, str], Awaitable[bool]]
"""Called with a recoverable error and the region or time that the store reports; returns whether to try again."""


class Traffic:
    """Shared by all requests to a store: the governor, and whether the store answers."""

    def __init__(
        self,
        config: IOConfig,
        metrics: StoreMetrics,
        on_throttling: Callable[[], None],
        has_replied: Callable[[], bool],
        ask: Callable[[], Awaitable[bool]],
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.on_throttling = on_throttling
        self.has_replied, self._ask = has_replied, ask
        self.answered = -math.inf  # time of the last answer that is not the failure of the store
        self._asked, self._is_silent = -math.inf, True  # the time of the last question, and its answer
        self.governor = Governor(config.concurrency, config.memory, time.monotonic)

    def succeeded(self, now: float) -> None:
        """Record that an operation succeeded."""
        self.metrics.ok += 1
        self.replied(now)

    def replied(self, now: float) -> None:
        """Record a reply that is not the failure of the store, such as that an object does not exist."""
        self.answered = now
        self.governor.answered(now)

    async def answers(self, since: float) -> bool | None:
        """Return whether the store has answered a request since a time, or answers one that went well before.

        That is sent every few seconds, for all requests that fail: None until the next one, if the last one went well.
        """
        now = time.monotonic()
        if self.answered <= since and now - self._asked > _ASKED_EVERY:
            self._asked = now
            self._is_silent = not await self._ask()
            if not self._is_silent:
                self.answered = time.monotonic()
        return True if self.answered > since else False if self._is_silent else None


class _Failure(NamedTuple):
    """The meaning of a failed attempt: the error to raise if there is no other attempt, with its cause."""

    error: StoreError
    cause: BaseException | None
    attempts: int  # after which the operation fails
    backoff: float  # maximum seconds before the first retry
    after: float = 0.0  # seconds that the store asks to wait
    throttled: bool = False  # True if the store throttles
    patience: float = math.inf  # seconds from the first attempt after which the operation fails
    outage: bool = False  # True if it may be one of the whole store
    unsent: bool = False  # True if no connection was established, which is never the failure of an object


class Attempts:
    """The attempts of one operation: after a failure, waits for the next one, or raises the error if there is none.

    The operation fails if the error is permanent, or the attempts or the time are used up. An attempt of a download
    that made progress uses up neither: it renews the attempts, and also the time if the bytes gained since the last
    renewal came at the minimum rate. So the number of such attempts is bounded by the size of the download, and a
    download that gains next to nothing ends. The time begins again if the process was stopped during an attempt, as
    suspended jobs are.

    While the store answers no request at all, an attempt that fails does not count, so that the time alone bounds an
    outage: after the first failures in a row, or at the last attempt, the store is asked.
    """

    def __init__(self, traffic: Traffic, recover: Recover, name: str, download: Download | None = None) -> None:
        self._traffic = traffic
        self._recover = recover
        self._name = name
        self._download = download
        self._count = 0  # attempts since the last one that made progress, without those of an outage
        self._sure = 0  # those of them before the store was known to answer last
        self._row = 0  # all attempts since then
        self._sent = 0  # all attempts
        self._bad_replies = 0
        self._started = time.monotonic()  # of the operation
        self._renewed = self._started  # of its time
        self._began = self._started  # of the last attempt
        self._gained = 0  # bytes since the last renewal of the time
        self._failed: float | None = None  # the time of the last failure, unless it was a wrong reply
        self._quiet, self._quiet_until = _QUIET, -math.inf  # warnings of the operation
        self._recovered: set[RecoverableKind] = set()

    async def run(self, attempt: Callable[[], Awaitable[T]], nbytes: int, has_slot: bool = False) -> T:
        """Return the result of the first attempt that succeeds; the first of all may have its slot already."""
        governor, metrics = self._traffic.governor, self._traffic.metrics
        if not has_slot:
            await governor.acquire(nbytes)
        while True:
            metrics.in_flight += 1
            self._began = time.monotonic()
            try:
                result = await attempt()
                self._traffic.succeeded(time.monotonic())
                return result
            except Exception as error:
                failure = error
            except asyncio.CancelledError:
                metrics.failed('cancelled')
                raise
            finally:
                metrics.in_flight -= 1
                governor.release(nbytes)
            final = None
            try:
                if (final := await self._await_next(failure, nbytes)) is not None:
                    raise final
            except GranularError as error:
                error.path = error.path or self._name
                raise
            finally:
                del failure, final  # which refer to this frame

    async def _await_next(self, error: Exception, nbytes: int) -> Exception | None:
        """Wait for the slot of the next attempt; return the error to raise if there is none, given that of the last.

        It is not raised here, as its traceback would refer to frames that refer to it.
        """
        outcome, metrics = _outcome(error), self._traffic.metrics
        metrics.failed(outcome)
        self._count += 1
        self._row += 1
        self._sent += 1
        if isinstance(error, RecoverableError):
            self._traffic.answered = time.monotonic()
            if error.kind in self._recovered or not await self._recover(error.kind, error.detail):
                return error.error
            self._recovered.add(error.kind)
            metrics.retried(outcome)
            await self._traffic.governor.acquire(nbytes, self._failed)
            return None
        before, now = self._failed, time.monotonic()
        self._failed = now
        failure, config = self._judge(error), self._traffic.config
        if failure is None:
            self._traffic.replied(now)
            return error
        silence = config.connect_timeout + config.first_byte_timeout + config.read_timeout
        if now - self._began > max(config.retry_time, silence):
            self._started = self._renewed = now
        progress = self._record_progress(now)
        cap = config.backoff_cap
        final, reason = self._count >= failure.attempts, ''
        # The first failures in a row are counted without asking: most end with them.
        if failure.outage and (failure.unsent or self._row > min(_DOUBTFUL, config.attempts - 1)):
            since = self._began if before is None else before
            match False if failure.unsent else await self._traffic.answers(since):
                case True:
                    self._sure, failure.error.of_object = self._count, True
                case False:
                    self._count, cap, final = self._sure, min(cap, _OUTAGE_WAIT), False
                    reason = _SILENT
                case None:
                    final = False
            now = time.monotonic()
        wait = max(failure.after, jittered(failure.backoff, cap, self._row))
        left = min(config.retry_time - (now - self._renewed), failure.patience - (now - self._started))
        if final or wait > left:
            return self._given_up(failure, reason)
        metrics.retried(outcome)
        # Occasional failures are normal for a bucket: warn only from the third one in a row on, and ever more rarely.
        level = logging.INFO
        if self._row >= _WARN_FROM and now >= self._quiet_until:
            level, self._quiet_until, self._quiet = logging.WARNING, now + self._quiet, 2 * self._quiet
        logger.log(level, 'attempt %d failed, retrying in %.2f s: %s', self._sent, wait, failure.error)
        if progress:
            self._count = 0
            self._sure = 0
            self._row = 0  # it does not burden a failing store
        elif not isinstance(error, DoubtfulError):  # the store answers, with another version than expected
            self._traffic.governor.failed()
        await self._wait(failure, wait)
        return None if await self._acquire(nbytes, left - wait) else self._given_up(failure, _SILENT)

    def _judge(self, error: Exception) -> _Failure | None:
        """Return what a failed attempt means; None for a permanent error."""
        name, config = self._name, self._traffic.config
        plain = (config.attempts, config.backoff)
        match error:
            case ProtocolError() | BadReplyError():
                # The error may quote a header of the request that the server repeats, so it is redacted.
                text = f'{error}' if isinstance(error, BadReplyError) else f'{name}: {error}'
                return _Failure(BadReplyError(hidden(text)), None, self._after_bad_reply(), *plain[1:])
            case DoubtfulError():
                return _Failure(error.error, None, self._after_bad_reply(), *plain[1:])
            case RetryableError():
                after = min(error.after, config.backoff_cap)
                if error.throttled:
                    self._traffic.on_throttling()
                    if self._download is not None:
                        self._download.hedged = False
                failure = _Failure(error.error, None, *plain, after, outage=self._may_be_outage(error))
                if not error.throttled or not self._traffic.governor.throttled(time.monotonic()):
                    return failure
                return failure._replace(backoff=max(config.backoff, _THROTTLED), throttled=True)
            case GranularError():
                return None
            case ssl.SSLCertVerificationError():
                remedy = 'if its authority is that of a company or proxy, pass its file as tls_verify='
                raise StoreError(f'{name}: {error}: {remedy}') from error
            case PoolClosedError():
                raise StoreError(f'{name}: {error}') from error
            case UnreachableError():
                failure = self._lost(StoreError(f'{name}: {error}'), error.__cause__, error.known)
                missing = error.nameless and not error.known
                return failure._replace(unsent=True, attempts=_ATTEMPTS_OF_NO_NAME if missing else config.attempts)
            case TimeoutError():
                timeout = StoreTimeoutError(f'{name}: no answer: {str(error) or type(error).__name__}')
                unsent, replied = isinstance(error, ConnectTimeoutError), isinstance(error, StalledReplyError)
                failure = self._lost(timeout, error, self._traffic.has_replied(), replied)
                return failure._replace(unsent=unsent)
            case OSError():
                lost, replied = StoreError(f'{name}: {_kind(error)}: {error}'), isinstance(error, CutReplyError)
                return self._lost(lost, error, self._traffic.has_replied(), replied)
        return None

    def _may_be_outage(self, error: RetryableError) -> bool:
        """Return whether a temporary error may be one of the whole store, or of credentials that were valid before."""
        if error.outcome == 'credentials':
            return self._traffic.answered > -math.inf
        return 500 <= (error.error.status or 0) < 600

    def _lost(
        self,
        error: StoreError,
        cause: BaseException | None,
        known: bool,
        replied: bool = False,
    ) -> _Failure:
        """Return the failure of an attempt without a whole reply of a server, which is ``known`` if it ever replied.

        One that never has is rarely down: its address is wrong.
        """
        config = self._traffic.config
        patience = math.inf if known else _NEVER_REPLIED * config.connect_timeout
        outage = known and not replied
        return _Failure(error, cause, config.attempts, config.backoff, patience=patience, outage=outage)

    def _after_bad_reply(self) -> int:
        """Return the attempts permitted after a wrong reply: a store that answers wrongly twice will not improve."""
        self._bad_replies += 1
        self._failed = None  # not at once, so that what disturbed the connections may end
        return self._traffic.config.attempts if self._bad_replies < 2 else self._count

    def _record_progress(self, now: float) -> bool:
        """Renew the attempts, and maybe the time, if the last one made progress. Return whether it did."""
        gained = 0 if self._download is None else self._download.gained()
        if not gained:
            return False
        self._count = self._row = 1
        self._sure = 0
        self._traffic.answered = now
        self._gained += gained
        if self._gained >= self._traffic.config.min_rate * (now - self._renewed):
            self._renewed, self._gained = now, 0
        return True

    def _given_up(self, failure: _Failure, reason: str = '') -> StoreError:
        seconds = time.monotonic() - self._started
        failure.error.add_note(f'gave up after {counted(self._sent, "attempt")} in {seconds:.1f} s{reason}')
        failure.error.__cause__ = failure.cause
        return failure.error

    async def _acquire(self, nbytes: int, seconds: float) -> bool:
        """Wait for a slot; in an outage, for at most some seconds. Returns whether there is one."""
        failed = self._failed
        try:
            async with asyncio.timeout(None if failed is None else seconds):
                await self._traffic.governor.acquire(nbytes, failed)
        except TimeoutError:
            if self._traffic.answered <= failed:  # type: ignore[operator]
                return False
            await self._traffic.governor.acquire(nbytes, failed)
        return True

    async def _wait(self, failure: _Failure, seconds: float) -> None:
        if not failure.throttled:
            await asyncio.sleep(seconds)
            return
        await asyncio.sleep(failure.after)
        # An attempt does not count if the store answers others again.
        self._count -= await self._traffic.governor.pause(seconds - failure.after)


def jittered(first: float, cap: float, failures: int) -> float:
    """Return the seconds to wait after a number of failures: up to ``first`` after one, twice as much after each."""
    return random.uniform(0, min(cap, first * 2.0 ** min(failures - 1, 1000)))  # more is no float


_OUTCOMES: Final[tuple[tuple[str, type[Exception] | tuple[type[Exception], ...]], ...]] = (
    ('changed', (DoubtfulError, ObjectChangedError)),
    ('bad_reply', (ProtocolError, BadReplyError)),
    ('not_found', NotFoundError),
    ('denied', AccessDeniedError),
    ('out_of_range', OutOfRangeError),
    ('tls', ssl.SSLCertVerificationError),
    ('error', GranularError),
    ('timeout', TimeoutError),
    ('connection', OSError),
)


def _outcome(error: Exception) -> str:
    if isinstance(error, RecoverableError | RetryableError):
        return error.outcome
    return next((outcome for outcome, kinds in _OUTCOMES if isinstance(error, kinds)), 'error')


def _kind(error: Exception) -> str:
    """Return the name of an error's class; for one of this package, that of the built-in class it derives from."""
    kinds = (kind for kind in type(error).__mro__ if not kind.__module__.startswith('granular'))
    return next(kinds).__name__
