"""Exceptions raised by granular, and the built-in exceptions that they also derive from.

::

    GranularError
    ├── NotFoundError            FileNotFoundError   no such object, folder, spec or shard
    │   └── BucketNotFoundError                      no such bucket, container or repository
    ├── AlreadyExistsError       FileExistsError     a path that must be new exists already
    ├── AccessDeniedError        PermissionError     credentials are missing, wrong or lack a permission
    ├── StoreError               OSError             the store or the connection to it failed
    │   ├── StoreTimeoutError    TimeoutError        no connection, first byte or progress in time
    │   ├── BadReplyError                            a reply that does not answer the request
    │   └── ObjectChangedError                       an object was replaced while it was being read
    ├── UnsupportedError         io.UnsupportedOperation (OSError, ValueError)
    │   └── UnknownSchemeError                       no store for this URL scheme
    ├── ClosedError              ValueError          a reader, writer or loader used after it was closed
    ├── OutOfRangeError          IndexError          an index, range or mask out of bounds
    ├── InvalidArgumentError     ValueError          an invalid argument
    │   └── UnknownArgumentError TypeError           a name of an argument that there is not
    ├── MissingExtraError        ImportError         an optional dependency is not installed
    ├── SpecError                ValueError          a spec that cannot be written or read
    │   ├── UnknownKeyError      KeyError            a key that the spec does not have
    │   └── UnknownTypeError     KeyError            a type without an encoder or decoder
    ├── DatapointError           ValueError          a datapoint that does not fit the spec
    │   ├── DatapointKeysError   KeyError            its keys differ from those of the spec; an UnknownKeyError, too
    │   ├── EncodeError                              an encoder refused a value
    │   └── DecodeError                              a decoder refused a record
    ├── CorruptError             ValueError          bytes that are not a valid bag, dataset or archive
    │   ├── CorruptBagError
    │   ├── CorruptRecordError
    │   ├── CorruptDatasetError
    │   └── CorruptArchiveError
    ├── StateError               ValueError          a checkpoint that does not fit the object that loads it
    ├── WorkerError              RuntimeError        a worker process died, or its result cannot be transferred
    └── FunctionError            RuntimeError        a user function raised an exception that ends something

The message of an error names the file, key or index, the figures that disagree and the remedy; it never contains a
credential. All errors pickle. What a program may need of a message, it finds in attributes, as far as it is known; they
are None otherwise: ``path``, ``key``, ``index`` and ``status``.
"""

import io as _io


class GranularError(Exception):
    """Base class of all errors raised by granular; catch it to handle any of them.

    ::

        try:
            reader = granular.DatasetReader('s3://bucket/data', granular.decoders)
        except granular.GranularError as error:
            print(error, error.path)

    Attributes:
      path: the file, object or folder, as its ``Path`` is shown: without credentials.
      key: the key of a spec.
      index: the index of the datapoint or record in ``path``.
      status: the HTTP status of the reply.
    """

    path: str | None = None
    key: str | None = None
    index: int | None = None
    status: int | None = None

    def __init__(
        self,
        *args: object,
        path: str | None = None,
        key: str | None = None,
        index: int | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(*args)
        given = {'path': path, 'key': key, 'index': index, 'status': status}
        self.__dict__.update({name: value for name, value in given.items() if value is not None})

    def __str__(self) -> str:
        # KeyError would print the repr of its message, OSError a tuple.
        return str(self.args[0]) if self.args else ''


class NotFoundError(GranularError, FileNotFoundError):
    """The object, folder, spec or shard does not exist, or the bucket that it would be in."""


class BucketNotFoundError(NotFoundError):
    """The bucket does not exist, or the container of Azure, or the repository of the Hugging Face Hub."""


class AlreadyExistsError(GranularError, FileExistsError):
    """A path that must be new exists already."""


class AccessDeniedError(GranularError, PermissionError):
    """Credentials are missing, wrong, or lack the permission for this operation."""


class StoreError(GranularError, OSError):
    """The store or the connection to it failed.

    Attributes:
      of_object: True if the store answered other requests meanwhile, so that it is the failure of one object.
    """

    of_object: bool = False


class StoreTimeoutError(StoreError, TimeoutError):
    """No connection, no first byte or no progress within the time allowed."""


class BadReplyError(StoreError):
    """A reply that does not answer the request: wrong status, range, length or encoding."""


class ObjectChangedError(StoreError):
    """An object was replaced while it was being read."""


class UnsupportedError(GranularError, _io.UnsupportedOperation):
    """The store, or this release, does not support the operation."""


class UnknownSchemeError(UnsupportedError):
    """No store supports this URL scheme."""


class ClosedError(GranularError, ValueError):
    """A reader, writer or loader was used after it was closed."""


class OutOfRangeError(GranularError, IndexError):
    """An index, a byte range or a mask is out of bounds."""


class InvalidArgumentError(GranularError, ValueError):
    """An argument is invalid."""


class UnknownArgumentError(InvalidArgumentError, TypeError):
    """A function was called with the name of an argument that it does not have."""


class MissingExtraError(GranularError, ImportError):
    """An optional dependency is not installed; the message names the extra that provides it."""


class SpecError(GranularError, ValueError):
    """A spec that cannot be written or read."""


class UnknownKeyError(SpecError, KeyError):
    """A key that the spec does not have."""


class UnknownTypeError(SpecError, KeyError):
    """A type without an encoder or decoder."""


class DatapointError(GranularError, ValueError):
    """A datapoint that does not fit the spec."""


class DatapointKeysError(DatapointError, UnknownKeyError):
    """A datapoint whose keys differ from those of the spec."""


class EncodeError(DatapointError):
    """An encoder refused a value."""


class DecodeError(DatapointError):
    """A decoder refused a record."""


class CorruptError(GranularError, ValueError):
    """Bytes that are not a valid bag, dataset or archive."""


class CorruptBagError(CorruptError):
    """A bag whose table of limits does not fit its data."""


class CorruptRecordError(CorruptError):
    """A record that differs from what was written."""


class CorruptDatasetError(CorruptError):
    """A dataset whose files do not fit each other."""


class CorruptArchiveError(CorruptError):
    """A zip or tar archive that is truncated or damaged, or does not hold what it claims to."""


class StateError(GranularError, ValueError):
    """A checkpoint that does not fit the object that loads it."""


class WorkerError(GranularError, RuntimeError):
    """A worker process died, or its result or error cannot be transferred."""


class FunctionError(GranularError, RuntimeError):
    """A user function raised an exception that means an end of something else; it is the cause.

    StopIteration and StopAsyncIteration would end a loop over elements early, CancelledError would cancel the reader,
    GeneratorExit would close it, and SystemExit and KeyboardInterrupt would end the program. On the main thread, the
    last two are raised unchanged, because the handlers of signals raise them there.
    """
