"""tensorstore's HTTP key-value store."""

import asyncio
import json
import pathlib
import sys
import time

import tensorstore as ts

job = json.loads(pathlib.Path(sys.argv[1]).read_text())


async def main():
    context = ts.Context({'http_request_concurrency': {'limit': job['inflight']}})
    store = await ts.KvStore.open({'driver': 'http', 'base_url': job['url'] + '/'}, context=context)
    todo = iter(job['ranges'])

    async def work():
        got = 0
        for start, stop in todo:
            record = await store.read(job['path'], byte_range=slice(start, stop))
            got += len(record.value)
        return got

    started = time.perf_counter()
    got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
    return got, time.perf_counter() - started


got, seconds = asyncio.run(main())
print(json.dumps({'rate': len(job['ranges']) / seconds, 'bytes': got / seconds}))
