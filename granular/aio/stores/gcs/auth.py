"""Google credentials, found and renewed by google-auth. Finding and renewing block: they run on worker threads."""

import contextlib
import datetime
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from granular._support.lazy import import_extra
from granular._support.redact import hidden
from granular._support.text import logger
from granular.aio.stores.errors import is_one_word, translated, unreadable_credentials, untrusted
from granular.aio.stores.lent import LENT
from granular.errors import AccessDeniedError, GranularError, InvalidArgumentError, StoreError
from granular.formats.base import parse_json

_SCOPES: Final = ('https://www.googleapis.com/auth/devstorage.full_control',)
_RENEW_BEFORE: Final = 300.0  # seconds before the expiry of a token in which it is renewed
_RENEW_INTERVAL: Final = 30.0  # minimum seconds between two attempts to renew a valid token
_TOKEN_NAMES: Final = ('anon', 'google_default', 'cloud')


class Login:
    """Credentials, and the project that they belong to, which is empty if it is unknown.

    ``find`` returns the credentials of google-auth; None to send none. ``request`` returns what sends the requests to
    the token server.
    """

    def __init__(self, root: str, find: Callable[[], Any], project: str, request: Callable[[], Any]) -> None:
        self._root, self._request = root, request
        self._find, self.project = find, project
        self._renewed = float('-inf')

    @property
    def credentials(self) -> Any:
        """The credentials of google-auth; None to send none."""
        return self._find()

    @property
    def stale(self) -> bool:
        """True if the token is missing or about to expire."""
        left = self._left
        # The metadata server returns the same token again until shortly before it expires.
        return left <= 0 or (left < _RENEW_BEFORE and time.monotonic() - self._renewed > _RENEW_INTERVAL)

    @property
    def _left(self) -> float:
        """The seconds for which the token is valid; 0 if there is none."""
        if self.credentials is None:
            return math.inf
        if not self.credentials.token:
            return 0.0
        expiry = self.credentials.expiry
        if expiry is None:
            return math.inf
        return float((expiry.replace(tzinfo=datetime.UTC) - datetime.datetime.now(datetime.UTC)).total_seconds())

    def renew(self) -> None:
        with google_errors(self._root):
            self.credentials.refresh(self._request())
        self._renewed = time.monotonic()

    def renew_stale(self) -> None:
        """Get a new token; if none is available, the current one is used as long as it is valid."""
        try:
            self.renew()
        except StoreError as error:
            if (left := self._left) <= 0:
                raise
            self._renewed = time.monotonic()
            logger.warning('%s: using the current token, which is valid for %.0f s', error, left)

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.credentials is not None:
            with google_errors(self._root):
                self.credentials.apply(headers)
            if not is_one_word(headers.get('authorization', '').removeprefix('Bearer ')):
                raise AccessDeniedError(
                    f'{self._root}: the credentials have a space, a newline or another character that no access token '
                    f'has: check the end of token='
                )
        return headers


def log_in(root: str, options: Mapping[str, Any], emulated: bool, timeout: float) -> Login:
    """Find credentials.

    The option ``token`` selects them: ``'anon'``, ``'google_default'``, ``'cloud'`` (the metadata server), the path of
    one of Google's JSON files or its content as a dict, an access token, or credentials of google-auth. Without it,
    :func:`google.auth.default` finds them: GOOGLE_APPLICATION_CREDENTIALS, gcloud's, the metadata server's.

    Requests are anonymous with ``anon=True`` or ``token='anon'``, and to an emulator if neither ``token`` nor
    GOOGLE_APPLICATION_CREDENTIALS is given. They never become anonymous because no credentials were found: the
    metadata server may only be late. A file system in the options lends its credentials.
    """
    token, project = options.get('token'), options.get('project') or os.environ.get('GOOGLE_CLOUD_PROJECT') or ''
    request = functools.partial(_request, timeout, options.get('tls_verify', True))
    if (fs := options.get(LENT)) is not None:  # a gcsfs: its credentials may be replaced
        return Login(root, lambda: fs.credentials.credentials, project, request)
    if options.get('anon') and token not in (None, 'anon'):
        raise InvalidArgumentError(f'{root}: expected anon=True or a token, got both')
    emulated = emulated and token is None and not os.environ.get('GOOGLE_APPLICATION_CREDENTIALS')
    if emulated or options.get('anon') or token == 'anon':
        return Login(root, lambda: None, project, request)
    for module in ('google.auth', 'google.auth.credentials', 'google.auth.transport.requests'):
        import_extra(module, 'gcs', 'credentials for gs:// need google-auth')
    import google.auth.credentials

    with google_errors(root):
        credentials, own_project = _credentials(root, token, request)
    if isinstance(credentials, google.auth.credentials.AnonymousCredentials):
        credentials = None
    return Login(root, lambda: credentials, project or own_project or '', request)


