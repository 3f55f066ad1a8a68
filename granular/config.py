"""Settings for reading and writing, in one frozen object, and the defaults of each kind of store."""

import dataclasses
import math
import numbers
import os
from typing import Any, Final

from granular._support.other_names import answering
from granular._support.text import logger
from granular.errors import InvalidArgumentError

__all__ = ['GiB', 'IOConfig', 'KiB', 'MiB']

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30


def _env(name: str, default: float | int | str, doc: str) -> Any:
    """Return a field whose default is the environment variable GRANULAR_<NAME>, read when the config is constructed."""
    variable = f'GRANULAR_{name.upper()}'

    def read() -> float | int | str:
        text = os.environ.get(variable)
        if text is None:
            return default
        try:
            return type(default)(text)
        except ValueError:
            raise InvalidArgumentError(f'{variable}: expected a number such as {default!r}, got {text!r}') from None

    return dataclasses.field(default_factory=read, metadata={'variable': variable, 'doc': doc})


_ZERO_ALLOWED: Final = ('concurrency', 'max_gap', 'min_rate', 'hedge', 'backoff', 'backoff_cap', 'retry_time')
_MOST: Final = {'max_gap': 1 << 40}  # more would lead from one object to the next, which are planned together
_LEAST: Final = {'cache_bytes': 8 * MiB, 'tail': 8}  # the last limit of a table says where it begins
_LARGEST: Final = (1 << 63) - 1


@answering(
    timeout='connect_timeout, first_byte_timeout or read_timeout',
    cache='cache_dir',
    **dict.fromkeys(('retries', 'max_retries', 'max_attempts'), 'attempts'),
    **dict.fromkeys(('max_concurrency', 'max_pool_connections', 'max_workers', 'num_threads'), 'concurrency'),
)
@dataclasses.dataclass(frozen=True, slots=True)
class IOConfig:
    """Settings for reading and writing stores.

    The environment variable of each is ``GRANULAR_`` and its name in upper case.

    Pass one to a path, and everything opened under that path uses it::

        config = granular.IOConfig(concurrency=64, retry_time=60)
        path = granular.Path('s3://bucket/data', config=config)

    ``-1`` for ``max_gap`` and ``max_request`` selects the store's own default: 64 KiB and 4 MiB for a bucket, 4 KiB and
    64 MiB for a local disk.
    """

    concurrency: int = _env('concurrency', 0, 'requests in flight per store and event loop; 0 to adapt from 256 on')
    memory: int = _env('memory', 512 * MiB, 'bytes of replies in flight per store and event loop')
    max_gap: int = _env('max_gap', -1, 'bytes between two ranges that are read along rather than requested separately')
    max_request: int = _env('max_request', -1, 'bytes above which one range becomes several requests')
    tail: int = _env('tail', 64 * KiB, "bytes of a bag's end that are requested when it is opened")
    connect_timeout: float = _env(
        'connect_timeout',
        5.0,
        'seconds to establish a connection; half of those for which a server that never replied is tried',
    )
    first_byte_timeout: float = _env('first_byte_timeout', 10.0, 'seconds until the first byte of a reply')
    read_timeout: float = _env('read_timeout', 10.0, 'seconds without a byte of the body after which a request failed')
    min_rate: int = _env('min_rate', 1024, 'bytes a second that must come on average over read_timeout; 0 for any')
    hedge: float = _env('hedge', 0.03, 'of all requests, the share that may be sent again for being slow; 0 for none')
    attempts: int = _env('attempts', 10, 'times a request is tried; in an outage, retry_time alone limits it')
    retry_time: float = _env('retry_time', 180.0, 'seconds after which a request is not tried again; 0 for one attempt')
    backoff: float = _env('backoff', 0.1, 'seconds before the first retry; doubles, with full jitter')
    backoff_cap: float = _env('backoff_cap', 20.0, 'seconds that a single wait never passes')
    part_size: int = _env('part_size', 8 * MiB, 'bytes of an upload part; doubles every 1,000 parts')
    index_cache: str = _env('index_cache', '', 'a local folder that keeps the indices of datasets; none if empty')
    index_memory: int = _env(
        'index_memory', GiB, "bytes of a dataset's index in memory; of a larger one, pages are read"
    )
    cache_dir: str = _env('cache_dir', '', 'a local folder that keeps blocks of objects in buckets; none if empty')
    cache_bytes: int = _env('cache_bytes', 10 * GiB, 'bytes on the disk that cache_dir may take, from 8 MiB on')
    upload_concurrency: int = _env('upload_concurrency', 4, 'parts of one object in flight while it is written')

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, minimum = getattr(self, field.name), -1 if field.name in ('max_gap', 'max_request') else 0
            if field.name in ('index_cache', 'cache_dir'):
                if value and (not isinstance(value, str | os.PathLike) or '://' in str(value)):
                    raise InvalidArgumentError(f'IOConfig.{field.name}: expected a local folder, got {value!r:.100}')
                continue
            # Not math.isnan, which refuses large integers.
            valid = isinstance(value, numbers.Real) and not isinstance(value, bool) and value <= math.inf
            if not valid or (field.type is int and value % 1):
                expected = 'an integer' if field.type is int else 'a number'
                raise InvalidArgumentError(f'IOConfig.{field.name}: expected {expected}, got {value!r:.100}')
            if value < minimum or (value == 0 and field.name not in _ZERO_ALLOWED):
                least = f'{minimum} or more' if minimum or field.name in _ZERO_ALLOWED else 'more than 0'
                raise InvalidArgumentError(
                    f'IOConfig.{field.name}: expected {least}, got {value!r}: {field.metadata["doc"]}'
                )
            if value > (most := _MOST.get(field.name, _LARGEST)) and value != math.inf:
                raise InvalidArgumentError(f'IOConfig.{field.name}: expected at most {most}')
            object.__setattr__(self, field.name, int(value) if field.type is int else float(value))  # of 1e9, or numpy
        # S3 refuses parts smaller than 5 MiB, and GCS requires multiples of 256 KiB.
        if self.part_size < 5 * MiB or self.part_size % (256 * KiB):
            raise InvalidArgumentError(
                f'IOConfig.part_size: expected a multiple of 256 KiB, at least 5 MiB, got {self.part_size}'
            )
        for name, smallest in _LEAST.items():
            if getattr(self, name) < smallest:
                raise InvalidArgumentError(f'IOConfig.{name}: expected at least {smallest}, got {getattr(self, name)}')


