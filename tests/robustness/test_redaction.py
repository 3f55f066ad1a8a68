"""Texts are shown without the secrets in addresses, and without values that are secret."""

import contextlib
import threading

import pytest

from granular._support.redact import hidden, protect
from granular.aio.http.messages import Target
from granular.errors import GranularError
from tests.robustness.test_secrets import BEARER, ECHO, KEY, ODD, PASSWORD, QUERY, SCHEMES, SIGNATURE, USER, clean


def test_hidden_removes_users_and_query_values():
    assert hidden(f'https://{USER}:{PASSWORD}@host:1/a?x=1&{QUERY}#f') == (
        'https://...@host:1/a?x=...&X-Amz-Algorithm=...&X-Amz-Credential=...&X-Amz-Security-Token=...'
        '&X-Amz-Signature=...'
    )
    assert hidden(f'https://user:{"token/" * 600}@host/x') == 'https://...@host/x'
    for text in (
        's3://bucket/a@b',
        'bytes 1 to 5',
        'what? a = b',
        'a user@host',
        'http://host/@x',
        'x?',
        'a=b;c',
        'http://127.0.0.1:9000/bucket/a@b',
        'https://store.example.com:443/a/b@c',
        'http://localhost:1/@',
        'http://[::1]:80/a@b',
        'az://container@account/a@b',
        'hf://datasets/me/digits@v1/x',
    ):
        assert hidden(text) == text
    clean(hidden(ECHO))
    target = Target.of(f'https://host/x?{QUERY}', {'Authorization': f'Bearer {BEARER}'})
    clean(repr(target))
    with contextlib.suppress(GranularError):
        Target.of(f'gopher://host/?{QUERY}', {})
    assert SIGNATURE in target.path


@pytest.mark.parametrize('scheme', SCHEMES)
@pytest.mark.parametrize('user', ['', 'user', KEY])
def test_odd_passwords_in_urls_are_hidden(scheme, user):
    for password in ODD:
        url = f'{scheme}://{user}:{password}@host/file.parquet'
        clean(hidden(f'opening {url} failed: {url}'))


def test_containers_of_azure_are_shown_and_users_are_hidden():
    url = 'abfs://box@account.dfs.core.windows.net/folder/x'
    for address in (url, 'abfs://box@host/x', 'az://$root@host/x', f'cannot read {url}: x'):
        assert hidden(address) == address
    for address in ('abfs://user:word@host/x', 'https://box@host/x', 'xabfs://box@host/x', 's3://box@host'):
        assert '...@host' in hidden(address)
    signed = 'https://account.blob.core.windows.net/my-data/x?sv=2026&sr=c&sig=abc%2Bdef%3D'
    assert hidden(signed) == 'https://account.blob.core.windows.net/my-data/x?sv=...&sr=...&sig=...'


def test_protected_values_are_hidden_and_nothing_else():
    text = 'a "b c" and b%20c, b&amp;c, bc; 12 true'
    protect(['s3cret', 'Bearer to<ken-1', 'b', '12', 'true', ''])
    assert hidden('key=s3cret s3cretary s3cret/x') == 'key=... s3cretary .../x'
    assert hidden('<i>to&lt;ken-1</i> to%3Cken-1') == '<i>...</i> ...'
    assert hidden(text) == text  # too short, or no secret


def test_value_is_hidden_as_soon_as_it_is_protected():
    """Also if another thread redacts a text meanwhile."""
    protect(f'one-secret-of-many-{i}' for i in range(2000))
    for i in range(5):
        protect([f'earlier-secret-{i}'])
        thread = threading.Thread(target=hidden, args=('a text',))
        thread.start()
        protect([later := f'later-secret-{i}'])
        thread.join()
        assert hidden(f'key={later}') == 'key=...'
