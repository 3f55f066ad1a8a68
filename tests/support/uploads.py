"""Uploads by the writers of stores: of new objects, and in parts that are never finished."""

import asyncio

import granular
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.portal import run


def publish(path: granular.Path, data: bytes) -> None:
    """Write a new object on the condition that it does not exist."""
    run(_publish(path.aio, data))


async def _publish(path: granular.aio.Path, data: bytes) -> None:
    await to_loop()
    await path.store.write(path.key, data, new=True)


def abandon_upload(path: granular.Path, size: int) -> None:
    """Start an upload, as a process that is killed then, and return once a part has arrived."""
    run(_abandon(path.aio, size))


async def _abandon(path: granular.aio.Path, size: int) -> None:
    await to_loop()
    writer = await path.store.open_writer(path.key)
    await writer.write(bytes(size))
    while not [upload async for upload in path.store.uploads(path.key) if upload.key == path.key and upload.size]:
        await asyncio.sleep(0.01)
