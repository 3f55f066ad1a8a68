"""A plain aiohttp loop: one session, and as many tasks as requests in flight."""

import asyncio
import json
import pathlib
import ssl
import sys
import time

import aiohttp
import uvloop

job = json.loads(pathlib.Path(sys.argv[1]).read_text())


async def main():
    tls = ssl.create_default_context(cafile=job['certificate']) if job.get('certificate') else None
    connector = aiohttp.TCPConnector(limit=job['inflight'], ssl=tls or True)
    best = 1e9
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        for _ in range(job.get('times', 1)):
            todo = iter(job['ranges'])

            async def work(todo=todo):
                got = 0
                for *path, start, stop in todo:
                    headers = {'Range': f'bytes={start}-{stop - 1}'}
                    url = f'{job["url"]}/{path[0] if path else job["path"]}'
                    async with session.get(url, headers=headers) as response:
                        got += len(await response.read())
                return got

            started = time.perf_counter()
            got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
            best = min(best, time.perf_counter() - started)
    return got, best


got, seconds = uvloop.run(main())
print(json.dumps({'rate': len(job['ranges']) / seconds, 'bytes': got / seconds}))
