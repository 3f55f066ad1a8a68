"""The training loop that a user writes, with states at every point: a resumed one is compared with the whole one."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.drivers.kinds import BATCH, EPOCHS, Kind, Setting, ids_of
from tests.drivers.results import Case, Epochs, Recorder

POINTS = ('before the first batch', 'in an epoch', 'after the last batch', 'between epochs')
STOPPED_IN = 1  # the epoch in which states are saved
AT = 2  # the number of the batch behind which one is saved in the middle of it
LIMIT = 2


@dataclasses.dataclass
class Saved:
    """A state of a loader, with what its program saw until then, and the epoch and steps in it that it counted."""

    state: Any
    seen: Epochs
    epoch: int
    done: int


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to whatever takes it, as the documentation of torch asks for."""
    for part in (loader, getattr(loader, 'dataset', None), getattr(loader, 'sampler', None)):
        if (set_epoch := getattr(part, 'set_epoch', None)) is not None:
            set_epoch(epoch)
            return


def skip_batches(loader: Any, number: int) -> Iterable[Any]:
    """Take a number of batches, and drop them."""
    return itertools.islice(loader, number, None)


def no_point(point: str, epochs: Epochs, epoch: int, done: int) -> None:
    """Save nothing."""


def train(
    loader: Any,
    steps: int,
    start: tuple[int, int] = (0, 0),
    has_state: bool = False,
    limit: int | None = None,
    reached: Callable[[str, Epochs, int, int], None] = no_point,
    iterate: Callable[[Any, int], Iterable[Any]] = skip_batches,
    tells: bool = True,
) -> Epochs:
    """Train for all epochs, and return the ids of each.

    Args:
      loader: what gives the batches.
      steps: batches in an epoch.
      start: the epoch to begin with, unless the loader knows it, and the batches of it that were seen.
      has_state: True if the loader itself leaves these out.
      limit: number of batches after which the loop leaves an epoch.
      reached: called at each point, where a program saves, with the epoch and the batches of it that were seen.
      iterate: returns the batches behind a number of them.
      tells: False if the loop tells no epochs.
    """
    seen: Epochs = [[] for _ in range(EPOCHS)]
    first, done = start
    reached('before the first batch', seen, 0, 0)
    for epoch in range(getattr(loader, 'epoch', first), EPOCHS):
        if tells:
            tell_epoch(loader, epoch)
        done = done if epoch == first else 0
        for number, batch in enumerate(iterate(loader, 0 if has_state else done), done + 1):
            seen[epoch] += ids_of(batch)
            if epoch == STOPPED_IN and number == AT:
                reached('in an epoch', seen, epoch, number)
            if epoch == STOPPED_IN and number == steps:
                reached('after the last batch', seen, epoch, number)
            if number == limit:
                break
        if epoch == STOPPED_IN:
            reached('between epochs', seen, epoch + 1, 0)
    return seen


class Driver:
    """Runs the cases of one kind of loader in the loop of a user.

    Args:
      recorder: takes the results.
      driver: what drives the loop.
      name: of the kind.
      kind: the kind.
      setting: that of this process.
      save: returns a state of the loader, given a loader and a name; None if it has none.
      load: restores a loader from it.
      prepare: returns what the framework makes of a new loader.
      iterate: returns the batches behind a number of them, for a loader without a state.
      tells: False if the loop tells no epochs.
      mode: a setting of the framework, which the names of the scenarios end with.
    """

    def __init__(
        self,
        recorder: Recorder,
        driver: str,
        name: str,
        kind: Kind,
        setting: Setting,
        save: Callable[[Any, str], Any] | None = None,
        load: Callable[[Any, Any], None] | None = None,
        prepare: Callable[[Any], Any] = lambda loader: loader,
        iterate: Callable[[Any, int], Iterable[Any]] = skip_batches,
        mode: str = '',
        tells: bool = True,
    ) -> None:
        self._recorder, self._driver, self._name = recorder, driver, name
        self._kind, self._setting, self._mode = kind, setting, mode
        self._save, self._load, self._prepare = save, load, prepare
        self._options: dict[str, Any] = {'iterate': iterate, 'tells': tells}
        self._saved: dict[str, Saved] = {}

    def _make(self) -> Any:
        return self._prepare(self._kind.make(self._setting))

    def _case(self, scenario: str, function: Callable[[], tuple[Epochs, Epochs]]) -> Epochs | None:
        case = Case(self._driver, self._name, self._setting.workers, scenario + self._mode)
        return self._recorder.run(case, function)

    def run(self) -> None:
        """Run each case: the whole training first, with which the others are compared."""
        self.run_resumed(self.run_whole())

    def run_whole(self) -> dict[str, Any] | None:
        """Run the whole training, and return what it saw and its states, as plain values; None if it failed."""
        whole = self._case('whole', self._whole)
        saved = {point: dataclasses.asdict(saved) for point, saved in self._saved.items()}
        return None if whole is None else {'whole': whole, 'saved': saved}

    def run_resumed(self, before: dict[str, Any] | None) -> None:
        """Run the other cases, after those of ``run_whole``, maybe in another process."""
        if before is None:
            return
        whole, saved = before['whole'], {point: Saved(**fields) for point, fields in before['saved'].items()}
        few = self._setting.workers > 0  # the other cases take as many processes, and are of the consumer alone
        for point in ('in an epoch', 'between epochs') if few else POINTS:
            self._case(f'resumed {point}', lambda point=point: (self._resumed(saved[point]), whole))
        if few:
            return
        self._case('a look at the first batch', lambda: (self._looked(), whole))
        self._case('loops of a few batches', lambda: (self._limited(), [ids[: LIMIT * BATCH] for ids in whole]))

    def _whole(self) -> tuple[Epochs, Epochs]:
        loader = self._make()

        def reached(point: str, seen: Epochs, epoch: int, done: int) -> None:
            state = None if self._save is None else copy.deepcopy(self._save(loader, point))
            self._saved[point] = Saved(state, copy.deepcopy(seen), epoch, done)

        seen = train(loader, self._setting.steps, reached=reached, **self._options)
        return seen, seen

    def _resumed(self, saved: Saved) -> Epochs:
        loader = self._make()
        if self._load is not None:
            self._load(loader, saved.state)
        start, has_state = (saved.epoch, saved.done), self._load is not None
        rest = train(loader, self._setting.steps, start, has_state, **self._options)
        return [before + after for before, after in zip(saved.seen, rest, strict=True)]

    def _looked(self) -> Epochs:
        loader = self._make()
        next(iter(loader))
        return train(loader, self._setting.steps, **self._options)

    def _limited(self) -> Epochs:
        return train(self._make(), self._setting.steps, limit=LIMIT, **self._options)


def rank_and_ranks() -> tuple[int, int]:
    """Return the place of this process in torch.distributed."""
    group = torch.distributed
    return (group.get_rank(), group.get_world_size()) if group.is_initialized() else (0, 1)
