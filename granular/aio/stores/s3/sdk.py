"""Sessions of botocore, and the conversion of its errors. botocore blocks: call it on a worker thread."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, Final

from granular._support.lazy import import_extra
from granular._support.redact import hidden
from granular.aio.stores.errors import Foreign, translated, unreadable_credentials, untrusted
from granular.errors import AccessDeniedError, GranularError, InvalidArgumentError, MissingExtraError, StoreError

_DENIED_CODES: Final = (
    *('401', '403', 'AccessDenied', 'ExpiredToken', 'ExpiredTokenException', 'InvalidClientTokenId'),
    *('InvalidAccessKeyId', 'SignatureDoesNotMatch', 'UnrecognizedClientException'),
)
# What no other attempt changes, with the remedy.
_PERMANENT: Final[Mapping[tuple[str, ...], str]] = {
    ('SSOError', 'TokenRetrievalError'): ': log in with `aws sso login`, and --profile for another profile',
    ('LoginError',): ': log in with `aws login`, and --profile for another profile',
    (
        *('NoCredentialsError', 'PartialCredentialsError', 'ConfigNotFound', 'ConfigParseError', 'NoAuthTokenError'),
        *('UnknownCredentialError', 'InvalidConfigError', 'RefreshWithMFAUnsupportedError', 'ParamValidationError'),
        'UnknownTokenProviderError',
    ): '',
}


def session_of(profile: str | None, **arguments: Any) -> Any:
    """Return a new session of botocore. All share the descriptions of services."""
    session = import_extra('botocore.session', 's3', 's3:// needs botocore').Session(profile=profile, **arguments)
    session.get_scoped_config()  # raises for a profile that does not exist
    session.register_component('data_loader', _loader(session.get_config_variable('data_path')))
    return session


@functools.lru_cache(maxsize=4)
def _loader(folders: str | None) -> Any:
    from granular.aio.stores.s3.descriptions import loader_of

    return loader_of(folders)


def credential_errors(name: str) -> contextlib.AbstractContextManager[None]:
    """Convert the exceptions of botocore, raised while it finds credentials, to ``GranularError`` subclasses."""
    return _converted(name, _about_credentials)


def setting_errors(name: str) -> contextlib.AbstractContextManager[None]:
    """Convert the exceptions of botocore, raised while it looks at settings, to ``GranularError`` subclasses."""
    return _converted(name, _about_settings)


def _converted(name: str, convert: Foreign) -> contextlib.AbstractContextManager[None]:
    def converted(name: str, error: Exception) -> GranularError | None:
        if type(error).__name__ == 'ProfileNotFound':
            return AccessDeniedError(
                f'{name}: no credentials: {hidden(str(error))}: add it with `aws configure`, or name another one by '
                f'profile= or AWS_PROFILE'
            )
        return convert(name, error)

    return translated(name, converted)


def _about_settings(name: str, error: Exception) -> GranularError:
    if type(error).__name__ == 'MissingDependencyException':
        return MissingExtraError(f"{name}: its signatures need another package: pip install 'botocore[crt]'")
    from botocore.exceptions import BotoCoreError

    kind = '' if isinstance(error, BotoCoreError | ValueError) else f'{type(error).__name__}: '
    detail = ' '.join(hidden(str(error)).split())
    return InvalidArgumentError(f'{name}: the address or the configuration of AWS cannot be used: {kind}{detail}')


def _about_credentials(name: str, error: Exception) -> GranularError:
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
    if isinstance(error, botocore.SSLError):
        return untrusted(name, detail)
    # The reply of a credential program or service may be anything, and what botocore makes of it as well.
    return unreadable_credentials(name, error) or StoreError(
        f'{name}: no credentials: their source failed: {type(error).__name__}: {detail}'
    )
