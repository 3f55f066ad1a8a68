"""S3 signatures by a clock that may differ from this machine's."""

import datetime
from typing import Any

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth
from botocore.awsrequest import AWSRequest

UNSIGNED = 'UNSIGNED-PAYLOAD'


class Signer(S3SigV4Auth):  # type: ignore[misc]
    """botocore's signer, for a clock that is ahead by ``skew``, and the hash of a body, or ``UNSIGNED``."""

    def __init__(self, credentials: Any, region: str, skew: datetime.timedelta, payload: str) -> None:
        super().__init__(credentials, 's3', region)
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
