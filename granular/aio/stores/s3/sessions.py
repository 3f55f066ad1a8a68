"""Sessions of directory buckets (S3 Express): keys that the bucket issues for some minutes."""

import time
from typing import Final, NamedTuple

from granular.aio.http.messages import http_date
from granular.aio.http.transport import Answer
from granular.aio.stores.s3.documents import parse, text_of, time_of
from granular.errors import BadReplyError

TOKEN: Final = 'x-amz-s3session-token'  # header of the requests of a session
_SPARE: Final = 60.0  # maximum seconds for which a signed request is used, and before its session expires


class Session(NamedTuple):
    """The keys of a session."""

    access_key: str
    secret_key: str
    token: None  # that of a session has a header of its own
    session_token: str
    expires: float  # time after which no request is signed, by the monotonic clock
    signed_for: float  # seconds for which a signed request is used


def opened(answer: Answer, name: str) -> Session:
    """Return the session that a bucket has opened."""
    credentials = parse(answer.body, name, 'CreateSessionResult').find('Credentials')
    if credentials is None:
        raise BadReplyError(f'{name}: expected the keys of a session, got none')
    texts = [text_of(credentials, tag, name) for tag in ('AccessKeyId', 'SecretAccessKey', 'SessionToken')]
    date = http_date(answer.head.headers.get('date', ''))  # of the clock of the store, as the expiry is
    now = time.time() if date is None else date.timestamp()
    left = time_of(credentials, 'Expiration', name) - now
    spare = min(_SPARE, left / 4)
    return Session(texts[0], texts[1], None, texts[2], time.monotonic() + left - 2 * spare, spare)
