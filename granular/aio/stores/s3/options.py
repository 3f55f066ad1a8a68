"""Options of an S3 bucket: their names, the headers that they stand for, and the URL of the bucket."""

from collections.abc import Mapping
from typing import Any, Final

from granular.aio.stores import endpoints
from granular.aio.stores.base import check_options
from granular.errors import InvalidArgumentError

OPTIONS: Final = (
    *('anon', 'client_kwargs', 'config_kwargs', 'endpoint_url', 'key', 'profile', 'region', 'requester_pays'),
    *('s3_additional_kwargs', 'secret', 'tls_verify', 'token'),
)
# Settings of botocore's client. Except for s3, they have no effect: IOConfig tunes the connections of this library.
_TUNING: Final = (
    *('connect_timeout', 'max_pool_connections', 'read_timeout', 'request_checksum_calculation'),
    *('response_checksum_validation', 'retries', 's3', 'signature_version', 'tcp_keepalive', 'user_agent'),
    'user_agent_extra',
)
_STYLES: Final = ('auto', 'path', 'virtual')
_HEADERS: Final[Mapping[str, str]] = {
    'ACL': 'x-amz-acl',
    'BucketKeyEnabled': 'x-amz-server-side-encryption-bucket-key-enabled',
    'CacheControl': 'cache-control',
    'ContentType': 'content-type',
    'ExpectedBucketOwner': 'x-amz-expected-bucket-owner',
    'GrantFullControl': 'x-amz-grant-full-control',
    'GrantRead': 'x-amz-grant-read',
    'SSEKMSEncryptionContext': 'x-amz-server-side-encryption-context',
    'SSEKMSKeyId': 'x-amz-server-side-encryption-aws-kms-key-id',
    'ServerSideEncryption': 'x-amz-server-side-encryption',
    'StorageClass': 'x-amz-storage-class',
    'Tagging': 'x-amz-tagging',
}


def check(root: str, options: Mapping[str, Any]) -> None:
    """Reject unknown names in options that are mappings, and parts of credentials (InvalidArgumentError)."""
    for label, names, valid in (
        ('client_kwargs', options.get('client_kwargs') or {}, ('endpoint_url', 'region_name')),
        ('config_kwargs', options.get('config_kwargs') or {}, _TUNING),
        ('config_kwargs of s3', (options.get('config_kwargs') or {}).get('s3') or {}, ('addressing_style',)),
        ('s3_additional_kwargs', options.get('s3_additional_kwargs') or {}, tuple(_HEADERS)),
    ):
        check_options(root, names, valid, label)
    for name in ('key', 'secret', 'token', 'profile'):
        if not isinstance(value := options.get(name), str | None):
            raise InvalidArgumentError(f'{root}: expected text for {name}, got {type(value).__name__}')
    if (options.get('key') is None) != (options.get('secret') is None):
        present, absent = ('secret', 'key') if options.get('key') is None else ('key', 'secret')
        raise InvalidArgumentError(f'{root}: expected key= and secret= together, got {present}= without {absent}=')
    if options.get('token') is not None and options.get('key') is None:
        raise InvalidArgumentError(f'{root}: expected key= and secret= with token=, got token= alone')
    addressing(root, options)


def addressing(root: str, options: Mapping[str, Any], configured: str = '') -> str:
    """Return ``'path'`` or ``'virtual'`` for a bucket in the URL's path or host name, or ``'auto'``.

    ``configured`` is the style of the configuration of AWS, if it has one; the options come first.
    """
    given = ((options.get('config_kwargs') or {}).get('s3') or {}).get('addressing_style')
    style = str(given or configured or 'auto')
    if style not in _STYLES:
        source = '' if given else ' in the configuration of AWS'
        raise InvalidArgumentError(f'{root}: expected an addressing_style of {_STYLES}{source}, got {style!r}')
    return style


def written_headers(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of requests that create an object, such as those of its encryption."""
    settings = (options.get('s3_additional_kwargs') or {}).items()
    return {_HEADERS[name]: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings}


def address(root: str, endpoint_url: str | None, region_name: str, style: str) -> str:
    bucket = root.removeprefix('s3://')
    if endpoint_url:
        server = endpoints.check(root, endpoint_url)
        return f'{server}/{bucket}' if style != 'virtual' else server.replace('://', f'://{bucket}.', 1)
    domain = 'amazonaws.com.cn' if region_name.startswith('cn-') else 'amazonaws.com'
    # TLS certificates do not match the host name of a bucket with dots.
    if style == 'path' or (style == 'auto' and '.' in bucket):
        return f'https://s3.{region_name}.{domain}/{bucket}'
    return f'https://{bucket}.s3.{region_name}.{domain}'
