"""Arguments and options that several commands have, and the paths that they open."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

import granular
from granular.errors import InvalidArgumentError

Address = Annotated[
    str, typer.Argument(metavar='URL', help='A path, or an address such as s3://bucket/data.', show_default=False)
]
Json = Annotated[bool, typer.Option('--json', help='Print one JSON document.')]
OpenPath = Callable[[str], granular.Path]

# The options of each kind of store.
_WEB = ('tls_verify',)
_APPLICABLE = {
    's3': ('endpoint_url', 'region', 'profile', 'anon', 'requester_pays', 'config_kwargs', *_WEB),
    'gs': ('endpoint_url', 'anon', 'requester_pays', *_WEB),
    'http': _WEB,
    'https': _WEB,
    'hf': _WEB,
}


def _path(
    url: str,
    *,
    endpoint_url: Annotated[str | None, typer.Option(help='The address of the store, for s3:// and gs://.')] = None,
    region: Annotated[str | None, typer.Option(help='The region of the bucket, for s3://.')] = None,
    profile: Annotated[str | None, typer.Option(help='The profile of the AWS configuration, for s3://.')] = None,
    anon: Annotated[bool, typer.Option('--anon', help='Send no credentials, for s3:// and gs://.')] = False,
    requester_pays: Annotated[
        bool, typer.Option('--requester-pays', help='Pay for the requests, for s3:// and gs://.')
    ] = False,
    addressing_style: Annotated[
        str | None, typer.Option(help='Where requests name the bucket, for s3://: auto, path or virtual.')
    ] = None,
    no_verify: Annotated[bool, typer.Option('--no-verify', help='Trust any certificate of a server.')] = False,
) -> granular.Path:
    """Return the path of an address, with the options that apply to its store."""
    if not url:  # as of an unset variable; an empty path would be the current folder
        raise InvalidArgumentError('expected a path or an address, got an empty text')
    options: dict[str, Any] = {
        'endpoint_url': endpoint_url or None, 'region': region or None, 'profile': profile or None,
        'anon': anon or None, 'requester_pays': requester_pays or None,
        'config_kwargs': {'s3': {'addressing_style': addressing_style}} if addressing_style else None,
        'tls_verify': False if no_verify else None,
    }  # fmt: skip
    names = _APPLICABLE.get(url.partition('://')[0], ())
    return granular.Path(url, **{name: options[name] for name in names if options[name] is not None})


_STORE_OPTIONS = tuple(inspect.signature(_path).parameters.values())[1:]


def with_store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of stores to a command. Its first parameter becomes the function that opens addresses with them.

    ::

        @app.command()
        @with_store_options
        def size(open_path: OpenPath, url: Address) -> None:
            typer.echo(open_path(url).stat().size)
    """

    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        options = {option.name: arguments.pop(option.name) for option in _STORE_OPTIONS}
        command(functools.partial(_path, **options), **arguments)

    own = tuple(inspect.signature(command).parameters.values())[1:]
    # Typer reads the parameters of a command from its signature.
    call.__signature__ = inspect.Signature([*own, *_STORE_OPTIONS])  # type: ignore[attr-defined]
    return call


def pairs(
    option: str, expected: str, texts: list[str] | None, split: Callable[[str, str], tuple[str, ...]] = str.partition
) -> dict[str, str]:
    """Return the values of an option that may be repeated, ``KEY=VALUE``, by key.

    ``split`` is ``str.rpartition`` if keys may contain ``=``, and otherwise values may.
    """
    found: dict[str, str] = {}
    for text in texts or []:
        key, _, value = split(text, '=')
        if not key or not value:
            raise InvalidArgumentError(f'{option}: expected KEY={expected}, got {text}')
        if key in found:
            raise InvalidArgumentError(f'{option}: expected one value for {key}, got {found[key]} and {value}')
        found[key] = value
    return found
