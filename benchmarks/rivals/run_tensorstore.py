"""tensorstore's HTTP key-value store."""

import asyncio

import tensorstore as ts
from measuring import job, read_all, tell


async def main():
    context = ts.Context({'http_request_concurrency': {'limit': job['inflight']}})
    store = await ts.KvStore.open({'driver': 'http', 'base_url': job['url'] + '/'}, context=context)

    return await read_all(lambda start, stop: store.read(job['path'], byte_range=slice(start, stop)))


tell(rate=asyncio.run(main()))
