"""Answers to the names that arguments and methods have in other libraries, or in another place of this one."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from granular.errors import InvalidArgumentError, UnknownArgumentError

Function = TypeVar('Function', bound=Callable[..., Any])

_COROUTINE: Final = 0x80  # inspect.CO_COROUTINE; importing inspect takes longer than importing granular

# Options of stores, and their names in boto3, s3fs, gcsfs, adlfs, pyarrow.fs, obstore and the SDKs of Google and Azure.
_STORE_OPTIONS: Final = {
    'key': ('aws_access_key_id', 'access_key_id', 'access_key', 'username'),
    'secret': ('aws_secret_access_key', 'secret_access_key', 'secret_key', 'password'),
    'token': (
        'aws_session_token', 'session_token', 'access_token', 'service_account', 'service_account_path',
        'service_account_key', 'credentials', 'credential', 'hf_token', 'use_auth_token',
    ),
    'region': ('region_name', 'aws_region', 'aws_default_region', 'default_region'),
    'profile': ('profile_name', 'aws_profile'),
    'endpoint_url': (
        'endpoint', 'aws_endpoint', 'aws_endpoint_url', 'endpoint_override', 'api_endpoint', 'account_url', 'scheme',
        'use_ssl', 'allow_http',
    ),
    'config_kwargs': ('addressing_style', 'virtual_hosted_style_request'),
    'anon': ('anonymous', 'skip_signature', 'no_sign_request'),
    'project': ('project_id', 'default_project'),
    'account_name': ('account', 'storage_account'),
    'account_key': ('access_key', 'shared_access_key'),
    'account_host': ('blob_storage_authority',),
    'sas_token': ('sas_key', 'shared_access_signature'),
    'tls_verify': ('verify', 'ssl_verify', 'allow_invalid_certificates'),
}  # fmt: skip

# Modules whose names are asked of another one, in the order in which they are named.
_HOMES: Final = (
    'granular', 'granular.grain', 'granular.grain.sharding', 'granular.grain.sources', 'granular.grain.samplers',
    'granular.grain.transforms', 'granular.grain.experimental', 'granular.grain.python', 'granular.kappadata',
)  # fmt: skip

# Names of other packages, by the package of this one that is asked for them.
_MODULE_NAMES: Final = {
    'granular': {
        'DataLoader': 'granular.Loader loads batches of a source; granular.grain has the DataLoader of Grain',
        **dict.fromkeys(('load_dataset', 'load_from_disk', 'load'), 'granular.open(path) opens a dataset'),
        **dict.fromkeys(
            ('Dataset', 'StreamingDataset', 'WebDataset'),
            'granular.open(path) returns a reader, and granular.MapDataset.source(reader) a dataset with operations',
        ),
        'MDSWriter': 'granular.DatasetWriter writes a dataset',
        'ShardWriter': 'granular.ShardedDatasetWriter writes shards',
        **dict.fromkeys(('Batches', 'IterableDataset'), 'it is in granular.integrations.torch'),
        'save': 'granular.save_state(path, state) writes a state',
    },
    'granular.grain': dict.fromkeys(
        ('SharedMemoryArray', 'SharedMemoryArrayMetadata'),
        'mp_prefetch(8) passes arrays of worker processes in shared memory without it',
    ),
    'granular.kappadata': {
        **dict.fromkeys(
            ('LabelSmoothingWrapper', 'OneHotWrapper', 'OverwriteClassesWrapper'),
            'a KDWrapper with getitem_class, or a MapDataset.map, changes labels',
        ),
        **dict.fromkeys(
            ('XTransformWrapper', 'YTransformWrapper'),
            'a KDWrapper with a method of the field, or a MapDataset.map, changes values',
        ),
        'RedisDataset': 'granular.RedisCache keeps the values of a source in Redis',
    },
}  # fmt: skip

_BOOLEANS: Final = frozenset(('bool', 'bool_'))  # of Python and numpy, which is not imported here

# Types of values, and their names in numpy, pyarrow, datasets and streaming.
_TYPES: Final = {
    'jpg': ('jpeg',),
    'jpg or png': ('image', 'pil', 'webp', 'gif', 'bmp'),
    'wav or flac': ('audio',),
    'mp4 or webm': ('video',),
    'utf8': ('string', 'str', 'text', 'utf-8', 'large_string'),
    'u64': ('uint64',),
    'int': ('integer', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'label', 'classlabel'),
    'float': ('double', 'float16', 'float32', 'float64', 'number'),
    'bool': ('boolean', 'bool_'),
    'bytes': ('binary', 'raw'),
    'array': ('ndarray', 'numpy', 'tensor', 'tensors'),
    'tree or msgpack': ('dict', 'list', 'pickle', 'pkl', 'object'),
}


def type_named(other: str) -> str:
    """Return the types of granular that stand for one of another library; empty if it is not known."""
    return next((ours for ours, others in _TYPES.items() if other.lower() in (ours, *others)), '')


def answering(**answers: str) -> Callable[[Function], Function]:
    """Make a function, or a constructor, answer names of arguments that it does not have by what to pass instead: by
    the given answers, or else by names that it has. Arguments of the type ``bool`` must be booleans, or 0 or 1: the
    text 'false' would be true, and arrays have no truth.
    """

    def decorate(function: Function) -> Function:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        flags = _flags_of(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name, position in flags:
                value = args[position] if position < len(args) else kwargs.get(name, False)
                kind = type(value).__name__
                if kind not in _BOOLEANS and not (kind == 'int' and value in (0, 1)):
                    raise InvalidArgumentError(f'{name}: expected True or False, got {value!r:.100}')
            try:
                return function(*args, **kwargs)
            except UnknownArgumentError:
                raise
            except TypeError:
                refuse_unknown(function, args, kwargs, answers)
                raise

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await call(*args, **kwargs)

        return cast(Function, awaited if function.__code__.co_flags & _COROUTINE else call)

    return decorate


def _flags_of(function: Any) -> list[tuple[str, int]]:
    """Return the arguments that are ``bool``, with their positions."""
    while hasattr(function, '__wrapped__'):
        function = function.__wrapped__
    names, count = function.__code__.co_varnames, function.__code__.co_argcount
    flags = [name for name, kind in function.__annotations__.items() if kind is bool and name in names]
    return [(name, position if (position := names.index(name)) < count else sys.maxsize) for name in flags]


def refuse_unknown(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Iterable[str], answers: Mapping[str, str]
) -> None:
    """Raise an ``UnknownArgumentError`` if a function has not all of some arguments, with answers to the others."""
    import difflib  # here, as importing both takes longer than importing granular
    import inspect

    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return
    by_name = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    by_position = [parameter.name for parameter in parameters if parameter.name not in by_name]
    count, owner = len(args), function.__qualname__
    if by_position and by_position[0] in ('self', 'cls'):
        kind = args[0] if by_position.pop(0) == 'cls' else type(args[0])
        count, owner = count - 1, f'{kind.__name__}.{function.__name__}'.removesuffix('.__init__')
    known = by_position + by_name
    parts = []
    if unknown := [name for name in kwargs if name not in known]:
        for name in unknown:
            ours = answers.get(name) or ' or '.join(difflib.get_close_matches(name, known, 2))
            parts.append(f'for {name}, pass {ours}' if ours else f'expected some of {known}')
        raise UnknownArgumentError(f'{owner}: no arguments {unknown}: {"; ".join(dict.fromkeys(parts))}') from None
    if count > len(by_position):
        names = [', '.join(by_position), f'{", ".join(by_name)} by name' if by_name else '']
        expected = ', and '.join(filter(None, names)) or 'no arguments'
        remedy = ': pass a list of datasets' if by_position == ['datasets'] else ''
        raise UnknownArgumentError(f'{owner}: expected {expected}, got {count} by position{remedy}') from None


def no_attribute(owner: str, name: str, answers: Mapping[str, str], obj: object = None) -> AttributeError:
    """Return the error for an attribute that does not exist, with what to use instead."""
    answer = f': {answers[name]}' if name in answers else ''
    return AttributeError(f'{owner} has no attribute {name!r}{answer}', name=name, obj=obj)


def no_module_name(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have, with where it is, or what to use instead."""
    answers = _MODULE_NAMES.get(module, {})
    if name[0] != '_' and name not in answers:
        others = (importlib.import_module(home) for home in _HOMES if home != module)
        if home := next((other.__name__ for other in others if name in getattr(other, '__all__', ())), ''):
            answers = {name: f'it is in {home}'}
    return no_attribute(f'module {module!r}', name, answers, sys.modules[module])


