"""Credentials of S3: those of the options, those that botocore finds, or those of an s3fs."""

import contextlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from granular._lazy import import_extra
from granular._redact import hidden
from granular.aio.runtime.threads import offload
from granular.aio.stores.errors import is_one_word, translated, unreadable_credentials
from granular.aio.stores.lent import LENT, current, on_its_loop
from granular.errors import AccessDeniedError, GranularError, StoreError

_DENIED_CODES: Final = (
    *('401', '403', 'AccessDenied', 'ExpiredToken', 'ExpiredTokenException', 'InvalidClientTokenId'),
    *('InvalidAccessKeyId', 'SignatureDoesNotMatch', 'UnrecognizedClientException'),
)


# What no other attempt changes, with the remedy.
_PERMANENT: Final[Mapping[tuple[str, ...], str]] = {
    ('SSOError', 'TokenRetrievalError'): ': log in with `aws sso login`, and --profile for another profile',
    ('ProfileNotFound',): ': check AWS_PROFILE, or profile=, against `aws configure list-profiles`',
    ('LoginError',): ': log in with `aws login`, and --profile for another profile',
    (
        *('NoCredentialsError', 'PartialCredentialsError', 'ConfigNotFound', 'ConfigParseError'),
        *('UnknownCredentialError', 'InvalidConfigError', 'RefreshWithMFAUnsupportedError', 'NoAuthTokenError'),
        *('UnknownTokenProviderError', 'ParamValidationError'),
    ): '',
}


class FoundCredentials:
    """The key of the options, or what botocore finds. Create it on a worker thread: finding credentials blocks."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root, self._profile = root, options.get('profile')
        self._given = options.get('key') is not None
        with botocore_errors(root):
            # The handlers take milliseconds, and serve the providers of credentials only.
            session = _session(self._profile, include_builtin_handlers=not self._given)
            session.get_scoped_config()  # raises for a profile that does not exist
            if self._given:
                session.set_credentials(options['key'], options['secret'], options.get('token'))
            self._credentials: Any = None if options.get('anon') else session.get_credentials()
        self.anonymous: bool = bool(options.get('anon'))
        if self._credentials is None and not self.anonymous:
            raise missing(root)

    async def frozen(self) -> Any:
        """Return the access key, the secret and the token for one signature, renewed if they are about to expire."""
        if getattr(self._credentials, 'refresh_needed', bool)():
            return await offload(self._credentials.get_frozen_credentials)
        return self._credentials.get_frozen_credentials()

    async def renew(self) -> bool:
        """Look for credentials again. Return whether there are any, other than those of the options."""
        if self.anonymous or self._given:
            return False

        def find() -> Any:
            with botocore_errors(self._root):
                # A session caches its credentials: only a new one asks the providers again.
                return _session(self._profile).get_credentials()

        found = await offload(find)
        self._credentials = found or self._credentials
        return found is not None


class LentCredentials:
    """The credentials of an s3fs without a given key, taken for each signature from its session, which renews them."""

    anonymous = False

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
        with botocore_errors(self._root):
            await on_its_loop(self._fs, self._fs.set_session(refresh=True))
        return True


class Configuration(NamedTuple):
    """Settings of a bucket that the configuration of AWS has, and the options may not."""

    addressing_style: str  # empty if it has none
    ca_bundle: str | None


def configuration_of(root: str, options: Mapping[str, Any]) -> Configuration:
    """Return what botocore finds in the environment and in the profile. It reads files: call it on a worker thread."""
    with botocore_errors(root):
        session = _session(options.get('profile'), include_builtin_handlers=False)
        settings, bundle = (session.get_config_variable(name) for name in ('s3', 'ca_bundle'))
    style = settings.get('addressing_style') if isinstance(settings, Mapping) else None
    return Configuration(str(style or ''), str(bundle) if bundle else None)


def checked(root: str, frozen: Any) -> Any:
    """Return credentials, which must not have the newline or space that a copied text may end with."""
    names = 'access_key', 'AWS_ACCESS_KEY_ID', 'secret_key', 'AWS_SECRET_ACCESS_KEY', 'token', 'AWS_SESSION_TOKEN'
    for attribute, variable in zip(names[::2], names[1::2], strict=True):
        if not is_one_word(getattr(frozen, attribute) or ''):
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


def _session(profile: str | None, **arguments: Any) -> Any:
    return import_extra('botocore.session', 's3', 's3:// needs botocore').Session(profile=profile, **arguments)


def botocore_errors(name: str) -> contextlib.AbstractContextManager[None]:
    """Convert the exceptions of botocore, raised while it finds credentials, to ``GranularError`` subclasses."""
    return translated(name, _from_botocore)


def _from_botocore(name: str, error: Exception) -> GranularError | None:
    import botocore.exceptions as botocore

    if isinstance(error, botocore.ClientError):  # from the service that issues the credentials
        code = str(error.response.get('Error', {}).get('Code', ''))
        if code in _DENIED_CODES:
            return AccessDeniedError(f'{name}: access denied ({code}): check the credentials and their rights')
        return StoreError(f'{name}: {hidden(str(error))}')
    detail = hidden(str(error))
    for kinds, remedy in _PERMANENT.items():
        # By name, as releases of botocore differ in the ones that they have.
        if not {kind.__name__ for kind in type(error).__mro__}.isdisjoint(kinds):
            return AccessDeniedError(f'{name}: no credentials: {detail}{remedy}')
    # The reply of a credential program or service may not be JSON.
    if isinstance(error, botocore.BotoCoreError | ValueError):
        return StoreError(f'{name}: {type(error).__name__}: {detail}')
    return unreadable_credentials(name, error)
