"""Outages of a store, for a minute: ``python -m tests.robustness.outages`` prints what each case lost.

Each operation runs with the default settings through a proxy of its own, which is away from the middle of the operation
on. A cell is what it lost or changed and what it did twice, or its error.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import logging
import pathlib
import ssl
import sys
import tempfile
from typing import Any, Final

import trustme

import granular
from granular import aio
from tests.support.outages import DOMAIN, KINDS, OPERATIONS, OutageProxy, Places, named, survive
from tests.support.servers import FakeGCSServer, SeaweedServer, Server

SERVERS: Final = {'fakegcs': FakeGCSServer, 'seaweed': SeaweedServer}


async def away(proxy: OutageProxy, seconds: float) -> None:
    await asyncio.to_thread(proxy.began.wait)
    await asyncio.sleep(seconds)


async def cell(
    proxy: OutageProxy, operation: str, direct: granular.Path, options: dict[str, Any], seconds: float
) -> str:
    places = Places(aio.Path(f'{direct}', **options), direct)
    await asyncio.to_thread(places.prepare)
    try:
        outcome = await survive(proxy, places, operation, away(proxy, seconds))
    except Exception as error:
        return f'{type(error).__name__}: {error} {getattr(error, "__notes__", "")}'
    return f'{outcome.lost}, {outcome.twice}'


async def table(server: Server, seconds: float) -> list[list[str]]:
    """Return the rows of the table: all operations at each kind of outage, at the same time."""
    # Each cell waits in a thread for its outage, and names are looked up in others.
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(128))
    authority = trustme.CA()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        certificate, tls = pathlib.Path(folder, 'authority.pem'), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.cert_pem.write_to_path(str(certificate))
        authority.issue_cert(f'*.{DOMAIN}').configure_cert(tls)
        pairs = [(kind, operation) for kind in KINDS for operation in OPERATIONS]
        proxies = [stack.enter_context(OutageProxy(server.endpoint, kind, tls=tls)) for kind, _ in pairs]
        stack.enter_context(named(proxies))
        buckets = [await asyncio.to_thread(server.new_bucket) for _ in pairs]
        cells = [
            cell(
                proxy, operation, bucket,
                {**server.options, 'endpoint_url': proxy.address, 'tls_verify': str(certificate)}, seconds,
            )
            for proxy, (_, operation), bucket in zip(proxies, pairs, buckets, strict=True)
        ]  # fmt: skip
        found = await asyncio.gather(*cells)
        width = len(OPERATIONS)
        return [[kind, *found[i * width : (i + 1) * width]] for i, kind in enumerate(KINDS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--seconds', type=float, default=60.0, help='how long the store is away')
    parser.add_argument('--server', choices=SERVERS, default='fakegcs')
    arguments = parser.parse_args()
    logging.getLogger('granular').setLevel(logging.ERROR)
    with SERVERS[arguments.server]() as server:
        rows = asyncio.run(table(server, arguments.seconds))
    for row in [['lost, twice', *OPERATIONS], ['---'] * (1 + len(OPERATIONS)), *rows]:
        print(f'| {" | ".join(row)} |')
    sys.exit(any(text != '0, 0' for row in rows for text in row[1:]))


if __name__ == '__main__':
    main()