class OtherNames:
    """Base of classes that answer names of attributes that they do not have."""

    _answers: ClassVar[Mapping[str, str]]
    """What to use instead, by name."""

    if not TYPE_CHECKING:  # type checkers would take every name for an attribute

        def __getattr__(self, name):
            raise no_attribute(f'{type(self).__name__!r} object', name, self._answers, self)


OF_READERS: Final = {
    **dict.fromkeys(
        (
            'map', 'filter', 'shuffle', 'batch', 'repeat', 'slice', 'select', 'skip', 'subset', 'take',
            'to_iter_dataset',
        ),
        'granular.MapDataset.source(reader) has operations',
    ),
    'num_rows': 'len(reader) is the number of datapoints',
    **dict.fromkeys(
        ('keys', 'schema', 'features', 'column_names', 'columns'), 'the spec of a reader of a dataset has its types'
    ),
}  # fmt: skip
OF_WRITERS: Final = {
    **dict.fromkeys(('write', 'add', 'put'), 'call append(datapoint)'),
    'extend': 'call append for each',
    **dict.fromkeys(('finish', 'finalize', 'commit'), 'close it, which publishes what was appended'),
}
WRITER_ARGUMENTS: Final = {
    'out': 'directory',
    'columns': 'spec, whose types are names such as jpg and utf8',
    **dict.fromkeys(
        ('overwrite', 'mode', 'exist_ok'),
        'nothing: no dataset is overwritten: remove it before by granular.Path(directory).rmtree()',
    ),
}
CONVERSION_ARGUMENTS: Final = {
    **WRITER_ARGUMENTS,
    **dict.fromkeys(('num_workers', 'workers', 'num_proc'), 'parallel, the shards that are written at a time'),
}
OF_CURSORS: Final = {'save': 'call state_dict()', 'load': 'call load_state_dict(state)'}


