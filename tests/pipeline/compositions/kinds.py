"""The trials of each kind, by its number."""

from collections.abc import Callable
from typing import Final

from tests.pipeline.compositions.consumers import consumers
from tests.pipeline.compositions.killed import killed
from tests.pipeline.compositions.trials import Result, hosts, same, weights, workers

TRIALS: Final[dict[str, Callable[[int], Result]]] = {
    'same': same,
    'hosts': hosts,
    'weights': weights,
    'workers': workers,
    'consumers': consumers,
    'killed': killed,
}
