"""Every error that granular raises on purpose, and the builtin twin it is also an instance of.

::

    GranularError
    ├── NotFoundError            FileNotFoundError   no such bucket, object, folder, spec or shard
    ├── AlreadyExistsError       FileExistsError     a place that must be new is taken
    ├── AccessDeniedError        PermissionError     credentials are missing, wrong or lack a right
    ├── StoreError               OSError             the store or the way to it failed
    │   ├── StoreTimeoutError    TimeoutError        no connection, first byte or progress in time
    │   ├── BadReplyError                            a reply that does not answer what was asked
    │   └── ObjectChangedError                       an object was replaced while it was being read
    ├── UnsupportedError         io.UnsupportedOperation (OSError, ValueError)
    │   └── UnknownSchemeError                       no store for this kind of address
    ├── ClosedError              ValueError          a reader, writer or loader used after its end
    ├── OutOfRangeError          IndexError          an index, range or mask beyond what is there
    ├── InvalidArgumentError     ValueError          an argument that cannot mean anything
    ├── MissingExtraError        ImportError         an optional dependency is not installed
    ├── SpecError                ValueError          a spec that cannot be written or read
    │   ├── UnknownKeyError      KeyError            a key that the spec does not have
    │   └── UnknownTypeError     KeyError            a type without an encoder or decoder
    ├── DatapointError           ValueError          a datapoint that does not fit the spec
    │   ├── EncodeError                              an encoder refused a value
    │   └── DecodeError                              a decoder refused a record
    ├── CorruptError             ValueError          bytes that are no bag, dataset or archive
    │   ├── CorruptBagError
    │   ├── CorruptRecordError
    │   ├── CorruptDatasetError
    │   └── CorruptArchiveError
    ├── StateError               ValueError          a checkpoint that does not fit what loads it
    ├── WorkerError              RuntimeError        a worker process died, or what it made cannot be carried over
    └── FunctionError            RuntimeError        a function of the user's raised what ends coroutines

An error names the place (file, key, index), the figures that disagree and the way out; it never holds a credential.
All of them pickle, as they are built from their message alone.
"""

import io


class GranularError(Exception):
    """The root of the tree."""

    def __str__(self) -> str:
        # KeyError would print the repr of its message, OSError a tuple.
        return str(self.args[0]) if self.args else ''


class NotFoundError(GranularError, FileNotFoundError):
    """There is no such bucket, object, folder, spec or shard."""


class AlreadyExistsError(GranularError, FileExistsError):
    """A place that must be new is taken."""


class AccessDeniedError(GranularError, PermissionError):
    """Credentials are missing, wrong, or lack the right to do this."""


class StoreError(GranularError, OSError):
    """The store, or the way to it, failed."""


class StoreTimeoutError(StoreError, TimeoutError):
    """No connection, no first byte or no progress in the time allowed."""


class BadReplyError(StoreError):
    """A reply that does not answer what was asked: status, range, length or encoding."""


class ObjectChangedError(StoreError):
    """An object was replaced while it was being read."""


class UnsupportedError(GranularError, io.UnsupportedOperation):
    """This store, or this release, cannot do that."""


class UnknownSchemeError(UnsupportedError):
    """There is no store for this kind of address."""


class ClosedError(GranularError, ValueError):
    """A reader, writer or loader was used after it was closed."""


class OutOfRangeError(GranularError, IndexError):
    """An index, a byte range or a mask lies beyond what is there."""


class InvalidArgumentError(GranularError, ValueError):
    """An argument that cannot mean anything."""


class MissingExtraError(GranularError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class SpecError(GranularError, ValueError):
    """A spec that cannot be written or read."""


class UnknownKeyError(SpecError, KeyError):
    """A key that the spec does not have."""


class UnknownTypeError(SpecError, KeyError):
    """A type for which no encoder or decoder was given."""


class DatapointError(GranularError, ValueError):
    """A datapoint that does not fit the spec."""


class EncodeError(DatapointError):
    """An encoder refused a value."""


class DecodeError(DatapointError):
    """A decoder refused a record."""


class CorruptError(GranularError, ValueError):
    """Bytes that are no bag, dataset or archive."""


class CorruptBagError(CorruptError):
    """A bag whose table of limits does not fit its data."""


class CorruptRecordError(CorruptError):
    """A record that is not what was written."""


class CorruptDatasetError(CorruptError):
    """A dataset whose files do not fit each other."""


class CorruptArchiveError(CorruptError):
    """A zip or tar archive that is cut short or damaged, or does not hold what it says."""


class StateError(GranularError, ValueError):
    """A checkpoint that does not fit what loads it."""


class WorkerError(GranularError, RuntimeError):
    """A worker process died, or what it made or raised cannot be carried over."""


class FunctionError(GranularError, RuntimeError):
    """A function of the user's raised what coroutines, futures and iterators cannot hand on; its cause is what it was.

    StopIteration and StopAsyncIteration would end a loop over elements early, CancelledError would cancel the reader,
    and GeneratorExit would close it.
    """