class Answering:
    """Base of classes whose constructors answer names of arguments that they do not have."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if '__init__' in vars(cls):
            cls.__init__ = answering()(cls.__init__)  # type: ignore[method-assign]


def store_options(others: Iterable[str], known: Iterable[str]) -> str:
    """Return what to pass for options that have other names elsewhere, as a clause; empty if there are none."""
    answers = {name: ours for ours in known for name in _STORE_OPTIONS.get(ours, ())}
    parts = [f'for {name}, pass {answers[name]}' for name in others if name in answers]
    return ': ' + '; '.join(parts) if parts else ''


class Awaited:
    """Base of objects of the async API whose elements the sync API has by index."""

    if not TYPE_CHECKING:  # type checkers refuse an index by themselves

        def __getitem__(self, index):
            raise InvalidArgumentError(
                f'{type(self).__name__}: elements are awaited: use `await x.get({index!r:.50})`, `await x.fetch(...)` '
                f'or `async for`'
            )


class Entered:
    """Base of objects of the async API that only ``async with`` enters and closes."""

    if not TYPE_CHECKING:  # type checkers refuse a `with` by themselves

        def __enter__(self):
            raise InvalidArgumentError(f'{type(self).__name__} of the async API: enter it by `async with`')

        def __exit__(self, *exception):
            """Do nothing: ``__enter__`` fails."""


class Unindexed:
    """Base of streams, whose elements have no index.

    It has neither ``__len__``, by which ``list(stream)`` and ``bool(stream)`` would raise its error, nor ``__next__``,
    by which a stream would be an ``Iterator``.
    """

    _no_index: ClassVar = (
        'a stream has no indices, only `for`: index the MapDataset, before to_iter_dataset(); for torch, pass '
        'granular.integrations.torch.IterableDataset(stream)'
    )

    if not TYPE_CHECKING:

        def __getitem__(self, index):
            raise InvalidArgumentError(f'{type(self).__name__}: {self._no_index}')


class Elementless:
    """Base of datasets of fields, which have no elements, unless a subclass has a ``__getitem__`` of its own."""

    def __getitem__(self, index: Any) -> Any:
        mode = ' '.join(getattr(self, 'fields', None) or ('x', 'y'))
        raise InvalidArgumentError(
            f'{type(self).__name__} has fields, but no elements: load them with ModeWrapper(dataset, mode={mode!r})'
        )
