"""obstore, the Rust object_store, by its asynchronous get_range."""

import asyncio
import json
import pathlib
import sys
import time

import obstore
import uvloop
from obstore.store import HTTPStore

job = json.loads(pathlib.Path(sys.argv[1]).read_text())


async def main():
    # A certificate of our own is not checked, which only the handshakes would take time for.
    options = {'allow_http': True, 'allow_invalid_certificates': bool(job.get('certificate'))}
    store = HTTPStore.from_url(job['url'], client_options=options)
    todo = iter(job['ranges'])

    async def work():
        got = 0
        for start, stop in todo:
            got += len(await obstore.get_range_async(store, job['path'], start=start, end=stop))
        return got

    started = time.perf_counter()
    got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
    return got, time.perf_counter() - started


got, seconds = uvloop.run(main())
print(json.dumps({'rate': len(job['ranges']) / seconds, 'bytes': got / seconds}))
