"""Uploads by the writers of stores: of new objects, and in parts that are never finished."""

import asyncio

import granular


def publish(path: granular.Path, data: bytes) -> None:
    """Write a new object on the condition that it does not exist."""
    asyncio.run(_publish(path.aio, data))


async def _publish(path: granular.aio.Path, data: bytes) -> None:
    await path.store.write(path.key, data, new=True)


def abandon_upload(path: granular.Path, size: int) -> None:
    """Start an upload, as a process that is killed then, and return once a part has arrived."""
    asyncio.run(_abandon(path.aio, size))


async def _abandon(path: granular.aio.Path, size: int) -> None:
    writer = await path.store.open_writer(path.key)
    await writer.write(bytes(size))
    while not [upload async for upload in path.store.uploads(path.key) if upload.key == path.key and upload.size]:
        await asyncio.sleep(0.01)


def unfinished_uploads(path: granular.Path) -> list[str]:
    """Return the keys of the uploads in parts below a path that were begun and not finished."""
    return asyncio.run(_unfinished(path.aio))


async def _unfinished(path: granular.aio.Path) -> list[str]:
    return [upload.key async for upload in path.store.uploads(path.key)]
