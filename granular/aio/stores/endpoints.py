"""Endpoints of S3 and GCS: the server of an address, from options, environment and AWS configuration files.

botocore is not imported, so that a store knows its endpoint when it is constructed, at a cost of some microseconds: the
endpoint is part of the identity of all that is cached of the store, and is the one that the store uses.
"""

import configparser
import functools
import hashlib
import os
import shlex
import urllib.parse
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from granular.aio.stores.lent import LENT, options_of
from granular.errors import InvalidArgumentError

Environment = Mapping[str, str]
Section = Mapping[str, str | Mapping[str, str]]

_PARTITIONS: Final[Mapping[str, str]] = {
    'cn-': 'aws-cn', 'us-gov-': 'aws-us-gov', 'eusc-': 'aws-eusc', 'us-iso-': 'aws-iso', 'us-isob-': 'aws-iso-b',
    'eu-isoe-': 'aws-iso-e', 'us-isof-': 'aws-iso-f',
}  # fmt: skip
GOOGLE: Final = 'https://storage.googleapis.com'
"""Google's own endpoint."""


class S3Endpoint(NamedTuple):
    """The server of an S3 bucket."""

    url: str | None  # None for Amazon's own, which follows from the region and the bucket's name
    region: str
    # Digest of the settings that select the credentials, because servers of other vendors may have a bucket of the same
    # name for each account; empty for Amazon's own.
    account: str

    @property
    def identity(self) -> str:
        """Namespace in which a bucket's name is unique."""
        if self.url is not None:
            return f'{self.url.rstrip("/")} {self.account}'
        return next((name for start, name in _PARTITIONS.items() if self.region.startswith(start)), 'aws')


def s3(options: Mapping[str, Any], environment: Environment) -> S3Endpoint:
    """Return the endpoint of an S3 store, with the precedence of botocore."""
    client = options.get('client_kwargs') or {}
    profile, services = _profile(options, environment)
    url = options.get('endpoint_url') or client.get('endpoint_url')
    ignored = environment.get('AWS_IGNORE_CONFIGURED_ENDPOINT_URLS') or profile.get('ignore_configured_endpoint_urls')
    if not url and str(ignored).lower() != 'true':
        service = services.get('s3', {})
        url = (
            environment.get('AWS_ENDPOINT_URL_S3')
            or environment.get('AWS_ENDPOINT_URL')
            or (service.get('endpoint_url') if isinstance(service, Mapping) else None)
            or profile.get('endpoint_url')
        )
    region = (
        options.get('region')
        or client.get('region_name')
        or environment.get('AWS_REGION')
        or environment.get('AWS_DEFAULT_REGION')
        or profile.get('region')
        or 'us-east-1'
    )
    return S3Endpoint(str(url) if url else None, str(region), _account(options, environment) if url else '')


def gcs(options: Mapping[str, Any], environment: Environment) -> str:
    """Return the endpoint of a GCS store, with the precedence of Google's own libraries."""
    if url := options.get('endpoint_url'):
        return str(url)
    return (
        emulator(environment)
        or f'https://storage.{environment.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"}'
    )


def emulator(environment: Environment) -> str:
    host = environment.get('STORAGE_EMULATOR_HOST', '')
    if host in ('', 'default'):
        return ''
    return host if host.startswith(('http://', 'https://')) else f'http://{host}'


def _account(options: Mapping[str, Any], environment: Environment) -> str:
    """Return a digest of the settings that select the credentials; the credentials are not looked up for it."""
    names = ('AWS_ACCESS_KEY_ID', 'AWS_DEFAULT_PROFILE', 'AWS_PROFILE')
    if options.get('anon'):
        parts: tuple[Any, ...] = ('anon',)
    elif options.get('key'):
        parts = 'key', options['key']
    else:
        parts = options.get('profile'), *map(environment.get, names)
        if (fs := options.get(LENT)) is not None and options_of(fs).get('session') is not None:
            parts += (hash(fs),)  # the credentials are those of the session alone
    return hashlib.sha256(repr(('granular', *parts)).encode()).hexdigest()[:16]


def _profile(options: Mapping[str, Any], environment: Environment) -> tuple[Section, Section]:
    """Return the section of the profile, and the services section that it names."""
    config = _sections(environment.get('AWS_CONFIG_FILE', '~/.aws/config'))
    credentials = _sections(environment.get('AWS_SHARED_CREDENTIALS_FILE', '~/.aws/credentials'))
    name = options.get('profile') or environment.get('AWS_DEFAULT_PROFILE', environment.get('AWS_PROFILE', 'default'))
    sections = {_title(title): section for title, section in config.items()}
    # In the credentials file, sections are titled with the plain profile name, and their values take precedence.
    profile = {**sections.get(('profile', name), {}), **credentials.get(name, {})}
    return profile, sections.get(('services', str(profile.get('services'))), {})


def _title(title: str) -> tuple[str, str]:
    if title == 'default':
        return 'profile', title
    try:
        kind, name = shlex.split(title)
    except ValueError:
        return '', title
    # Like botocore, compare only the beginning of the kind.
    return next((valid for valid in ('profile', 'services') if kind.startswith(valid)), ''), name


def _sections(path: str) -> Mapping[str, Section]:
    """Return the sections of an AWS configuration file; none if the file does not exist."""
    path = os.path.expanduser(os.path.expandvars(path))
    try:
        info = os.stat(path)
    except OSError:
        return {}
    return _parse(path, info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino)


@functools.lru_cache(maxsize=16)
def _parse(path: str, *version: int) -> Mapping[str, Section]:
    if not os.path.isfile(path):
        return {}
    parser = configparser.RawConfigParser()
    try:
        parser.read([path])
        return {title: {name: _nested(value) for name, value in parser.items(title)} for title in parser.sections()}
    except (configparser.Error, ValueError) as error:
        # The parser's message is left out, because it may quote a secret.
        raise InvalidArgumentError(f'{path}: is not an AWS configuration file: {type(error).__name__}') from None


def _nested(value: str) -> str | Mapping[str, str]:
    """Parse a value, or the values that are indented under a name."""
    if not value.startswith('\n'):
        return value
    pairs = (line.split('=', 1) for line in value.splitlines() if line.strip())
    return {name.strip(): text.strip() for name, text in pairs}


def check(root: str, endpoint: Any) -> str:
    """Return the http(s) URL of a server, without a trailing slash.

    It must not have credentials, a query or a fragment, which are not shown.
    """
    try:
        parts = urllib.parse.urlsplit(endpoint)
        valid = parts.scheme in ('http', 'https') and parts.hostname and parts.port != 0
    except (ValueError, AttributeError):  # an invalid host or port, or no text
        valid = False
    if valid and not (parts.username or parts.password or parts.query or parts.fragment):
        return str(endpoint).rstrip('/')
    got = '' if not isinstance(endpoint, str) or set('@?#') & set(endpoint) else f', got {endpoint!r:.200}'
    raise InvalidArgumentError(f'{root}: expected an endpoint_url of http(s)://host, without credentials{got}')
