"""A bare aiohttp loop: one session, as many tasks as requests in flight, and nothing else."""

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
    todo = iter(job['ranges'])
    tls = ssl.create_default_context(cafile=job['certificate']) if job.get('certificate') else None
    connector = aiohttp.TCPConnector(limit=job['inflight'], ssl=tls or True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def work():
            got = 0
            for start, stop in todo:
                headers = {'Range': f'bytes={start}-{stop - 1}'}
                async with session.get(f'{job["url"]}/{job["path"]}', headers=headers) as response:
                    got += len(await response.read())
            return got

        began = time.perf_counter()
        got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
        return got, time.perf_counter() - began


got, seconds = uvloop.run(main())
print(json.dumps({'rate': len(job['ranges']) / seconds, 'bytes': got / seconds}))