def _warn_of_misspelled_variables() -> None:
    """Log environment variables that resemble those of settings, which would have no effect without a word."""
    prefix = 'GRANULAR_'
    names = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    settings = [field.name.upper() for field in dataclasses.fields(IOConfig)]
    if unknown := sorted(set(names).difference(settings)):
        import difflib  # rarely needed

        for name in unknown:
            if similar := [prefix + other for other in difflib.get_close_matches(name, settings, n=2)]:
                logger.warning('%s is not a setting: did you mean %s?', prefix + name, ' or '.join(similar))


_warn_of_misspelled_variables()


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
    """Thresholds for merging and splitting ranges, both in bytes, as in :mod:`granular.aio.stores.ranges`."""

    max_gap: int
    max_request: int


# A request to a bucket costs about 70 us of CPU time, in which one connection transfers about 64 KiB; above 4 MiB, a
# second connection gains more than a longer reply. A local read costs one system call, so only gaps of a few KiB are
# worth reading through.
_REMOTE: Final = Merge(max_gap=64 * KiB, max_request=4 * MiB)
_LOCAL: Final = Merge(max_gap=4 * KiB, max_request=64 * MiB)


def store_defaults(config: IOConfig, *, local: bool) -> Merge:
    """Return the merging thresholds of a store: those of the config, or else the default for its kind."""
    default = _LOCAL if local else _REMOTE
    return Merge(
        max_gap=default.max_gap if config.max_gap < 0 else config.max_gap,
        max_request=default.max_request if config.max_request < 0 else config.max_request,
    )
