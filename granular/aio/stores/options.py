"""The options of stores that users pass, of which some may be credentials."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from granular._support.other_names import store_options
from granular._support.redact import without_user
from granular.aio.stores.lent import LENT
from granular.errors import InvalidArgumentError

_SECRET: Final = re.compile(r'key|secret|token|pass|cred|auth|sas|sign|conn|header|user', re.IGNORECASE)
# Headers that are not secret, although the option that contains them is treated as a credential.
_PUBLIC: Final = frozenset(('accept', 'accept-encoding', 'accept-language', 'content-type', 'range', 'user-agent'))


def check_options(root: str, options: Iterable[str], known: Iterable[str], label: str = 'options') -> None:
    if unknown := sorted(set(options) - {*known, LENT}):
        answer = store_options(unknown, known)
        raise InvalidArgumentError(f'{root}: unknown {label} {unknown}: expected some of {sorted(known)}{answer}')


def secrets_in(options: Mapping[str, Any], inside: bool = False) -> Iterator[str]:
    """Yield the option values that may be credentials, judged by the names of the options, at any depth."""
    for name, value in options.items():
        if str(name).lower() in _PUBLIC:
            continue
        secret = inside or _SECRET.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from secrets_in(value, secret)
        elif secret and isinstance(value, str):
            yield value


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without possible credentials, judged by name at any depth, and without users in URLs."""
    clean: dict[str, Any] = {}
    for name, value in options.items():
        if _SECRET.search(str(name)):
            continue
        if isinstance(value, Mapping):
            value = without_secrets(value)
        clean[name] = without_user(value) if isinstance(value, str) else value
    return clean
