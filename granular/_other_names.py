"""Answers to the names that arguments and methods have in other libraries, or in another place of this one."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from granular.errors import InvalidArgumentError, UnknownArgumentError

Function = TypeVar('Function', bound=Callable[..., Any])

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


def answering(**answers: str) -> Callable[[Function], Function]:
    """Make a function, or a constructor, answer names of arguments that it does not have by what to pass instead: by
    the given answers, or else by names that it has.
    """

    def decorate(function: Function) -> Function:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except UnknownArgumentError:
                raise
            except TypeError:
                refuse_unknown(function, args, kwargs, answers)
                raise

        return cast(Function, call)

    return decorate


def refuse_unknown(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Iterable[str], answers: Mapping[str, str]
) -> None:
    """Raise an ``UnknownArgumentError`` if a function has not all of some arguments, with answers to the others."""
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.name not in ('self', 'cls')]
    unknown = [name for name in kwargs if name not in known]
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    owner = function.__qualname__.replace('MapOperations', 'MapDataset')
    if owner.endswith('.__init__'):
        owner = type(args[0]).__name__
    parts = []
    for name in unknown:
        ours = answers.get(name) or ' or '.join(difflib.get_close_matches(name, known, 2))
        parts.append(f'for {name}, pass {ours}' if ours else f'expected some of {known}')
    raise UnknownArgumentError(f'{owner}: no arguments {unknown}: {"; ".join(dict.fromkeys(parts))}') from None


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


class Unindexed:
    """Base of streams, whose elements have no index.

    It has neither ``__len__``, by which ``list(stream)`` and ``bool(stream)`` would raise its error, nor ``__next__``,
    by which a stream would be an ``Iterator``.
    """

    if not TYPE_CHECKING:

        def __getitem__(self, index):
            raise InvalidArgumentError(
                f'{type(self).__name__}: a stream has no indices, only `for`: index the MapDataset, before '
                f'to_iter_dataset(); for torch, pass granular.integrations.torch.IterableDataset(stream)'
            )


class Elementless:
    """Base of datasets of fields, which have no elements, unless a subclass has a ``__getitem__`` of its own."""

    def __getitem__(self, index: Any) -> Any:
        mode = ' '.join(getattr(self, 'fields', None) or ('x', 'y'))
        raise InvalidArgumentError(
            f'{type(self).__name__} has fields, but no elements: load them with ModeWrapper(dataset, mode={mode!r})'
        )
