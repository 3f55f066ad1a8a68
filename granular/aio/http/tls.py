"""TLS verification settings of connections to stores."""

import ssl
import warnings
from collections.abc import Mapping
from typing import Any, Final

from granular.errors import InvalidArgumentError

_warned: Final[set[str]] = set()


def verify_of(root: str, options: Mapping[str, Any]) -> bool | str:
    """Return the option ``tls_verify``: True (the default), False, or the file of the CA bundle to trust.

    Refuse any other value. Each host or bucket for which it is False causes one warning per process.
    """
    verify: bool | str = options.get('tls_verify', True)
    if not isinstance(verify, bool | str) or verify == '':
        raise InvalidArgumentError(
            f'{root}: expected tls_verify to be True, False or the file of a CA bundle, got {verify!r}'
        )
    if 'verify' in (options.get('client_kwargs') or {}):
        raise InvalidArgumentError(f'{root}: pass tls_verify= to say which certificates are trusted, not client_kwargs')
    if verify is False and root not in _warned:
        _warned.add(root)
        warnings.warn(
            f'{root}: tls_verify=False: certificates are not verified, so that anyone between may read and change '
            f'what is read and written, and the credentials sent with it',
            RuntimeWarning,
            stacklevel=2,
        )
    return verify


def context_of(verify: bool | str) -> ssl.SSLContext:
    """Return the TLS context of connections. It reads files: do not call it on an event loop."""
    try:
        context = ssl.create_default_context(cafile=None if isinstance(verify, bool) else verify)
    except OSError as error:
        source = '(tls_verify=, AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE or ca_bundle of a profile)'
        raise InvalidArgumentError(f'{verify!r} {source}: cannot be read as a CA bundle: {error}') from error
    context.options |= ssl.OP_NO_RENEGOTIATION  # of TLS 1.2: a write would have to wait for a read
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
