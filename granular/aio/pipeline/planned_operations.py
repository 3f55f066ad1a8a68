"""Operations of a MapDataset whose elements are planned by the sizes of others."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from granular._support.other_names import answering
from granular.aio.pipeline.nodes.indices import beneath
from granular.aio.pipeline.nodes.packed import packed
from granular.aio.pipeline.nodes.size_batches import BudgetArguments, Cost, SizeBatches, batched_by_size
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.streams.packing_options import Longer, PlannedRecipe, PlannedStrategy
from granular.errors import InvalidArgumentError


class PlannedOperations:
    """The operations of the async API."""

    _node: Source

    if TYPE_CHECKING:

        @classmethod
        def _of(cls, node: Source) -> Self: ...

    @answering(**dict.fromkeys(('max_length', 'max_seq_length', 'seq_len'), "length, such as {'tokens': 2048}"))
    async def pack(
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
        """Pack sequences into rows of fixed lengths, by a plan of their sizes, before anything is read.

        Rows have the keys that ``IterDataset.pack`` gives them. Each epoch has as many rows, with each document once:
        those of about equal size take their places in the order of the epoch. If that differs from epoch to epoch, so
        does the order of the rows; otherwise they are in the order of their first documents. Empty documents are left
        out, which is logged. A row that is read reads its documents, in one fan-out for a batch of rows.

        Args:
          length: length of a row, for each feature, such as ``{'tokens': 2048}``; nested as the elements are.
          strategy: ``'best_fit'`` keeps documents whole: the largest first, each in the fullest row with enough space.
            ``'concat_then_split'`` divides the documents of an epoch, one behind the other, into rows.
          classes: number of sizes to which documents are rounded up for the plan: the fewer, the more companions a
            document has over the epochs, and the more padding. By default as many as leave 200 documents in each, from
            64 to 512.
          sizes: the sizes of the documents, where the source does not tell them, as behind ``map``: an array with one
            for each element of the source beneath shuffles, selections and functions, or the name of a key that has
            them; one for all features, or a mapping from features to these.
          bos, alignment, padding, max_segments: as for ``IterDataset.pack``; parts have a ``bos``, too.
          separator: value that is added at the end of each document.
          extra: positions that a row has beyond ``length``; with ``concat_then_split``, the next row begins with their
            values, as for labels that are shifted by one.
          documents: True to add ``{name}_documents``: of the document at each position, its place in the order of this
            dataset, which grows over epochs; -1 for padding. :meth:`indices` names the datapoint of the source.
          cu_seqlens: True to add ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, for flash
            attention in a batch of one row: where sequences begin, padding as the last of them.
          longer: what is done with a document that is longer than a row: ``'raise'``, ``'cut'``, ``'drop'``, or
            ``'divide'`` it into rows and a rest.

        Raises:
          InvalidArgumentError: for sizes that are not known, a document that is too long, or epochs that differ in
            their elements.
          DatapointError: in iteration, for an element whose size is not that of the plan.
        """
        recipe = PlannedRecipe(
            length, strategy, classes, bos, alignment, padding, max_segments, separator, extra, documents, cu_seqlens,
            longer,
        )  # fmt: skip
        return self._of(await packed(self._node, recipe, sizes))

    @answering(**dict.fromkeys(('max_tokens', 'max_length', 'batch_size', 'budget'), 'max_size'))
    async def batch_by_size(
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
        """Combine elements of about equal size to padded batches within a budget, planned before anything is read.

        An element is padded with zeros to the top of its bucket. A batch is a dict of arrays; beside ``key`` it has
        ``{key}_sizes``, which are 0 in rows without an element: the elements of a bucket are divided evenly over its
        batches. Other keys are stacked, and are zero there. Each epoch has as many batches, and they are shuffled as
        the elements are. Empty elements are left out, which is logged.

        Args:
          key: key whose values are padded along their first axis; or several, whose sizes are equal.
          max_size: the largest cost of a batch.
          buckets: number of buckets, whose tops are chosen for the least padding; or the tops.
          cost: function of the number of elements and the top, which grows with both; by default their product.
          sizes: as for :meth:`pack`.
          max_elements: the largest number of elements of a batch.
          align: number of batches in a row that have the same top, so that as many ranks, or a divisor of it, share the
            cost of a step. Of few elements, batches may have none.
          drop_remainder: True to drop the elements that do not fill ``align`` batches: others in each epoch.

        Raises:
          InvalidArgumentError: for sizes that are not known, an element that exceeds the budget, or epochs that differ
            in their elements.
          DatapointError: in iteration, for an element whose size is not that of the plan.
        """
        arguments = BudgetArguments(key, max_size, buckets, cost, max_elements, align, drop_remainder)
        return self._of(await batched_by_size(self._node, arguments, sizes))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of batches of :meth:`batch_by_size`: the number of elements, and the padded size."""
        batches = beneath(self._node, np.zeros(0, np.int64))[0]
        if not isinstance(batches, SizeBatches):
            raise InvalidArgumentError(f'shapes: {batches.describe()} has none: call batch_by_size() before')
        return batches.shapes
