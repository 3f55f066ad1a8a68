"""The changes that a refusal of a state names."""

import re
from typing import Any

import granular


def declared_in(error: BaseException) -> list[Any]:
    """Return the changes of ``pass changes=[...]`` at the end of a message."""
    found = re.search(r'pass changes=(\[.*\])$', str(error))
    assert found is not None, error
    changes: list[Any] = eval(found[1], {'granular': granular})
    return changes
