"""The first elements of a reader."""

from typing import Any, Generic

from granular._typing import Datapoint_co
from granular.aio.runtime.lifecycle import AsyncResource
from granular.formats.display import Samples
from granular.indexing import check_integer


class FirstElements(AsyncResource, Generic[Datapoint_co]):
    """A resource with a length and ``fetch``, whose first elements can be taken."""

    async def take(self, count: int) -> list[Datapoint_co]:
        """Return the first ``count`` elements, or all if there are fewer, read as by ``fetch``."""
        await self._ensure_open()
        reader: Any = self
        elements: list[Datapoint_co] = await reader.fetch(range(min(check_integer('count', count, 0), len(reader))))
        return elements

    async def head(self, count: int = 5) -> Samples[Datapoint_co]:
        """Return the first elements, as ``take``, in a list that notebooks show as a table with thumbnails."""
        return Samples(await self.take(count))
