"""File systems of fsspec that the user has made: ``granular.Path(url, fs=filesystem)``.

Those of s3fs, gcsfs and adlfs become stores of this library, whose requests use the server, the options and the
credentials of the file system. All others are used through their own methods.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any, Final

from granular._support.redact import hidden, protect
from granular.aio.stores import endpoints
from granular.aio.stores.lent import LENT, options_of
from granular.aio.stores.options import secrets_in
from granular.aio.stores.s3 import options as s3options
from granular.errors import InvalidArgumentError

# Options of all file systems, and of each package, that tune buffers, listings and connections of their own: these
# have no effect here. IOConfig has such settings.
_TUNING: Final = (
    *('batch_size', 'default_cache_type', 'default_fill_cache', 'listings_expiry_time', 'max_concurrency', 'max_paths'),
    *('skip_instance_cache', 'use_listings_cache'),
)
_HONOURED: Final[Mapping[str, tuple[str, ...]]] = {
    's3fs': (
        *('anon', 'client_kwargs', 'config_kwargs', 'endpoint_url', 'key', 'password', 'profile', 'requester_pays'),
        *('s3_additional_kwargs', 'secret', 'session', 'token', 'use_ssl', 'username'),
        *('cache_regions', 'default_block_size', 'local_expiry_check'),  # tuning
    ),
    'gcsfs': (
        *('access', 'consistency', 'endpoint_url', 'project', 'requester_pays', 'token'),
        *('block_size', 'cache_timeout', 'check_connection', 'requests_timeout', 'secure_serialize', 'timeout'),
    ),
    'fsspec.implementations.local': (),
    'adlfs': (
        *('account_host', 'account_key', 'account_name', 'anon', 'client_id', 'client_secret', 'connection_string'),
        *('credential', 'location_mode', 'sas_token', 'tenant_id'),
        *('assume_container_exists', 'blocksize', 'connection_timeout', 'read_timeout', 'socket_timeout', 'timeout'),
    ),
}
_CLIENT_KWARGS: Final = (
    *('aws_access_key_id', 'aws_secret_access_key', 'aws_session_token', 'endpoint_url', 'region_name', 'use_ssl'),
    'verify',
)
_KEYS: Final[Mapping[str, str]] = {
    'key': 'aws_access_key_id',
    'secret': 'aws_secret_access_key',
    'token': 'aws_session_token',
}


def adopt(fs: Any, path: Any) -> tuple[str, dict[str, Any], Any]:
    """Return the address and the options of a store for a path in a file system of fsspec.

    The path is an address of the file system, or has no scheme, as its methods take it.

    Returns:
      The address, the options, and the file system if the store is to use its methods, else None.
    """
    from fsspec.spec import AbstractFileSystem

    if not isinstance(fs, AbstractFileSystem):
        raise InvalidArgumentError(
            f'fs: expected a file system of fsspec, such as s3fs.S3FileSystem(), got {type(fs).__name__}'
        )
    if isinstance(path, os.PathLike):
        path = os.fsdecode(path)
    if not isinstance(path, str):
        raise InvalidArgumentError(f'expected an address in the file system, got {type(path).__name__}')
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    scheme, found, _ = path.partition('://')
    if found and scheme not in protocols:
        expected = ' or '.join(f'{protocol}://' for protocol in protocols)
        raise InvalidArgumentError(f'{hidden(path)}: expected an address of the file system, {expected}')
    url = path if found else f'{protocols[0]}://{path.lstrip("/")}'
    options = options_of(fs)
    protect(secrets_in(options))
    package = type(fs).__module__
    if package != 'fsspec.implementations.local':
        package = package.partition('.')[0]
    if package not in _HONOURED:
        return url, options, fs
    name = hidden(url)
    _refuse(name, [option for option in options if options[option]], (*_HONOURED[package], *_TUNING))
    match package:
        case 'fsspec.implementations.local':
            return path, {}, None
        case 's3fs':
            return url, _s3_options(fs, options, name), None
        case 'gcsfs':
            return url, _gcs_options(fs, name), None
    # The signature of an address is a credential.
    endpoint = fs.service_client.url.partition('?')[0].rstrip('/')
    return url, {'endpoint_url': endpoint, **({'anon': True} if options.get('anon') else {}), LENT: fs}, None


def _refuse(name: str, given: Collection[str], honoured: Collection[str], kind: str = '') -> None:
    if refused := sorted(set(given) - set(honoured)):
        raise InvalidArgumentError(
            f'{name}: the file system has {kind}options {refused}, which requests of granular cannot honour: pass one '
            f'without them'
        )


def _s3_options(fs: Any, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options of an ``S3Store`` that sends its requests as an s3fs does."""
    client, config = dict(fs.client_kwargs), dict(fs.config_kwargs)
    _refuse(name, client, _CLIENT_KWARGS, 'client_kwargs ')
    signature = config.pop('signature_version', 's3v4')
    if signature not in ('s3v4', 'v4') and isinstance(signature, str):
        _refuse(name, ['signature_version'], (), 'config_kwargs ')
    region = client.get('region_name') or config.pop('region_name', None)
    if region is None and given.get('session') is not None:
        region = fs.session.get_config_variable('region')
    options = {
        'endpoint_url': fs.endpoint_url or client.get('endpoint_url'),
        'region': region,
        'profile': fs.kwargs.get('profile') or getattr(given.get('session'), 'profile', None),
        'requester_pays': bool(fs.req_kw),  # releases before 2026.9 have no attribute requester_pays
        's3_additional_kwargs': fs.s3_additional_kwargs,
        'config_kwargs': config,
        'tls_verify': client.get('verify'),
        'anon': fs.anon or not isinstance(signature, str),
    }
    options = {option: value for option, value in options.items() if value or (option, value) == ('tls_verify', False)}
    s3options.check(name, options)
    if not client.get('use_ssl', fs.use_ssl) and endpoints.s3(options, os.environ).url is None:
        _refuse(name, ['use_ssl'], ())
    if 'anon' in options:
        return options
    keys = {option: getattr(fs, option) or client.get(name) for option, name in _KEYS.items()}
    return {**options, **(keys if keys['key'] and keys['secret'] else {LENT: fs})}


def _gcs_options(fs: Any, name: str) -> dict[str, Any]:
    """Return the options of a ``GCSStore`` that sends its requests as a gcsfs does."""
    endpoint = fs.base.removesuffix('/storage/v1/')
    if '.mtls.' in endpoint:
        raise InvalidArgumentError(
            f'{name}: the file system uses {endpoint}, for which granular has no client certificate: set '
            f'GOOGLE_API_USE_MTLS_ENDPOINT=never'
        )
    options = {'endpoint_url': endpoint, 'project': fs.project, 'requester_pays': fs.requester_pays}
    options = {option: value for option, value in options.items() if value}
    return {**options, 'anon': True} if fs.credentials.credentials is None else {**options, LENT: fs}
