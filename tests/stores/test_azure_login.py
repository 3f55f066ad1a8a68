"""Logins of Azure with tokens, against an Azurite that takes them and a server that issues them, both over TLS."""

import asyncio
import base64
import json
import os
import ssl
import subprocess
import sys
import textwrap
import time

import trustme

from tests.support.loop_server import LoopServer
from tests.support.servers import AzuriteServer

TENANT = 'ab1f708d-50f6-404c-a006-d71b2ac7a606'

# In its own process, as aiohttp reads the certificates that it trusts when it is imported.
SCRIPT = """
    import json, os, pickle, time
    import granular
    from azure.core.credentials import AccessToken

    class Credential:
        def __init__(self, token, valid):
            self.token, self.valid, self.asked = token, valid, 0

        async def get_token(self, *scopes, **options):
            self.asked += 1
            return AccessToken(self.token, int(time.time()) + self.valid)

        async def close(self):
            pass

    class Broken(Credential):
        async def get_token(self, *scopes, **options):
            raise RuntimeError('no token today')

    def read(**options):
        config = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=2)
        path = granular.Path('az://tokens/file', endpoint_url=os.environ['ENDPOINT'], config=config, **options)
        try:
            return path.read_bytes().decode()
        except granular.GranularError as error:
            return f'{type(error).__name__}: {error}'

    valid, foreign = os.environ['VALID'], os.environ['FOREIGN']
    lasting, fleeting = Credential(valid, 3600), Credential(valid, 1)
    root = granular.Path('az://tokens', endpoint_url=os.environ['ENDPOINT'], credential=lasting)
    root.mkdir()
    (root / 'file').write_bytes(b'content')
    content = pickle.dumps(root / 'file')
    service = {'client_id': 'id', 'tenant_id': os.environ['TENANT']}
    print(json.dumps({
        'credential': read(credential=lasting),
        'asked': lasting.asked,
        'renewed': [read(credential=fleeting), read(credential=fleeting), fleeting.asked > 1],
        'pickled': valid.encode() in content or b'Credential' in content,
        'foreign': read(credential=Credential(foreign, 3600)),
        'broken': read(credential=Broken('', 0)),
        'service': read(**service, client_secret='right'),
        'refused': read(**service, client_secret='planted-secret'),
    }))
"""


class Issuer(LoopServer):
    """A login server of Entra ID: it gives a token for the right secret."""

    token: str

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b'\r\n\r\n'):
            lines = head.decode().lower().splitlines()
            length = next(int(line.partition(':')[2]) for line in lines if line.startswith('content-length:'))
            granted = b'client_secret=right' in await reader.readexactly(length)
            reply = {'token_type': 'Bearer', 'expires_in': 3599, 'access_token': self.token}
            if not granted:
                reply = {'error': 'invalid_client', 'error_description': 'AADSTS7000215: Invalid client secret.'}
            body, status = json.dumps(reply).encode(), b'200 OK' if granted else b'401 Unauthorized'
            head = b'HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (status, len(body))
            writer.write(head + body)
            await writer.drain()


def token(audience: str) -> str:
    """Return a token as Azurite takes it: it does not compare the signature."""
    now = int(time.time())
    times = {'iat': now - 60, 'nbf': now - 60, 'exp': now + 3600}
    claims = {'aud': audience, 'iss': f'https://sts.windows.net/{TENANT}/', 'tid': TENANT, **times}
    parts = [json.dumps(part).encode() for part in ({'alg': 'RS256', 'typ': 'JWT'}, claims)]
    return '.'.join(base64.urlsafe_b64encode(part).decode().rstrip('=') for part in (*parts, b'signature'))


def test_logins_with_tokens(tmp_path):
    authority = trustme.CA()
    certificate, trusted = authority.issue_cert('127.0.0.1'), tmp_path / 'trusted.pem'
    authority.cert_pem.write_to_path(trusted)
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / 'certificate.pem')
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    valid = token('https://storage.azure.com')
    with AzuriteServer(certificate=tmp_path / 'certificate.pem') as azurite, Issuer(context) as issuer:
        issuer.token = valid
        environment = {
            'ENDPOINT': azurite.endpoint,
            'AZURE_AUTHORITY_HOST': issuer.endpoint.removeprefix('https://'),
            'SSL_CERT_FILE': str(trusted),
            'VALID': valid,
            'FOREIGN': token('https://example.com'),
            'TENANT': TENANT,
        }
        done = subprocess.run(
            [sys.executable, '-c', textwrap.dedent(SCRIPT)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert 'planted-secret' not in done.stdout + done.stderr
    got = json.loads(done.stdout)
    denied = 'AccessDeniedError: az://tokens/file: '
    assert got == {
        'credential': 'content',
        'asked': 1,
        'renewed': ['content', 'content', True],
        'pickled': False,
        'foreign': got['foreign'],
        'broken': 'StoreError: az://tokens/file: RuntimeError: no token today',
        'service': 'content',
        'refused': f"{denied}the login failed: Microsoft Entra ID error '(invalid_client) AADSTS7000215: Invalid "
        f"client secret.'",
    }
    assert got['foreign'].startswith(f'{denied}access denied (status 403')
