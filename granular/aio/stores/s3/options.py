"""Options of an S3 bucket: their names, and the headers that they stand for."""

from collections.abc import Mapping
from typing import Any, Final

from granular.aio.stores.options import check_options
from granular.errors import InvalidArgumentError

OPTIONS: Final = (
    *('anon', 'client_kwargs', 'config_kwargs', 'endpoint_url', 'key', 'profile', 'region', 'requester_pays'),
    *('s3_additional_kwargs', 'secret', 'tls_verify', 'token'),
)
# Settings of botocore's client: those that say where requests go and how they are signed, and those that have no
# effect, as IOConfig tunes the connections of this library.
_CONFIG: Final = (
    *(
        'auth_scheme_preference',
        'defaults_mode',
        'proxies',
        's3',
        's3_disable_express_session_auth',
        'signature_version',
    ),
    *('sigv4a_signing_region_set', 'use_dualstack_endpoint', 'use_fips_endpoint'),
    *('connect_timeout', 'max_pool_connections', 'read_timeout', 'request_checksum_calculation'),
    *('response_checksum_validation', 'retries', 'tcp_keepalive', 'user_agent', 'user_agent_appid', 'user_agent_extra'),
)
_S3: Final = (
    *('addressing_style', 'payload_signing_enabled', 's3_disable_multiregion_access_points'),
    *('us_east_1_regional_endpoint', 'use_accelerate_endpoint', 'use_arn_region', 'use_dualstack_endpoint'),
)
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


def check_mappings(root: str, options: Mapping[str, Any]) -> None:
    """Reject anything but mappings for the options that are such (InvalidArgumentError)."""
    config = options.get('config_kwargs')
    nested = config if isinstance(config, Mapping) else {}
    proxies = nested.get('proxies')
    for name, value in (
        *((name, options.get(name)) for name in ('client_kwargs', 'config_kwargs', 's3_additional_kwargs')),
        *((f'{name} of config_kwargs', nested.get(name)) for name in ('proxies', 's3')),
    ):
        if not isinstance(value, Mapping | None):
            raise InvalidArgumentError(f'{root}: expected a dict for {name}, got {type(value).__name__}')
    for scheme, address in (proxies or {}).items():
        if not isinstance(address, str):
            raise InvalidArgumentError(
                f'{root}: expected an address for proxies of config_kwargs, got {scheme!r}: {type(address).__name__}'
            )


def check(root: str, options: Mapping[str, Any]) -> None:
    """Reject unknown names in options that are mappings, and parts of credentials (InvalidArgumentError)."""
    for label, names, valid in (
        ('client_kwargs', options.get('client_kwargs') or {}, ('endpoint_url', 'region_name')),
        ('config_kwargs', options.get('config_kwargs') or {}, _CONFIG),
        ('config_kwargs of s3', (options.get('config_kwargs') or {}).get('s3') or {}, _S3),
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


def written_headers(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of requests that create an object, such as those of its encryption."""
    settings = (options.get('s3_additional_kwargs') or {}).items()
    return {_HEADERS[name]: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings}
