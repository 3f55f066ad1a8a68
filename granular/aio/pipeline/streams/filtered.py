"""A check of how many elements filters drop."""

import logging
import time
from typing import Final

from granular.aio.pipeline.transforms import DatasetOptions
from granular.errors import DatapointError

logger: Final = logging.getLogger('granular')

_WINDOW: Final = 1000
_WARN_EVERY: Final = 60.0  # seconds


class FilterCheck:
    """Counts the elements that a filter drops, in windows of 1,000; warns or raises if they are too many.

    Args:
      options: the thresholds.
      stage: description of the filter.
    """

    def __init__(self, options: DatasetOptions, stage: str) -> None:
        self._stage = stage
        self._warn, self._raise = options.filter_warn_threshold_ratio, options.filter_raise_threshold_ratio
        self._seen = self._dropped = 0
        self._warned: float | None = None

    def count(self, dropped: bool) -> None:
        """Count an element.

        Raises:
          DatapointError: if it completes a window in which too many were dropped.
        """
        self._seen += 1
        self._dropped += dropped
        if self._seen < _WINDOW:
            return
        number, self._seen, self._dropped = self._dropped, 0, 0
        message = f'{self._stage} dropped {number} of {_WINDOW} consecutive elements'
        if self._raise is not None and number >= self._raise * _WINDOW:
            raise DatapointError(
                f'{message}: filter_raise_threshold_ratio is {self._raise}. Filter before training, or change it with '
                f'with_options(DatasetOptions(...))'
            )
        now = time.monotonic()
        due = self._warned is None or now - self._warned >= _WARN_EVERY
        if due and self._warn is not None and number >= self._warn * _WINDOW:
            self._warned = now
            logger.warning('%s: filter_warn_threshold_ratio is %s', message, self._warn)
