"""Identities of functions, for caches that outlive the process."""

import abc
import contextvars
import copyreg
import dis
import functools
import hashlib
import logging
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

import numpy as np

from granular.aio.runtime.user_functions import name_of
from granular.errors import InvalidArgumentError

_PLAIN: Final = (type(None), type(...), bool, int, float, complex, str, bytes, np.generic)

_LIBRARIES: Final = tuple(
    os.path.join(os.path.realpath(folder), '')
    for folder in {
        *(sysconfig.get_path(name) for name in ('stdlib', 'platstdlib', 'purelib', 'platlib')),
        os.path.join(os.path.dirname(__file__), '..', '..', '..'),
    }
)
"""Folders of code that is not the user's: it is told by its names."""

_HOLD_NOTHING: Final = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    logging.Logger,
    contextvars.ContextVar,
    weakref.ref,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
"""Types of globals and attributes of classes on which no value depends."""

_OF_ABSTRACT_CLASSES: Final = frozenset(vars(abc.ABC))


def identity_of(fn: Any) -> str:
    """Return the name of a function and a digest of its code and of the values that it holds.

    These are its default arguments, the variables of its closure, the arguments of a partial, and the object whose
    method it is; the functions, classes, modules and values that it reads by a global name; and of these the same
    again. Code of Python and of installed packages is told by its names. The digest is the same in every process that
    runs the same release of Python. A value that cannot be described, such as an open file, is refused.
    """
    try:
        digest = _Identity().of((fn, *_construction(fn)))
    except Exception as error:
        raise InvalidArgumentError(f'{name_of(fn)} has no identity of its own: {error}') from error
    return f'{name_of(fn)} {digest.hex()[:16]}'


class _Identity:
    """Computes the digests of values; those of functions and classes once each, as many refer to the same ones."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._kept: list[Any] = []  # so that no other object gets an id in use

    def of(self, values: Any) -> bytes:
        return self._digest(values, frozenset())

    def _digest(self, value: Any, active: frozenset[int]) -> bytes:
        digest = hashlib.sha256()
        for part in self._parts(value, active):
            digest.update(b'%d:' % len(part))
            digest.update(part)
        return digest.digest()

    def _parts(self, value: Any, active: frozenset[int]) -> Iterator[bytes | memoryview]:
        """Yield bytes that describe a value, and differ where values do; ``active`` are ids of its containers."""
        if id(value) in active:  # an object that refers to itself
            yield b'again'
            return
        yield type(value).__qualname__.encode()
        if isinstance(value, _PLAIN):
            yield repr(value).encode()
            return
        if type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            yield f'{value.dtype.descr} {value.shape}'.encode()
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            return
        inner = active | {id(value)}
        if isinstance(value, Set):
            yield from sorted(b''.join(self._parts(item, inner)) for item in value)
        elif isinstance(value, types.FunctionType | type):
            if id(value) not in self._known:
                digest = self._digest(_contents(value), inner)
                self._known[id(value)] = digest
                self._kept.append(value)
            yield self._known[id(value)]
        else:
            contents = _contents(value)
            yield str(len(contents)).encode()
            for item in contents:
                yield from self._parts(item, inner)


def _contents(value: Any) -> list[Any]:
    """Return the values that make up another one."""
    if type(value) in (list, tuple, np.ndarray):
        return list(value)
    if type(value) in (dict, types.MappingProxyType):
        return [part for item in value.items() for part in item]
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        attributes = [item for item in sorted(vars(value).items()) if item[0] != '__wrapped__']
        return [
            value.__qualname__,
            value.__code__,
            value.__defaults__,
            value.__kwdefaults__,
            cells,
            *_globals_of(value),
            *attributes,
        ]
    if isinstance(value, types.CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars
        counts = value.co_argcount, value.co_kwonlyargcount, value.co_flags
        return [value.co_code, value.co_exceptiontable, value.co_consts, *names, *counts]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.BuiltinFunctionType):  # of a module, or a method such as dict.get
        owner = value.__self__
        return [value.__qualname__, owner.__name__ if isinstance(owner, types.ModuleType) else owner]
    if isinstance(value, type):
        return [value.__qualname__, *(_members_of(value) if _is_users(value) else [value.__module__])]
    if isinstance(value, types.ModuleType | np.ufunc):
        return [getattr(value, '__qualname__', value.__name__)]
    if (torch := sys.modules.get('torch')) is not None and isinstance(value, torch.Tensor) and _is_dense(value):
        content = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), tuple(value.shape), content.numpy()]
    functions = [vars(kind).get('__call__') for kind in type(value).__mro__]
    wrapped = getattr(value, '__wrapped__', None)
    called = [fn for fn in (*functions, wrapped) if isinstance(fn, types.FunctionType)]
    return [*_state_of(value, bool(called)), *_constants_of(type(value)), *called]


def _is_dense(tensor: Any) -> bool:
    return tensor.device.type == 'cpu' and str(tensor.layout) == 'torch.strided' and not tensor.is_quantized


def _state_of(value: Any, is_function: bool) -> list[Any]:
    """Return what an object is pickled as; the name of its type for a function of a library that cannot be pickled."""
    registered = copyreg.dispatch_table.get(type(value))
    try:
        reduced = value.__reduce_ex__(4) if registered is None else registered(value)
    except TypeError:
        if not is_function:
            raise
        return [type(value).__qualname__]
    if isinstance(reduced, str):
        return [reduced]
    return [*reduced[:3], *(None if items is None else list(items) for items in reduced[3:5])]


def _is_users(value: types.FunctionType | types.ModuleType | type) -> bool:
    """Return whether code is the user's: of no folder of libraries, or defined in a function."""
    if isinstance(value, types.FunctionType):
        return _is_users_file(value.__code__.co_filename)
    if isinstance(value, type):
        if '<locals>' in value.__qualname__:  # others may have this name
            return True
        module = sys.modules.get(value.__module__)
        return module is not None and _is_users(module)
    return value.__name__ == '__main__' or _is_users_file(getattr(value, '__file__', None))


