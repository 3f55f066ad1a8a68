"""Credentials of S3: those of the options, those that botocore finds, or those of an s3fs."""

from collections.abc import Mapping
from typing import Any

from granular.aio.runtime.threads import offload
from granular.aio.stores.errors import is_one_word
from granular.aio.stores.lent import LENT, current, on_its_loop
from granular.aio.stores.s3.sdk import credential_errors, session_of
from granular.errors import AccessDeniedError


class FoundCredentials:
    """The key of the options, or what botocore finds. Create it on a worker thread: finding credentials blocks."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root, self._options = root, options
        self._given = options.get('key') is not None
        with credential_errors(root):
            # The handlers take milliseconds, and serve the providers of credentials only.
            session = self._session(include_builtin_handlers=not self._given)
            if self._given:
                session.set_credentials(options['key'], options['secret'], options.get('token'))
            self._credentials: Any = session.get_credentials()
        if self._credentials is None:
            raise missing(root)

    def _session(self, **arguments: Any) -> Any:
        session = session_of(self._options.get('profile'), **arguments)
        if isinstance(bundle := self._options.get('tls_verify'), str):
            session.set_config_variable('ca_bundle', bundle)  # also for the services that issue keys
        return session

    async def frozen(self) -> Any:
        """Return the access key, the secret and the token for one signature, renewed if they are about to expire."""
        if getattr(self._credentials, 'refresh_needed', bool)():
            return await offload(self._credentials.get_frozen_credentials)
        return self._credentials.get_frozen_credentials()

    async def renew(self) -> bool:
        """Look for credentials again. Return whether there are any, other than those of the options."""
        if self._given:
            return False

        def find() -> Any:
            with credential_errors(self._root):
                # A session caches its credentials: only a new one asks the providers again.
                return self._session().get_credentials()

        found = await offload(find)
        self._credentials = found or self._credentials
        return found is not None


class LentCredentials:
    """The credentials of an s3fs without a given key, taken for each signature from its session, which renews them."""

    def __init__(self, root: str, fs: Any) -> None:
        self._root, self._fs = root, current(fs)
        self._session: Any = None  # in which credentials were found

    async def frozen(self) -> Any:
        if self._session is self._fs.session is not None:
            credentials = await self._session.get_credentials()
            if not getattr(credentials, 'refresh_needed', bool)():
                return await credentials.get_frozen_credentials()  # without waiting, and so on any loop
        return await on_its_loop(self._fs, self._find())

    async def _find(self) -> Any:
        await self._fs.set_session()
        session = self._fs.session
        if (credentials := await session.get_credentials()) is None:
            raise missing(self._root)
        self._session = session
        return await credentials.get_frozen_credentials()

    async def renew(self) -> bool:
        with credential_errors(self._root):
            await on_its_loop(self._fs, self._fs.set_session(refresh=True))
        return True


def checked(root: str, frozen: Any) -> Any:
    """Return credentials, which must not have the newline or space that a copied text may end with."""
    names = 'access_key', 'AWS_ACCESS_KEY_ID', 'secret_key', 'AWS_SECRET_ACCESS_KEY', 'token', 'AWS_SESSION_TOKEN'
    for attribute, variable in zip(names[::2], names[1::2], strict=True):
        value = getattr(frozen, attribute)
        if not isinstance(value, str) or not value:
            if attribute == 'token' and value in (None, ''):
                continue
            raise AccessDeniedError(
                f'{root}: the source of the credentials gave no text for {variable}: check what it prints or stores'
            )
        if not is_one_word(value):
            raise AccessDeniedError(
                f'{root}: the credentials have a space, a newline or another character that no key has: check the end '
                f'of {variable}, or of the same value in the profile or the options'
            )
    return frozen


def credentials_of(root: str, options: Mapping[str, Any]) -> FoundCredentials | LentCredentials:
    """Return the credentials of a bucket, on a worker thread."""
    return LentCredentials(root, options[LENT]) if LENT in options else FoundCredentials(root, options)


def missing(root: str) -> AccessDeniedError:
    return AccessDeniedError(
        f'{root}: no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, pass key= and '
        f'secret=, or anon=True for a public bucket (key=, secret= and fs= are not pickled: processes that are spawned '
        f'need the environment or a profile)'
    )
