"""The operations of a MapDataset of the sync API whose elements are planned."""

from collections.abc import Mapping, Sequence
from typing import Any

from granular._support.other_names import answering
from granular.aio.pipeline.nodes.packed import packed
from granular.aio.pipeline.nodes.size_batches import BudgetArguments, Cost, batched_by_size
from granular.aio.pipeline.planned_operations import PlannedOperations
from granular.aio.pipeline.streams.packing_options import Longer, PlannedRecipe, PlannedStrategy
from granular.aio.runtime.portal import run


class BlockingPlans(PlannedOperations):
    """The operations, which wait for the sizes."""

    @answering()
    def pack(
        self,
        length: Mapping[str, Any],
        *,
        strategy: PlannedStrategy = 'best_fit',
        classes: int | None = None,
        sizes: Any = None,
        bos: Any = None,
        alignment: int | Mapping[str, Any] | None = None,
        padding: Any = None,
        max_segments: int | None = None,
        separator: Any = None,
        extra: int = 0,
        documents: bool = False,
        cu_seqlens: bool = False,
        longer: Longer = 'raise',
    ) -> Any:
        recipe = PlannedRecipe(
            length, strategy, classes, bos, alignment, padding, max_segments, separator, extra, documents, cu_seqlens,
            longer,
        )  # fmt: skip
        return self._of(run(packed(self._node, recipe, sizes)))

    @answering()
    def batch_by_size(
        self,
        key: str | Sequence[str],
        max_size: float,
        *,
        buckets: int | Sequence[int] = 8,
        cost: Cost | None = None,
        sizes: Any = None,
        max_elements: int | None = None,
        align: int = 1,
        drop_remainder: bool = False,
    ) -> Any:
        arguments = BudgetArguments(key, max_size, buckets, cost, max_elements, align, drop_remainder)
        return self._of(run(batched_by_size(self._node, arguments, sizes)))
