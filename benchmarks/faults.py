"""Faults: the outcome of a read at every fault, with granular and with other clients at their default settings.

``python -m benchmarks.faults [--only FAULT ...]`` prints a row for each fault; docs/reliability.md sums them up.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bars import ROOT
from benchmarks.remote import RIVALS, SCRIPTS
from tests.support.credentials import AmazonKeys, google_key
from tests.support.faults import FaultServer
from tests.support.servers import free_ports

WHO = ('granular', 's3fs', 'gcsfs', 'obstore')
COUNT, SIZE, STRIDE = 12, 64 << 10, 2 << 20
LIMIT = 190.0  # seconds after which a read counts as hanging

DATA = np.random.default_rng(0).bytes(COUNT * STRIDE)
STARTS = [STRIDE * i for i in range(COUNT)]
STOPS = [start + SIZE for start in STARTS]


class Fault(NamedTuple):
    """A fault of some requests, and whether a read can still return the correct bytes."""

    lines: list[Any]
    passes: bool = True
    where: str = 'server'


FAULTS = {
    'a reset before a reply': Fault(['reset', 'reset']),
    'a reset inside a body': Fault([('truncate', 20_000)]),
    'a reset after a body': Fault(['then_reset'] * 3),
    'a body that ends early': Fault([('until_close', 20_000)]),
    'no reply': Fault(['hang']),
    'a body that stalls': Fault([('stall', 20_000)]),
    'a body that drips': Fault([('drip', 0.01)]),
    'a storm of 503': Fault([('status', 503, 'SlowDown')] * 30),
    'a body too short, and said so': Fault(['short']),
    'a body too long': Fault(['long']),
    'a wrong Content-Range': Fault(['shifted']),
    'no Content-Range': Fault([('ranged', None)]),
    'all of the object for a range': Fault(['whole']),
    'an error document in a 200': Fault(['document']),
    '416 for a range that is there': Fault(['unsatisfiable'], False),
    'chunks without a length': Fault([('chunked', 10_000)] * 99),
    'gzip that was not asked for': Fault(['zipped']),
    'credentials that expire early': Fault(['expire']),
    'a connection for each reply': Fault(['then_close'] * 99),
    'garbage': Fault([('raw', b'SSH-2.0-OpenSSH_9.2\r\n\r\n')]),
    'an object that is replaced': Fault(['good'] * 6 + ['replaced'], False),
    'a redirection to another host': Fault(['redirected'] * 99, False),
    "another's certificate": Fault([], False, 'tls'),
    'a host that refuses': Fault([], False, 'closed'),
    'a host that is unknown': Fault([], False, 'unknown'),
}


class Outcome(NamedTuple):
    """The outcome of a case."""

    text: str
    good: bool
    message: str

    def __str__(self) -> str:
        return self.text if self.good else f'**{self.text}**'


class Store(FaultServer):
    """A server of the object, with the line ``redirected``, which leads to another server of it."""

    other: FaultServer

    def next_line(self) -> Any:
        line = super().next_line()
        return ('redirect', f'{self.other.endpoint}/bucket/object') if line == 'redirected' else line


def certificate(folder: pathlib.Path) -> ssl.SSLContext:
    """Create a trusted certificate of another host."""
    command = ['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', '-subj', '/CN=example.org']
    files = ['-addext', 'subjectAltName=DNS:example.org', '-keyout', 'key.pem', '-out', 'cert.pem']
    subprocess.run([*command, *files], check=True, capture_output=True, cwd=folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / 'cert.pem', folder / 'key.pem')
    return context


@contextlib.contextmanager
def serving(fault: Fault, folder: pathlib.Path) -> Iterator[Store]:
    """Start the server of a case, with its credentials."""
    tls = certificate(folder) if fault.where == 'tls' else None
    keys = AmazonKeys(folder / 'credentials')
    with FaultServer(files={'object': DATA}) as other, Store(tls, {'object': DATA}) as server:
        server.other = other
        server.script.extend(fault.lines)
        server.renew = keys.renew
        yield server


def run(name: str, who: str) -> Outcome:
    """Run one client with one fault in its own process."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix='granular-faults-') as temporary, contextlib.ExitStack() as stack:
        folder = pathlib.Path(temporary)
        server = stack.enter_context(serving(fault, folder))
        elsewhere = {'closed': f'http://127.0.0.1:{free_ports(1)[0]}', 'unknown': 'http://no-such-host.invalid'}
        job: dict[str, Any] = {
            'endpoint': elsewhere.get(fault.where, server.endpoint),
            'account': google_key(folder, server),
            'credentials': str(folder / 'credentials'),
            'starts': STARTS,
            'stops': STOPS,
        }
        python = sys.executable if who == 'granular' else str(RIVALS / who / 'bin' / 'python')
        settings = {
            'AWS_SHARED_CREDENTIALS_FILE': job['credentials'],
            'AWS_EC2_METADATA_DISABLED': 'true',
            'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # it asks Google for the kind of each bucket
        }
        if who == 'granular':
            settings['PYTHONPATH'] = str(ROOT)
        if fault.where == 'tls':  # tokens cannot be fetched over it
            job['account'] = 'anon'
            settings['SSL_CERT_FILE'] = settings['AWS_CA_BUNDLE'] = str(folder / 'cert.pem')
        (folder / 'job.json').write_text(json.dumps(job))
        command = [python, str(SCRIPTS / 'run_faults.py'), who, str(folder / 'job.json')]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=LIMIT, cwd='/',
                env={**os.environ, **settings},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome('hangs', False, '')
        results = [line for line in done.stdout.splitlines() if line.startswith('{')]
        if not results:
            raise RuntimeError(f'{name}, {who}: {done.stdout}{done.stderr}')
        return judge(fault, json.loads(results[-1]), server)


