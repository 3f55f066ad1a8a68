"""Type variables with defaults, which many modules share.

``DatasetReader`` is ``DatasetReader[dict[str, Any]]``. ``typing`` has defaults from Python 3.13 on. Type checkers know
them from ``typing_extensions``, which need not be installed.
"""

from typing import TYPE_CHECKING, Any

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
