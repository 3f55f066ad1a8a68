"""Credentials that a program renews: keys of S3 in a file, and tokens of GCS from the fault server."""

import functools
import itertools
import json
import pathlib

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.faults import FaultServer


def google_key(folder: pathlib.Path, server: FaultServer) -> str:
    """Write the file of a service account whose tokens the server issues; returns its path."""
    account = {
        'type': 'service_account',
        'client_email': 'tests@tests.iam.gserviceaccount.com',
        'private_key': _private_key(),
        'token_uri': f'{server.endpoint}/token',
    }
    path = folder / 'account.json'
    path.write_text(json.dumps(account))
    return str(path)


@functools.cache
def _private_key() -> str:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(*form).decode()


_count = itertools.count(1)


class AmazonKeys:
    """A file of S3 credentials that can be renewed."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        self.renew()

    def renew(self) -> None:
        """Replace the credentials by new ones."""
        draft = self.file.with_suffix('.draft')
        draft.write_text(f'[default]\naws_access_key_id=KEY{next(_count)}\naws_secret_access_key=x\n')
        draft.replace(self.file)
