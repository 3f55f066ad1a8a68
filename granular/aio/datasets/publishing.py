"""The folder of a dataset that is written: what it had before, and what is known of its spec once that is published."""

import enum
from typing import NamedTuple

from granular.aio.paths.path import Path
from granular.errors import AlreadyExistsError, BadReplyError, GranularError, NotFoundError, StoreError


class Found(enum.Enum):
    """The content of the folder when the writer was opened."""

    NOTHING = enum.auto()  # that stays: everything in the folder may be removed if the writer fails
    REMAINS = enum.auto()  # local columns of a killed writer, which are continued
    DATASET = enum.auto()  # local columns with a spec, which are appended to


class Anew(NamedTuple):
    """The arguments of ``write_anew``."""

    guarded: bool
    has_copies: bool


async def read_spec(path: Path, failure: GranularError | None) -> bytes | None:
    """Read a spec back that was published, perhaps with a failure; None if there is none."""
    try:
        return await path.read_bytes()
    except NotFoundError:
        return None
    except GranularError as error:
        raise unpublished(path, failure or error, f'reading it failed: {error}') from error


def unpublished(path: Path, failure: GranularError | None, result: str) -> GranularError:
    """Return the error for a spec that may or may not have been published."""
    if failure is None:
        kind: type[GranularError] = BadReplyError
    else:  # "already exists" may be the reply to a retried request that had succeeded
        kind = StoreError if isinstance(failure, AlreadyExistsError) else type(failure)
    error = kind(
        f'{path}: not known to be published: {failure or "the store accepted it"}, and {result}. Its bags were '
        f'left as they are: if the spec appears, the dataset is complete; otherwise write it again with '
        f"resume='discard', or remove the files with `granular clean`"
    )
    error.__cause__ = failure
    return error
