"""Episodes of LeRobot as records: a datapoint each, with a video file of each camera."""

from typing import Any, Final

from granular.aio.conversion.schema import Column
from granular.aio.datasources.lerobot import LeRobotDataSource, fetch_stored, kinds_of

_FILES: Final = ('video', 'image')  # whose types follow from their bytes


class StoredEpisodes:
    """The episodes of an open dataset of LeRobot, with videos and images as they are stored."""

    def __init__(self, source: LeRobotDataSource[Any]) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    async def fetch(self, indices: Any) -> list[dict[str, Any]]:
        return await fetch_stored(self._source, indices)

    @property
    def columns(self) -> dict[str, Column]:
        """The types of the keys whose features tell them: an array, or a text, for each step."""
        kinds = {key: kind for key, kind in kinds_of(self._source).items() if kind not in _FILES}
        return {key: Column('utf8[]' if kind == 'string' else 'array', False) for key, kind in kinds.items()}