def _credentials(root: str, token: Any, request: Callable[[], Any]) -> tuple[Any, str | None]:
    import google.auth
    from google.auth import compute_engine
    from google.oauth2 import credentials, service_account

    if token in (None, 'google_default'):
        default, project = google.auth.default(scopes=_SCOPES, request=request())
        return default, project
    if token == 'cloud':
        return compute_engine.Credentials(scopes=_SCOPES), None
    if token in ('cache', 'browser'):
        raise InvalidArgumentError(
            f'{root}: expected a token, or one of {_TOKEN_NAMES}, got token={token!r}, which is not supported'
        )
    if isinstance(token, google.auth.credentials.Credentials):
        return google.auth.credentials.with_scopes_if_required(token, _SCOPES), None
    if isinstance(token, str | os.PathLike):
        content = _content(root, token)
        if content is None:
            return credentials.Credentials(token), None
        token = content
    if not isinstance(token, Mapping):
        raise InvalidArgumentError(
            f'{root}: expected a token that is one of {_TOKEN_NAMES}, a path, a dict, an access token or credentials '
            f'of google-auth, got {type(token).__name__}'
        )
    kind = token.get('type') or ('authorized_user' if 'refresh_token' in token else 'service_account')
    project = token.get('project_id') or token.get('quota_project_id')
    if kind == 'service_account':
        return service_account.Credentials.from_service_account_info(token, scopes=_SCOPES), project
    if kind == 'authorized_user':
        # Google rejects scopes other than those of the login.
        return credentials.Credentials.from_authorized_user_info(token), project
    raise InvalidArgumentError(
        f'{root}: expected a token of type service_account or authorized_user, got {kind!r}: for others set '
        f'GOOGLE_APPLICATION_CREDENTIALS or pass credentials of google-auth'
    )


def _content(root: str, token: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file of credentials; None if the text is an access token, not a path."""
    path = os.path.expanduser(token)
    if isinstance(token, str) and not os.path.exists(path) and not path.endswith('.json'):
        return None
    try:
        with open(path, 'rb') as file:
            content = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f'{root}: {path} is not a readable file of credentials: {error}') from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(
            f'{root}: {path}: expected a JSON object of credentials, got {type(content).__name__}'
        )
    return content


def _request(timeout: float, verify: bool | str) -> Any:
    """Return google-auth's requests to token servers, with bounded timeouts and without redirects.

    They trust the authorities that the environment names unless ``verify`` says which to trust.
    """
    import google.auth.transport.requests

    class Request(google.auth.transport.requests.Request):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            kwargs['timeout'] = min(kwargs.get('timeout') or timeout, timeout)
            if verify is not True:
                kwargs['verify'] = verify
            return super().__call__(*args, allow_redirects=False, **kwargs)

    return Request()


def google_errors(name: str) -> contextlib.AbstractContextManager[None]:
    return translated(name, _from_google)


def _from_google(name: str, error: Exception) -> GranularError:
    import requests
    from google.auth import exceptions

    detail = hidden(str(error))
    if isinstance(error.__cause__, requests.exceptions.SSLError):
        return untrusted(name, detail)
    if isinstance(error, exceptions.TransportError) or getattr(error, 'retryable', False):
        return StoreError(f'{name}: no answer from the token server: {detail}')
    if isinstance(error, exceptions.MalformedError):
        return InvalidArgumentError(f'{name}: malformed credentials: {detail}')
    if isinstance(error, exceptions.DefaultCredentialsError):
        return AccessDeniedError(
            f'{name}: no Google credentials: set GOOGLE_APPLICATION_CREDENTIALS, log in with gcloud, pass token=, '
            f'or anon=True for a public bucket ({detail})'
        )
    if isinstance(error, exceptions.GoogleAuthError):
        return AccessDeniedError(f'{name}: its credentials were refused a token: {detail}')
    if isinstance(error, ValueError | TypeError | AttributeError):  # from a file whose fields have other types
        return InvalidArgumentError(f'{name}: invalid credentials: {type(error).__name__}: {detail}')
    # The reply of a token server may be anything, and what google-auth makes of it as well.
    return unreadable_credentials(name, error) or StoreError(
        f'{name}: no credentials: their source failed: {type(error).__name__}: {detail}'
    )
