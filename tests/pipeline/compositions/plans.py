"""Pipelines as plans: trees of operations which can be built again and again, with other weights, hosts and workers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from granular import ReadOptions, ShardOptions
from granular.grain import MultiprocessingOptions


@dataclasses.dataclass(frozen=True)
class Setting:
    """Choices that may differ each time a pipeline is built.

    Attributes:
      host, hosts: number of this host, and how many there are.
      weights: which of the weights of each mix by name.
      read: limits of the read-ahead.
      prefetch: added to the sizes of all ``prefetch`` stages.
      batch: size of a last ``batch`` of a pipeline of several hosts.
      processes: worker processes of ``mp_prefetch`` stages.
      method: their start method.
      tracks: the streams of mixes by name that are mixed at all; all of them by default.
      unmixed: True to leave out the stages behind a mix that only reorder or combine, to see its streams in order.
      leaf: the stream to see as a whole: what is joined with it has no end.
    """

    host: int = 0
    hosts: int = 1
    weights: int = 0
    read: ReadOptions | None = None
    prefetch: int = 0
    batch: int = 2
    processes: int = 1
    method: str = 'fork'
    tracks: frozenset[str] | None = None
    unmixed: bool = False
    leaf: int | None = None

    @property
    def shard(self) -> ShardOptions:
        return ShardOptions(self.host, self.hosts)

    @property
    def workers(self) -> MultiprocessingOptions:
        return MultiprocessingOptions(self.processes, 2, self.method)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Kind of the elements of a dataset, as far as operations depend on it.

    Attributes:
      kind: 'item', an atom; 'doc', a document; 'row' of pack; 'array', a default batch; 'list', a batch by ``list``; or
        'tuple', of zip.
      stackable: True if batches of them may be stacked.
      rows: True if they are batches that ``rebatch`` divides.
      combined: True if an element consists of several datapoints.
      sparse: True if some are None.
      labelled: True if they have a label.
    """

    kind: str
    stackable: bool = False
    rows: bool = False
    combined: bool = False
    sparse: bool = False
    labelled: bool = False

    def but(self, **changes: Any) -> 'Shape':
        return dataclasses.replace(self, **changes)


ITEM = Shape('item', stackable=True)
DOCUMENT = Shape('doc', labelled=True)


@dataclasses.dataclass(frozen=True)
class By:
    """An argument that depends on the setting."""

    text: str
    of: Callable[[Setting], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An operation and what it is applied to.

    Attributes:
      name: the class and the operation, such as 'IterDataset.batch'.
      text: the pipeline up to here as an expression.
      make: function of the built parents and the setting.
      neutral: True if the operation keeps all atoms, and only reorders or combines them.
      mixed: True if a mix by name is at or above it.
      loses: True if the end of the stream may be dropped.
      leaves: the streams of its source by number, each with the tracks of mixes by name that it runs through.
    """

    name: str
    text: str
    make: Callable[[list[Any], Setting], Any]
    parents: tuple['Node', ...] = ()
    shape: Shape = ITEM
    neutral: bool = False
    mixed: bool = False
    loses: bool = False
    epochs: int = 1
    leaves: tuple[tuple[int, frozenset[str]], ...] = ()

    def build(self, setting: Setting) -> Any:
        if setting.unmixed and self.mixed and self.neutral and self.parents[0].mixed:
            return self.parents[0].build(setting)
        datasets = [parent.build(setting) for parent in self.parents]
        if setting.leaf in dict(self.leaves) and self.name in ('IterDataset.zip', 'IterDataset.mix'):
            datasets = [
                dataset if setting.leaf in dict(parent.leaves) else dataset.repeat()
                for parent, dataset in zip(self.parents, datasets, strict=True)
            ]
        return self.make(datasets, setting)

    @functools.cached_property
    def built(self) -> Any:
        """The dataset with the usual setting."""
        return self.make([parent.built for parent in self.parents], Setting())

    @property
    def kind(self) -> str:
        """The class of the dataset."""
        return 'IterDataset' if self.name.endswith('.to_iter_dataset') else self.name.split('.')[0]

    def operations(self) -> Iterator[str]:
        for parent in self.parents:
            yield from parent.operations()
        yield self.name

    def pairs(self) -> set[tuple[str, str]]:
        """Return each operation with each operation behind it."""
        out: set[tuple[str, str]] = set()
        for parent in self.parents:
            out |= parent.pairs() | {(above, self.name) for above in parent.operations()}
        return out

    def then(self, name: str, *args: Any, shape: Shape | None = None, **options: Any) -> 'Node':
        """Return this pipeline with a further operation, the method ``name`` of the dataset."""
        facts = {key: options.pop(key) for key in ('neutral', 'loses', 'epochs') if key in options}
        facts['loses'] = facts.get('loses', False) or self.loses
        facts['epochs'] = facts.get('epochs', 1) * self.epochs

        def make(parents: list[Any], setting: Setting) -> Any:
            values = [resolved(value, setting) for value in args]
            return getattr(parents[0], name)(*values, **{key: resolved(v, setting) for key, v in options.items()})

        shown = [shown_as(value) for value in args] + [f'{key}={shown_as(value)}' for key, value in options.items()]
        return Node(
            f'{self.kind}.{name}', f'{self.text}.{name}({", ".join(shown)})', make, (self,),
            self.shape if shape is None else shape, mixed=self.mixed, leaves=self.leaves, **facts,
        )  # fmt: skip

    def renamed(self, name: str) -> 'Node':
        return dataclasses.replace(self, name=name)


def resolved(value: Any, setting: Setting) -> Any:
    return value.of(setting) if isinstance(value, By) else value


def shown_as(value: Any) -> str:
    if isinstance(value, By):
        return value.text
    if isinstance(value, list | tuple):
        return f'[{", ".join(map(shown_as, value))}]'
    return getattr(value, '__name__', None) or repr(value)


def joined(
    name: str, text: str, make: Callable[[list[Any], Setting], Any], parents: Sequence[Node], shape: Shape, **facts: Any
) -> Node:
    """Return an operation on several pipelines."""
    facts = {
        'mixed': any(parent.mixed for parent in parents),
        'loses': any(parent.loses for parent in parents),
        'leaves': tuple(leaf for parent in parents for leaf in parent.leaves),
        'epochs': max(parent.epochs for parent in parents),
        **facts,
    }
    return Node(name, text, make, tuple(parents), shape, **facts)
