"""Words of messages, and the log that they are written to."""

import logging
from typing import Final

logger: Final = logging.getLogger('granular')

AT_EPOCH: Final = (
    'from the start of an epoch, by set_next_index(epoch * steps) or dataset.repeat()[epoch * len(dataset):]'
)
"""What continues without a state; streams whose elements have no index only as a slice."""


def counted(count: int, noun: str) -> str:
    """Return a number and its noun, such as ``1 file`` or ``2,000 files``."""
    return f'{count:,} {noun}{"" if count == 1 else "s"}'