def judge(fault: Fault, result: dict[str, Any], server: Store) -> Outcome:
    """Compare a result with the reliable one: the correct bytes, or an error where they are unavailable."""
    seconds = f'{result["seconds"]:.1f} s'
    message = str(result.get('says', ''))
    if 'error' in result:
        return Outcome(f'{result["error"]}, {seconds}', not fault.passes, message)
    old = [zlib.crc32(DATA[a:b]) for a, b in zip(STARTS, STOPS, strict=True)]
    files = server.files or {}
    new = [zlib.crc32(files['object'][a:b]) for a, b in zip(STARTS, STOPS, strict=True)]
    if result['sums'] not in (old, new):
        return Outcome('WRONG BYTES', False, message)
    if server.other.authorized:
        told = ', with its credentials' if any(server.other.authorized) else ''
        return Outcome(f'goes there{told}, {seconds}', not told, message)
    return Outcome(f'right, {seconds}', True, message)


def main() -> None:
    """Print the table, and the number of faults that each client survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='+', choices=FAULTS, metavar='FAULT')
    parser.add_argument('--parallel', type=int, default=6, help='cases at a time: most of them wait')
    parser.add_argument('--who', nargs='+', choices=WHO, default=WHO)
    args = parser.parse_args()
    names = args.only or list(FAULTS)
    cases = [(name, who) for name in names for who in args.who]
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        outcomes = dict(zip(cases, pool.map(lambda case: run(*case), cases), strict=True))
    print(f'| what the store does | {" | ".join(args.who)} |', f'| --- |{" --- |" * len(args.who)}', sep='\n')
    for name in names:
        print(f'| {name} | {" | ".join(str(outcomes[name, who]) for who in args.who)} |')
    good = collections.Counter(who for (_, who), outcome in outcomes.items() if outcome.good)
    print(f'| survived, of {len(names)} | {" | ".join(str(good[who]) for who in args.who)} |\n')
    for (name, who), outcome in outcomes.items():
        if outcome.message:
            print(f'{name}, {who}: {outcome.message}')


if __name__ == '__main__':
    main()