@functools.lru_cache(1024)
def _is_users_file(file: str | None) -> bool:
    if file is None or file.startswith('<frozen'):
        return False
    return not os.path.realpath(file).startswith(_LIBRARIES)


def _members_of(kind: type) -> list[Any]:
    """Return the bases, functions and values of a class."""
    members: list[Any] = [kind.__bases__]
    for name, member in sorted(vars(kind).items()):
        functions = _accessors(member)
        if functions:
            members += functions
        elif not (name.startswith('__') or name in _OF_ABSTRACT_CLASSES or isinstance(member, _HOLD_NOTHING)):
            members.append((name, member))
    return members


def _accessors(member: Any) -> list[types.FunctionType]:
    """Return the functions of a method, also of a static or class method or a property."""
    parts = (member, *(getattr(member, name, None) for name in ('__func__', 'fget', 'func', '__wrapped__')))
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _construction(fn: Any) -> list[Any]:
    """Return what a class is called by, and its constants; nothing for other functions."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not isinstance(fn, type):
        return []
    methods = [getattr(fn, name) for name in ('__new__', '__init__')]
    return [*_constants_of(fn), *(method for method in methods if isinstance(method, types.FunctionType))]


def _constants_of(kind: type) -> list[tuple[str, Any]]:
    """Return the attributes of a class, and of its bases, that are constants."""
    members = [member for base in kind.__mro__ for member in sorted(vars(base).items())]
    return [member for member in members if not member[0].startswith('__') and _is_constant(member[1])]


def _globals_of(fn: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function reads by global names that it does not write: constants, and if it is the user's, all."""
    read, written, used, codes = set[str](), set[str](), set[str](), [fn.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]  # of functions within
        used.update(code.co_names)
        for instruction in dis.get_instructions(code):
            if instruction.opname in ('LOAD_GLOBAL', 'LOAD_NAME'):
                read.add(instruction.argval)
            elif instruction.opname in ('STORE_GLOBAL', 'DELETE_GLOBAL'):
                written.add(instruction.argval)
    values = {name: fn.__globals__[name] for name in sorted(read - written) if name in fn.__globals__}
    if not _is_users(fn):
        return [(name, value) for name, value in values.items() if _is_constant(value)]
    out = []
    for name, value in values.items():
        if isinstance(value, types.ModuleType) and _is_users(value):
            attributes: Mapping[str, Any] = {name: vars(value)[name] for name in sorted(used & vars(value).keys())}
            out += [(f'{name}.{attribute}', _named(part)) for attribute, part in attributes.items()]
        elif not isinstance(value, _HOLD_NOTHING):
            out.append((name, _named(value)))
    return out


def _named(value: Any) -> Any:
    """Return a value; for a function of a library, its name."""
    if isinstance(value, types.FunctionType) and not _is_users(value):
        return f'{value.__module__}.{value.__qualname__}'
    return value


def _is_constant(value: Any) -> bool:
    """Return whether a value is plain, an array, or a tuple of constants: others may change by themselves."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, _PLAIN) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ...  # a variable that was not assigned yet
