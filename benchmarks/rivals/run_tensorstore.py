"""tensorstore's HTTP key-value store."""

import asyncio

import tensorstore as ts
from measuring import job, read_all, tell


async def main():
    context = ts.Context({'http_request_concurrency': {'limit': job['inflight']}})
    store = await ts.KvStore.open({'driver': 'http', 'base_url': job['url'] + '/'}, context=context)

    async def read(start, stop):
        return (await store.read(job['path'], byte_range=slice(start, stop))).value

    return await read_all(read)


tell(**asyncio.run(main()))
