"""Storage accounts: the server of a container and the credentials for it, from options, address and environment.

adlfs is not imported, so that a store knows its account when it is constructed: the account is part of the identity of
all that is cached of the store.
"""

import os
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from granular.aio.stores.endpoints import check
from granular.aio.stores.lent import LENT
from granular.errors import InvalidArgumentError

VARIABLES: Final = (
    'AZURE_STORAGE_CONNECTION_STRING', 'AZURE_STORAGE_ACCOUNT_NAME', 'AZURE_STORAGE_ACCOUNT_KEY',
    'AZURE_STORAGE_SAS_TOKEN', 'AZURE_STORAGE_CLIENT_ID', 'AZURE_STORAGE_CLIENT_SECRET', 'AZURE_STORAGE_TENANT_ID',
    'AZURE_STORAGE_ANON',
)  # fmt: skip
"""Environment variables that select an account and the credentials for it."""

OPTIONS: Final = (
    'account_name', 'account_key', 'account_host', 'anon', 'client_id', 'client_secret', 'connection_string',
    'credential', 'endpoint_url', 'sas_token', 'tenant_id',
)  # fmt: skip
"""Names of the options of a container."""

# The first that is given is used.
_LOGINS: Final = ('connection_string', 'account_key', 'sas_token', 'credential', 'client_id', 'anon')
# adlfs reads these variables itself, and prefers them to tokens.
_PREFERRED: Final = ('AZURE_STORAGE_CONNECTION_STRING', 'AZURE_STORAGE_ACCOUNT_KEY', 'AZURE_STORAGE_SAS_TOKEN')
_SECRETS: Final = ('accountkey', 'sharedaccesssignature')
_FALSE: Final = ('', '0', 'f', 'false')


class Account(NamedTuple):
    endpoint: str  # the URL of its blobs; empty if neither options, address nor environment name an account
    login: Mapping[str, Any]  # arguments of ``adlfs.AzureBlobFileSystem``, with secrets; or a given one, as ``LENT``
    problem: str = ''  # why a login is not possible


def find_account(root: str, options: Mapping[str, Any]) -> Account:
    """Return the account of a container: that of the options, the address or the environment, in this order.

    Credentials in the options replace all of the environment. Those of the environment are used for its own account,
    or, if they do not name one, for the account of the options. Options and address must not name different accounts.
    """
    environment = {name.removeprefix('AZURE_STORAGE_').lower(): os.environ.get(name) for name in VARIABLES}
    if str(environment['anon'] or '').lower() in _FALSE:
        environment['anon'] = None
    string = options.get('connection_string') or ''
    named = {url.rstrip('/') for url in _endpoints(root, options) if url}
    if len(named) > 1:
        raise InvalidArgumentError(f'{root}: expected one storage account, got {" and ".join(sorted(named))}')
    owner, name = _fields(string).get('accountname'), options.get('account_name')
    if owner and name and owner != name:
        raise InvalidArgumentError(f'{root}: expected one storage account, got {owner} and {name}')
    login = {name: options[name] for name in _LOGINS if options.get(name)}
    if not login:
        variable = environment['connection_string'] or ''
        if not variable or (named and _endpoint_of(variable) not in named):
            environment['connection_string'] = None
        login = {name: environment[name] for name in _LOGINS if environment.get(name)}
        string = login.get('connection_string') or ''
        named = named or {_endpoint_of(string) or _of_name(environment['account_name'])}
    endpoint = next(iter(named), '') or _of_name(environment['account_name'])
    if not endpoint:
        return Account('', {}, 'expected account_name, connection_string or AZURE_STORAGE_ACCOUNT_NAME, got none')
    endpoint = check(root, endpoint)
    if LENT in options:
        return Account(endpoint, {LENT: options[LENT]})
    kind = next(iter(login), '')
    start = f'BlobEndpoint={endpoint}'
    match kind:
        case 'connection_string':
            return Account(endpoint, {'connection_string': string})
        case 'account_key':
            name = options.get('account_name') or _name_of(endpoint)
            return Account(endpoint, {'connection_string': f'{start};AccountName={name};AccountKey={login[kind]}'})
        case 'sas_token':
            token = str(login[kind]).lstrip('?')
            return Account(endpoint, {'connection_string': f'{start};SharedAccessSignature={token}'})
        case 'anon':
            return Account(endpoint, {'connection_string': start})
    preferred = [name for name in _PREFERRED if os.environ.get(name)]
    if preferred:
        problem = f'{preferred[0]} is set, which is not of this account or not to be used: unset it'
        return Account(endpoint, {}, problem)
    if not endpoint.startswith('https://'):
        return Account(endpoint, {}, f'expected account_key, sas_token or anon for {endpoint}: tokens need https')
    arguments: dict[str, Any] = {'account_name': _name_of(endpoint), 'account_host': endpoint.partition('://')[2]}
    if kind == 'credential':
        arguments['credential'] = login[kind]
    elif kind == 'client_id':
        chosen = options if options.get('client_id') else environment
        arguments |= {name: chosen.get(name) for name in ('client_id', 'client_secret', 'tenant_id')}
    return Account(endpoint, {**arguments, 'anon': False})


def secrets_of(login: Mapping[str, Any]) -> Iterator[str]:
    if secret := login.get('client_secret'):
        yield str(secret)
    for name, value in _fields(str(login.get('connection_string') or '')).items():
        if name in _SECRETS:
            yield value
            yield from (text for key, text in urllib.parse.parse_qsl(value) if key == 'sig')
    if isinstance(login.get('credential'), str):
        yield login['credential']


def _endpoints(root: str, options: Mapping[str, Any]) -> Iterator[str]:
    yield str(options.get('endpoint_url') or '')
    yield _endpoint_of(str(options.get('connection_string') or ''))
    if host := options.get('account_host'):
        yield f'https://{host}'
    elif not options.get('endpoint_url') and not options.get('connection_string'):
        yield _of_name(options.get('account_name'))
    _, at, host = root.partition('@')
    if at:
        yield f'https://{host.replace(".dfs.", ".blob.", 1)}'


def _fields(connection_string: str) -> dict[str, str]:
    """Return the fields of a connection string, with their names in lower case."""
    pairs = (field.partition('=') for field in connection_string.split(';') if field.strip())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _endpoint_of(connection_string: str) -> str:
    """Return the endpoint of a connection string's account, without a final slash; empty if it has none."""
    fields = _fields(connection_string)
    if endpoint := fields.get('blobendpoint'):
        return endpoint.rstrip('/')
    name, suffix = fields.get('accountname'), fields.get('endpointsuffix', 'core.windows.net')
    return f'{fields.get("defaultendpointsprotocol", "https")}://{name}.blob.{suffix}' if name else ''


def _of_name(name: str | None) -> str:
    return f'https://{name}.blob.core.windows.net' if name else ''


def _name_of(endpoint: str) -> str:
    """Return the name of an account: the first label of its host, or the path, as emulators have it."""
    parts = urllib.parse.urlsplit(endpoint)
    return parts.path.strip('/') or (parts.hostname or '').partition('.')[0]
