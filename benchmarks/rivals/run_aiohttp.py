"""A plain aiohttp loop: one session, and as many tasks as requests in flight."""

import ssl

import aiohttp
import uvloop
from measuring import job, read_all, tell


async def main():
    tls = ssl.create_default_context(cafile=job['certificate']) if job.get('certificate') else None
    connector = aiohttp.TCPConnector(limit=job['inflight'], ssl=tls or True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def read(*wanted):
            *path, start, stop = wanted
            headers = {'Range': f'bytes={start}-{stop - 1}'}
            url = f'{job["url"]}/{path[0] if path else job["path"]}'
            async with session.get(url, headers=headers) as response:
                return await response.read()

        return max([await read_all(read) for _ in range(job.get('times', 1))])


tell(rate=uvloop.run(main()))
