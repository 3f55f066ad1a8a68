"""Identities of functions, for caches that outlive the process."""

import dis
import functools
import hashlib
import types
from collections.abc import Iterator, Set
from typing import Any, Final

import numpy as np

from granular.aio.runtime.user_functions import name_of
from granular.errors import InvalidArgumentError

_PLAIN: Final = (type(None), type(...), bool, int, float, complex, str, bytes, np.generic)


def identity_of(fn: Any) -> str:
    """Return the name of a function and a digest of its code and of the values that it holds.

    These are its default arguments, the variables of its closure, the constants that it reads by a global name or has
    as attributes, the arguments of a partial, and the attributes of an object whose method it is, also those of its
    class that are constants; of a class, these and its constructor; of one that a function made, these and its methods.
    The digest is the same in every process that runs the same release of Python. Functions that it calls by a global
    name are not part of it. A value that cannot be described, such as a lock, is refused.
    """
    digest = hashlib.sha256()
    try:
        for value in (fn, *_construction(fn)):
            for part in _parts(value, set()):
                digest.update(b'%d:' % len(part))
                digest.update(part)
    except Exception as error:
        raise InvalidArgumentError(f'{name_of(fn)} has no identity of its own: {error}') from error
    return f'{name_of(fn)} {digest.hexdigest()[:16]}'


def _parts(value: Any, active: set[int]) -> Iterator[bytes | memoryview]:
    """Yield bytes that describe a value, and differ for values that differ; ``active`` are ids of its containers."""
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
        yield from sorted(b''.join(_parts(item, inner)) for item in value)
        return
    contents = _contents(value)
    yield str(len(contents)).encode()
    for item in contents:
        yield from _parts(item, inner)


def _contents(value: Any) -> list[Any]:
    """Return the values that make up another one."""
    if type(value) in (list, tuple, np.ndarray):
        return list(value)
    if type(value) in (dict, types.MappingProxyType):
        return [part for item in value.items() for part in item]
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        constants = [*_constants(value), *(item for item in sorted(vars(value).items()) if _is_constant(item[1]))]
        return [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, cells, *constants]
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
    if isinstance(value, type) and '<locals>' in value.__qualname__:  # others may have this name
        parts = [part for _, member in sorted(vars(value).items()) for part in _accessors(member)]
        return [value.__qualname__, value.__bases__, *_constants_of(value), *parts]
    if isinstance(value, type | types.ModuleType | np.ufunc):
        return [getattr(value, '__qualname__', value.__name__)]
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        state: list[Any] = [reduced]
    else:
        state = [*reduced[:3], *(None if items is None else list(items) for items in reduced[3:5])]
    functions = [vars(kind).get('__call__') for kind in type(value).__mro__]
    wrapped = getattr(value, '__wrapped__', None)
    called = [fn for fn in (*functions, wrapped) if isinstance(fn, types.FunctionType)]
    return [*state, *_constants_of(type(value)), *called]


def _accessors(member: Any) -> list[types.FunctionType]:
    """Return the functions of a method, also of a static or class method or a property."""
    parts = (member, *(getattr(member, name, None) for name in ('__func__', 'fget', '__wrapped__')))
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


def _constants(fn: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the global names that a function reads, and does not write, whose values are constants."""
    read, written, codes = set[str](), set[str](), [fn.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]  # of functions within
        for instruction in dis.get_instructions(code):
            if instruction.opname in ('LOAD_GLOBAL', 'STORE_GLOBAL'):
                (read if instruction.opname == 'LOAD_GLOBAL' else written).add(instruction.argval)
    values = {name: fn.__globals__[name] for name in sorted(read - written) if name in fn.__globals__}
    return [(name, value) for name, value in values.items() if _is_constant(value)]


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
