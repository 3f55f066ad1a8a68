"""Address and signature of the requests to a bucket, as botocore decides them.

A client of botocore is asked by a request that it would send, and that is not sent. So the configuration of AWS, FIPS,
dual-stack and accelerated endpoints, access points, directory buckets and odd names mean what they mean elsewhere.
"""

import io
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from granular.aio.stores import endpoints
from granular.aio.stores.endpoints import S3Endpoint
from granular.aio.stores.s3.sdk import session_of, setting_errors
from granular.errors import InvalidArgumentError

_SIGNED: Final = re.compile(r'(AWS4-[A-Z0-9-]+) Credential=[^/]*/\d+/(?:([^/]*)/)?([^/]*)/aws4_request,.*')
_SESSION: Final = (
    '<CreateSessionResult><Credentials><AccessKeyId>x</AccessKeyId><SecretAccessKey>x</SecretAccessKey><SessionToken>x'
    '</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>'
)

ASYMMETRIC: Final = 'AWS4-ECDSA-P256-SHA256'


class Route(NamedTuple):
    """Address and signature of the requests to a bucket."""

    base: str  # the URL of the bucket, without a slash at its end
    algorithm: str  # of signatures; empty if requests are not signed
    service: str  # which the signatures name
    region: str  # likewise; the regions, for asymmetric signatures
    in_session: bool  # True if requests are signed by keys that the bucket issues (CreateSession)
    signs_bodies: bool  # True if the hash of a body is signed even over TLS
    ca_bundle: str | None  # the file of the authorities that the configuration trusts
    proxies: Mapping[str, str] | None  # those of the options, by scheme


def route_of(root: str, options: Mapping[str, Any], endpoint: S3Endpoint, region: str) -> Route:
    """Ask botocore for the route of a bucket, with the given options, in a region. Call it on a worker thread."""
    if endpoint.url is not None:
        endpoints.check(root, endpoint.url)
    with setting_errors(root):
        session = session_of(options.get('profile'))
        client = session.create_client(
            's3', region_name=region, endpoint_url=endpoint.url, verify=False, config=_config(session, options),
            aws_access_key_id='key', aws_secret_access_key='secret',
        )  # fmt: skip
        requests: list[Any] = []

        def answer(request: Any, **event: Any) -> Any:
            from botocore.awsrequest import AWSResponse

            requests.append(request)
            return AWSResponse(request.url, 200, {}, _Body(_SESSION.encode()))

        try:
            client.meta.events.register_first('before-send.s3', answer)
            client.get_object(Bucket=root.removeprefix('s3://'), Key='key')
            settings = client.meta.config
            signs_bodies = bool((settings.s3 or {}).get('payload_signing_enabled'))
        finally:
            client.close()
        bundle = session.get_config_variable('ca_bundle') or os.environ.get('REQUESTS_CA_BUNDLE')
    request = requests[-1]
    base = urllib.parse.urlsplit(request.url)._replace(query='').geturl().removesuffix('/key')
    header = request.headers.get('Authorization', '')
    authorization = header.decode() if isinstance(header, bytes) else str(header)
    if not authorization:
        return Route(base, '', '', region, False, signs_bodies, bundle, settings.proxies)
    if (signed := _SIGNED.fullmatch(authorization)) is None:
        raise InvalidArgumentError(
            f'{root}: expected signatures of version 4, got signature_version in the configuration of AWS or '
            f'config_kwargs that selects others: remove it'
        )
    algorithm, signing_region, service = signed.groups()
    if signing_region is None:
        names = request.headers.get('X-Amz-Region-Set', '')
        signing_region = names.decode() if isinstance(names, bytes) else str(names)
    return Route(base, algorithm, service, signing_region, len(requests) > 1, signs_bodies, bundle, settings.proxies)


def _config(session: Any, options: Mapping[str, Any]) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config

    # The endpoint is known already: it is part of the identity of the store.
    settings = {**(options.get('config_kwargs') or {}), 'ignore_configured_endpoint_urls': True}
    s3 = dict(settings.get('s3') or {})
    if not {**(session.get_config_variable('s3') or {}), **s3}.get('us_east_1_regional_endpoint'):
        # botocore's default is s3.amazonaws.com, which may redirect, and takes no dual stack.
        s3['us_east_1_regional_endpoint'] = 'regional'
    if options.get('anon'):
        settings['signature_version'] = UNSIGNED
    return Config(**{**settings, 's3': s3})


class _Body(io.BytesIO):
    """The body of a reply to botocore, which reads it by pieces."""

    def stream(self, **arguments: Any) -> Iterator[bytes]:
        yield self.read()
