"""obstore, the Rust object_store, by its asynchronous get_range."""

import obstore
import uvloop
from measuring import job, read_all, tell
from obstore.store import HTTPStore


async def main():
    # A certificate of our own is not checked, which only the handshakes would take time for.
    options = {'allow_http': True, 'allow_invalid_certificates': bool(job.get('certificate'))}
    store = HTTPStore.from_url(job['url'], client_options=options)
    return await read_all(lambda start, stop: obstore.get_range_async(store, job['path'], start=start, end=stop))


tell(rate=uvloop.run(main()))
