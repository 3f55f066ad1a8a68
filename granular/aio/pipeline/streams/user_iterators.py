"""Iterators of the user's as a stage."""

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from granular.aio.pipeline.blocking_iterator import flows_of
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.position import FREE, Fit, RestoreRules, restoring
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import ClosedError, InvalidArgumentError


class Iterated(Stream):
    """The elements of an iterable of the user's, which reads the parents itself.

    Iterators have ``get_state`` and ``set_state``; ``rebuild`` returns the stage of a copy that reads other streams.
    """

    def __init__(
        self, dataset: Any, parents: Sequence[Stream], rebuild: 'Callable[[Any, Sequence[Stream]], Iterated]'
    ) -> None:
        super().__init__(*parents)
        self._dataset, self._rebuild = dataset, rebuild

    def outline(self) -> dict[str, Any]:
        return {'stage': self.describe()}  # its state is the user's

    def over(self, parents: Sequence[Any]) -> Stream:
        return self._rebuild(self._dataset, parents)

    def expecting(self, parts: int) -> Stream:
        return self

    def sharded(self, part: ShardOptions) -> Stream:
        raise InvalidArgumentError(f'{self.describe()} cannot be divided into {part.shard_count} shards')

    def reseeded(self, epoch: int) -> Stream:
        raise InvalidArgumentError(f'{self.describe()} has no epoch {epoch}')

    def flow(self) -> Flow:
        return Iterating(self._dataset, self.describe())

    def describe(self) -> str:
        return type(self._dataset).__qualname__.replace('<locals>.', '')


class Iterating(Flow):
    kind = 'subclass of IterDataset'
    fit = Fit(False, 'elements', weights=False, remedy='use map instead')
    calls_functions = True

    def __init__(self, dataset: Any, description: str) -> None:
        self._stage = description
        self._lock = threading.Lock()  # as a call goes on in its thread when its caller is cancelled
        self._iterator = call_user(iter, dataset)
        for name in ('get_state', 'set_state'):
            if not callable(getattr(self._iterator, name, None)):
                raise InvalidArgumentError(f'an iterator of {type(dataset).__name__} has no method {name}')
        for flow in self.inputs():
            flow.keep_host()

    def inputs(self) -> Sequence[Flow]:
        return flows_of(self._iterator)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_lock': None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            return fn(*args)

    async def next(self) -> Any:
        return await offload(self._call, next, self._iterator, END)

    def state(self) -> Any:
        return copy.deepcopy(call_user(self._iterator.get_state))  # the iterator may change its own later

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        # The streams that it reads are restored within, by iterators of their own.
        token = restoring.set(rules.of(self._stage, self.kind, True))
        try:
            await offload(self._call, self._iterator.set_state, copy.deepcopy(state))
        finally:
            restoring.reset(token)

    async def aclose(self) -> None:
        close = getattr(self._iterator, 'close', None)
        if callable(close):
            with contextlib.suppress(ClosedError):  # no thread is left at the exit, where loops close what it reads
                await offload(close)
