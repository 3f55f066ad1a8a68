"""Types that many modules share: paths, and type variables with defaults.

``DatasetReader`` is ``DatasetReader[dict[str, Any]]``. ``typing`` has defaults from Python 3.13 on. Type checkers know
them from ``typing_extensions``, which need not be installed.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Datapoint_co = TypeVar('Datapoint_co', covariant=True, default=dict[str, Any])
    Element_co = TypeVar('Element_co', covariant=True, default=Any)
    In_contra = TypeVar('In_contra', contravariant=True, default=Any)
    Out_co = TypeVar('Out_co', covariant=True, default=Any)
else:
    from typing import TypeVar

    Datapoint_co = TypeVar('Datapoint_co', covariant=True)
    Element_co = TypeVar('Element_co', covariant=True)
    In_contra = TypeVar('In_contra', contravariant=True)
    Out_co = TypeVar('Out_co', covariant=True)


class PathObject(Protocol):
    """A path object of another library, as of ``etils`` or ``elements``."""

    @property
    def name(self) -> str: ...
    @property
    def parent(self) -> Any: ...
    def exists(self) -> bool: ...
    def open(self, mode: str, /) -> Any: ...
    def glob(self, pattern: str, /) -> Iterable[Any]: ...
    def __truediv__(self, key: str, /) -> Any: ...


AnyPath = str | os.PathLike[str] | PathObject
