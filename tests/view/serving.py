"""The server of ``granular view``, on a loop in a thread of its own."""

import asyncio
import threading


class Served:
    """A context in which a path is served. ``link`` has the token, ``origin`` has not."""

    def __init__(self, path, port=0, names=None):
        self._path, self._port, self._names = path, port, names

    def __enter__(self):
        self._ready = threading.Event()
        self._failure = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        self.origin = self.link.partition('/?')[0]
        self.token = self.link.partition('token=')[2]
        return self

    def __exit__(self, *args):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self):
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _main(self):
        from granular.view import serve  # here, as aiohttp takes long to import

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serve(self._path.aio, self._port, self._names) as self.link:
            self._ready.set()
            await self._stop.wait()
