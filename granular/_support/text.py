"""Words of messages, and the log that they are written to."""

import logging
from typing import Final

logger: Final = logging.getLogger('granular')


def counted(count: int, noun: str) -> str:
    """Return a number and its noun, such as ``1 file`` or ``2,000 files``."""
    return f'{count:,} {noun}{"" if count == 1 else "s"}'
