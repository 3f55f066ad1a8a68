"""Files and folders of a disk without the right to read them, by a process of another user than root."""

import os
import pathlib
import tempfile

import pytest

import granular

PROGRAM = """
import os, sys
import granular
for name in granular.__all__:
    getattr(granular, name)
folder, call = sys.argv[1:]
if not os.geteuid():
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
try:
    {
        'open': lambda: granular.open(folder),
        'read': lambda: (granular.Path(folder) / 'spec.json').read_bytes(),
        'list': lambda: list(granular.Path(folder).iterdir()),
        'verify': lambda: granular.verify(folder),
        'convert': lambda: granular.convert(folder, '/tmp/never'),
        'write': lambda: granular.DatasetWriter(folder, {'x': 'int'}).__enter__(),
    }[call]()
except granular.errors.AccessDeniedError as error:
    print(os.geteuid(), error)
"""


@pytest.fixture
def dataset():
    with tempfile.TemporaryDirectory() as folder:  # as other users cannot enter the folders of pytest
        os.chmod(folder, 0o755)
        path = pathlib.Path(folder) / 'data'
        with granular.DatasetWriter(path, {'x': 'int'}) as writer:
            writer.append({'x': 1})
        yield path
        path.chmod(0o755)


@pytest.mark.parametrize('call', ['open', 'read', 'list', 'verify', 'convert', 'write'])
def test_denied_access_names_the_file_the_user_and_what_to_check(dataset, call, interpreter):
    dataset.chmod(0)
    user, _, message = interpreter.run(PROGRAM, str(dataset), call).stdout.partition(' ')
    assert message.startswith(f'{dataset}')
    assert f'access denied to user {user}: check the owner and mode of it and of the folders above it' in message
