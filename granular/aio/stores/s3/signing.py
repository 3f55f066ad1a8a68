"""S3 signatures by a clock that may differ from this machine's."""

import datetime
from collections.abc import Mapping
from typing import Any, Final

from botocore.auth import AUTH_TYPE_MAPS, SIGV4_TIMESTAMP, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config

from granular.aio.stores.s3.route import ASYMMETRIC, Route

UNSIGNED: Final = 'UNSIGNED-PAYLOAD'


def signed(
    route: Route,
    keys: Any,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | memoryview,
    payload: str,
    skew: datetime.timedelta,
) -> dict[str, str]:
    """Return the headers of a request with a signature, given the hash of its body or ``UNSIGNED``."""
    request = AWSRequest(method, url, headers=headers)
    if route.algorithm == ASYMMETRIC:
        # The signer of botocore[crt] has a clock of its own, and computes the hash itself.
        request.data = bytes(body)
        request.context['client_config'] = Config(s3={'payload_signing_enabled': payload != UNSIGNED})
        AUTH_TYPE_MAPS['s3v4a'](keys, route.service, route.region).add_auth(request)
    else:
        _Signer(keys, route, payload, skew).add_auth(request)
    return dict(request.headers.items())


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """botocore's signer, for a clock that is ahead by ``skew``."""

    def __init__(self, keys: Any, route: Route, payload: str, skew: datetime.timedelta) -> None:
        super().__init__(keys, route.service, route.region)
        self._skew, self._payload = skew, payload

    def payload(self, request: AWSRequest) -> str:
        return self._payload

    def add_auth(self, request: AWSRequest) -> None:
        if not self._skew:
            super().add_auth(request)
            return
        now = datetime.datetime.now(datetime.UTC) + self._skew
        request.context['timestamp'] = now.strftime(SIGV4_TIMESTAMP)
        self._modify_request_before_signing(request)
        text = self.string_to_sign(request, self.canonical_request(request))
        self._inject_signature_to_request(request, self.signature(text, request))
