"""Errors as text, and short tracebacks: of the frames between the user's call and the error, most are left out.

``GRANULAR_FULL_TRACEBACKS=1`` keeps all frames and causes, for reports of defects.
"""

import functools
import os
import site
import types
from collections.abc import Iterator
from typing import Final, Literal

from granular.aio.runtime.user_functions import is_of_signal
from granular.errors import DatapointError, FunctionError, GranularError

_Owner = Literal['granular', 'library', 'user']

_PACKAGE: Final = __file__.removesuffix('aio/runtime/tracebacks.py')
_PLUMBING: Final = (os.path.dirname(__file__) + os.sep, f'{_PACKAGE}aio/stores/errors.py')  # they pass errors on


class RemoteError(Exception):
    """The cause of an error in a worker process: the traceback that it had there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def message_of(error: BaseException) -> str | None:
    """Return the message of an error, or None if its ``str`` fails, which may raise anything."""
    try:
        return str(error)
    except BaseException as failure:
        if is_of_signal(failure):
            raise
        return None


def summary(error: BaseException) -> str:
    """Return the class and message of an error, even if its ``str`` fails."""
    message = message_of(error)
    return type(error).__name__ if message is None else f'{type(error).__name__}: {message}'


def shorten(error: BaseException) -> None:
    """Shorten the traceback of an error that leaves the library, and those of its causes.

    Of the frames of granular, the innermost one remains, and all frames of the user's code. Moved to ``__context__``,
    where it is not printed, is a cause whose text the message repeats, and the cause of an error of a datapoint, whose
    message describes what its decoder or encoder found. Errors other than granular's own are left as they are, unless a
    function of the user raised them.
    """
    if os.environ.get('GRANULAR_FULL_TRACEBACKS', '0') not in ('', '0'):
        return
    if isinstance(error, GranularError) or _is_of_user(error):
        for link in reversed(list(_chain(error))):
            BaseException.with_traceback(link, _cut(link.__traceback__))
            _hide_repeated(link)


def tells_all(error: BaseException) -> bool:
    """Return whether the message of a shortened error says all that its traceback does, which has no user's frame."""
    described = isinstance(error, DatapointError) and _printed_before(error) is None
    return described and 'user' not in map(_owner, _frames(error.__traceback__))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that are printed with it, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = _printed_before(link)


def _printed_before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(trace: types.TracebackType | None) -> list[types.TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


@functools.cache
def _libraries() -> tuple[str, ...]:
    # Without sysconfig, which reads a file: the error may be that no more files can be opened.
    return (os.path.dirname(os.__file__), *site.getsitepackages(), '<frozen')


def _owner(trace: types.TracebackType) -> _Owner:
    path = trace.tb_frame.f_code.co_filename
    if path.startswith(_PACKAGE):
        return 'granular'
    return 'library' if path.startswith(_libraries()) or path.endswith('.pyx') else 'user'  # which have relative paths


def _is_of_user(error: BaseException) -> bool:
    """Return whether granular called a function of the user, outside of installed packages, that raised the error.

    An error of a worker process carries its traceback there as a text.
    """
    if any(isinstance(link, RemoteError) for link in _chain(error)):
        return True
    owners = [_owner(frame) for frame in _frames(error.__traceback__)]
    last = len(owners) - 1 - owners[::-1].index('granular') if 'granular' in owners else -1
    return owners[last + 1 : last + 2] == ['user']


def _cut(trace: types.TracebackType | None) -> types.TracebackType | None:
    frames = _frames(trace)
    own = [i for i, frame in enumerate(frames) if _owner(frame) == 'granular']
    telling = [i for i in own if not frames[i].tb_frame.f_code.co_filename.startswith(_PLUMBING)]
    innermost, behind = (telling or own or [-1])[-1], (own or [-1])[-1]
    short: types.TracebackType | None = None
    for i, frame in reversed(list(enumerate(frames))):
        if i == innermost or i > behind or _owner(frame) == 'user':
            short = types.TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno or -1)  # -1: find it
    return short


def _hide_repeated(error: BaseException) -> None:
    """Move a cause that the message describes to ``__context__``, unless it has a cause or a user's frame."""
    cause = error.__cause__
    if cause is None or _printed_before(cause) is not None or 'user' in map(_owner, _frames(cause.__traceback__)):
        return
    described = isinstance(error, DatapointError)
    if isinstance(error, GranularError) and not isinstance(error, FunctionError):  # whose cause decides what follows
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else message_of(cause)
        described = described or bool(text and text in str(error))
    if described and not isinstance(cause, RemoteError):
        error.__cause__, error.__context__ = None, cause  # the first suppresses the second
