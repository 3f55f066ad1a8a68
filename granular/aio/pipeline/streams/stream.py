"""Streams: the stages of an IterDataset.

A ``Stream`` describes a stage; ``flow`` starts it. A ``Flow`` returns elements one after another and has, between any
two of them, the state from which the next one follows: indices, not data. Operations on single elements that directly
follow the reading of a MapDataset are merged into it, so that they share its fan-out, its threads and its worker
processes.
"""

import abc
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Self, cast

from granular._support.indexing import Seed
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.origins import Picked, Stage
from granular.aio.pipeline.position import FITS
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.transforms import DatasetOptions, MultiprocessingOptions, divided
from granular.errors import InvalidArgumentError, StateError


class RenumberedError(StateError):
    """The elements before a state are not those that have the numbers before the next one."""


class Stream(Stage):
    """A stage of an IterDataset."""

    parents: tuple[Any, ...] = ()  # the previous stages, or the source
    transparent = False  # True if a state of this stage is that of its only parent
    unlisted = False  # True if it has the description of its parent, and is not listed beside it
    stateless = False  # True if states do not depend on it, so that it is no part of a fingerprint
    apart = False  # True if hosts do not advance equally through it
    dataset_options: DatasetOptions = DatasetOptions()  # those that were set after this stage
    declared_seed: Seed | None = None  # that this stage sets for later ones

    def __init__(self, *parents: Any) -> None:
        self.parents = parents

    @property
    def parent(self) -> 'Stream':
        """The only previous stage."""
        return cast(Stream, self.parents[0])

    @abc.abstractmethod
    def flow(self) -> Flow: ...

    @abc.abstractmethod
    def describe(self) -> str: ...

    def line(self) -> Line:
        """Return the description of the stage, by which a state belongs to a pipeline."""
        return Line(self.describe())

    @property
    def hosts(self) -> int:
        """The number of hosts that share the elements; 0 if only streams that are made later tell it."""
        return max((parent.hosts for parent in self.parents), default=1)

    def merged(self) -> Any:
        """Return this stage and all before it as one ``Read`` of a source, or None if they cannot be merged."""
        return None

    def length(self) -> int:
        """Return the number of elements of a stage with random access, which does not compute those that it skips; of
        any other stage, raise ``InvalidArgumentError``.
        """
        raise InvalidArgumentError(f'{self.describe()}: elements of this stage have no index')

    def index_of(self, state: Any) -> int:
        """Return the number of the element that follows a state; raise ``StateError`` between two elements."""
        self.length()
        return self.parent.index_of(state)

    def counted_index(self, state: Any) -> int:
        """Return the number of elements in a state; raise ``StateError`` unless that of the parent is equal."""
        count, index = cast(int, state['count']), Stream.index_of(self, state['parent'])
        if index != count:
            raise StateError(
                f'{self.describe()}: elements have no index since the stream resumed at element {index} with another '
                f'number of shards, after {count} elements'
            )
        return count

    def state_at(self, index: int) -> Any:
        """Return the state that an element follows, by its number from 0 to ``length()``."""
        return self.parent.state_at(index)

    def outline(self) -> dict[str, Any]:
        """Return the sources that the stage reads, plain JSON; ``state_description.py`` reads it with a state.

        Stages with the state of their parent are left out. A stage without parents has sources that are not known.
        """
        if self.transparent:
            return self.parent.outline()
        apart = {'apart': True} if self.apart else {}
        return {'stage': self.describe(), 'of': [parent.outline() for parent in self.parents], **apart}

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        """Return what elements are made of, by their numbers; raise ``InvalidArgumentError`` if they have none."""
        self.length()
        return [(self.parent, picked)]

    def replaced(self, **changes: Any) -> Self:
        stream = type(self).__new__(type(self))
        stream.__dict__.update(self.__dict__, **changes)
        return stream

    def over(self, parents: Sequence[Any]) -> 'Stream':
        return self.replaced(parents=tuple(parents))

    def over_each(self, change: Callable[[Any], Any], refusal: str = '') -> 'Stream':
        """Return the same stream over its changed parents; if it has none, raise an error with the refusal, if any."""
        if refusal and not self.parents:
            raise InvalidArgumentError(f'{self.describe()} {refusal}')
        return self.over([change(parent) for parent in self.parents])

    def with_workers(self, options: MultiprocessingOptions) -> 'Stream':
        return self.over_each(methodcaller('with_workers', divided(options, len(self.parents))))

    def with_options(self, options: DatasetOptions) -> 'Stream':
        stream = self.over_each(methodcaller('with_options', options))
        stream.dataset_options = options
        return stream

    def sharded(self, part: ShardOptions) -> 'Stream':
        """Return a shard of the stream: every ``shard_count``-th element of all that it reads."""
        return self.over_each(methodcaller('sharded', part), f'cannot be divided into {part.shard_count} shards')

    def sliced(self, part: slice) -> 'Stream':
        """Return the same stream of a part of what it reads."""
        return self.over_each(methodcaller('sliced', part), 'cannot be sliced')

    def in_part(self, part: ShardOptions) -> 'Stream':
        """Return the same stream of one of several contiguous parts of its data sources."""
        return self.over_each(methodcaller('in_part', part), f'cannot be divided into {part.shard_count} parts')

    def at_epoch(self, epoch: int) -> 'Stream':
        """Return the stream of an epoch, in which random stages have other orders and numbers, by seed and epoch.

        Epoch 0 is the stream itself, and so is each epoch of a stream of files alone.
        """
        if not epoch:
            return self
        return self.over_each(methodcaller('at_epoch', epoch), f'has no epoch {epoch}').reseeded(epoch)

    def reseeded(self, epoch: int) -> 'Stream':
        """Return this stage with the random numbers of an epoch; itself if it draws none."""
        return self

    def keep_selections(self, warn: bool = True) -> 'Stream':
        """Return the stream with the same elements in each selection in all epochs, as ``Source.keep_selections``."""
        parents = [parent.keep_selections(warn) for parent in self.parents]
        same = all(new is old for new, old in zip(parents, self.parents, strict=True))
        return self if same else self.over(parents)

    async def divisions(self) -> set[int]:
        """Return the numbers of shards into which the streams that it reads are divided: one number if all are equal.

        Of streams that are made later, the first one is made to tell.
        """
        return {part for parent in self.parents for part in await parent.divisions()} or {1}

    def expecting(self, parts: int) -> 'Stream':
        """Return the same stream, which raises an error if one that it makes is not divided into so many shards."""
        return self.over_each(methodcaller('expecting', parts))

    def roots(self) -> list[Any]:
        """Return each ``Read`` that the stream starts from."""
        return [root for parent in self.parents for root in parent.roots()]


class Unchanged(Stream):
    """A stage that yields the elements of its only parent, unchanged and in order."""

    transparent = True

    def length(self) -> int:
        return self.parent.length()

    def flow(self) -> Flow:
        return self.parent.flow()


class SeededStream(Unchanged):
    """A stage that sets the default seed for later random operations, whose descriptions have it."""

    stateless = True

    def __init__(self, parent: Stream, seed: Seed) -> None:
        super().__init__(parent)
        self.declared_seed = seed

    def merged(self) -> Any:
        return self.parent.merged()

    def describe(self) -> str:
        return f'seed({self.declared_seed})'


class Staged(Stream):
    """A stage whose flow a function creates of its parent's, the description and arguments."""

    def __init__(self, parent: Stream, line: Line, start: Callable[..., Flow], *args: Any) -> None:
        super().__init__(parent)
        self._line = line
        self._start = start
        self._args = args
        fit = FITS.get(getattr(start, 'kind', ''))
        self.apart = fit is not None and not fit.in_step

    def flow(self) -> Flow:
        return self._start(self.parent.flow(), self.describe(), *self._args)

    def line(self) -> Line:
        return self._line

    def describe(self) -> str:
        return str(self._line)
