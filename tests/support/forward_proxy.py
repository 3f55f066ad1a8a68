"""A forward proxy from PyPI that asks for a user and a password."""

import subprocess
import sys
import time


class ForwardProxy:
    """A running proxy; ``address`` is what ``HTTP_PROXY`` names."""

    def __init__(self, folder):
        self._log, port = folder / 'proxy.log', folder / 'proxy.port'
        self._process = subprocess.Popen(
            [
                sys.executable, '-m', 'proxy', '--hostname', '127.0.0.1', '--port', '0', '--port-file', port,
                '--log-file', self._log, '--basic-auth', 'user:se:cret', '--num-acceptors', '1', '--num-workers', '1',
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not (port.exists() and port.read_text().strip()):
            assert self._process.poll() is None
            time.sleep(0.02)
        self.port = int(port.read_text().split()[0])
        self.address = f'http://user:se%3Acret@127.0.0.1:{self.port}'

    def close(self):
        self._process.terminate()
        self._process.wait(30)


def away(endpoint):
    """Return another address of this machine: a loopback address is never asked for by a proxy."""
    return endpoint.replace('127.0.0.1', '0.0.0.0')
