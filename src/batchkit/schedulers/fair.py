"""Fair shares among tenants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace, nlargest

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions, Step
from ..sequence import Sequence, Status
from ._arguments import check_count, check_number
from ._books import WaitingBook
from .chunked import ChunkedPrefillScheduler

__all__ = ["FairScheduler"]

_SLACK = 64  # idle tenants beyond as many as there are others, before they are swept out


class FairScheduler(ChunkedPrefillScheduler):
    """Admits from the tenant that has been served least, so that no flood of one slows the others down.

    The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24), Algorithm 2: a
    tenant's counter grows by `input_weight` for each token of a prompt when it is admitted, and by `output_weight` for
    each token generated. The next request is the earliest of the tenant with the lowest counter; who comes back after
    an idle time starts no lower than the others, so that nobody saves up. Among two tenants that always have requests
    waiting, the weighted tokens served since any moment differ by at most
    ``2 * max(input_weight * longest prompt, output_weight * KV slots of the pool)`` (Theorem 4.4; for
    ``input_weight <= output_weight``).

    The tenant is ``str(request.metadata["tenant"])``; requests without one share one. Tokens are charged when they have
    been generated, a prompt once, and nothing for computing it again after a preemption. Within a tenant it is first
    come first served, so nobody starves. Memory is not shared out: when it runs out, the newest sequence gives way,
    whosever it is.

    A step costs the sequences that have run and not ended; an arrival and an admission cost the logarithms of the
    tenant's queue and of the number of tenants.

    Args:
        input_weight, output_weight: what a token of a prompt and a generated token count. Default: 1 and 2, as in the
            paper.
        max_idle_tenants: of tenants without a request so many are remembered, at least, those that were served most.
            One that is forgotten comes back like a new one.

    Attributes:
        counters: by tenant. An idle one is left out, in time, if it would be lifted anyway.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        max_idle_tenants: int = 10_000,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
            check_number(name, weight)
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {weight}")
        if not input_weight + output_weight:
            raise ValueError("input_weight and output_weight are both 0, so that nothing counts")
        check_count("max_idle_tenants", max_idle_tenants, 0)
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.max_idle_tenants = max_idle_tenants
        self.counters: dict[str, float] = {}
        self._charged: dict[int, tuple[Sequence, int]] = {}  # live ones that have run, and their tokens paid for
        self._book = WaitingBook()
        self._queues: dict[str, list[tuple[int, Sequence]]] = {}  # heaps by id, of those that wait
        self._tenants: list[tuple[float, str]] = []  # a heap of those with a queue, by their counters or lower
        self._passed: list[str] = []  # tenants that the last walk took out of the heap
        self._last: str | None = None  # the tenant that nobody waits for since the shortest time
        self._prune_at = _SLACK

    @staticmethod
    def tenant(seq: Sequence) -> str:
        """Whose request it is."""
        return str(seq.request.metadata.get("tenant", ""))

    @override
    def schedule(self, step: Step) -> None:
        self._charge()
        super().schedule(step)

    @override
    def order(self, now: float) -> Iterator[Sequence]:
        self._take_in()
        while (tenant := self._least_served()) is not None:
            seq = self._queues[tenant][0][1]
            yield seq
            if seq.status is Status.WAITING:  # refused, and the caller goes on: with another tenant
                heappop(self._tenants)
                self._passed.append(tenant)
            else:
                self._charge_prompt(seq)

    def _charge(self) -> None:
        """Charge what was generated since the last time, and forget who has gone."""
        for seq in self.running:
            self._charge_prompt(seq)
        gone: list[int] = []
        for seq_id, (seq, paid) in self._charged.items():
            length = len(seq.output)
            if length > paid:
                self.counters[self.tenant(seq)] += self.output_weight * (length - paid)
                self._charged[seq_id] = (seq, length)
            if seq.status is Status.FINISHED:
                gone.append(seq_id)
        for seq_id in gone:
            del self._charged[seq_id]

    def _charge_prompt(self, seq: Sequence) -> None:
        if seq.id not in self._charged:
            tenant = self.tenant(seq)
            self.counters[tenant] = self.counters.get(tenant, 0.0) + self.input_weight * seq.num_prompt
            self._charged[seq.id] = (seq, 0)

    def _take_in(self) -> None:
        """Queue who has come to wait, and lift the counters of tenants that nobody waited for."""
        for tenant in self._passed:
            heappush(self._tenants, (self.counters[tenant], tenant))
        self._passed.clear()
        for seq in self._book.find_new(self.waiting):
            tenant = self.tenant(seq)
            if tenant not in self._queues:
                self.counters[tenant] = max(self.counters.get(tenant, 0.0), self._floor())
                self._queues[tenant] = []
                heappush(self._tenants, (self.counters[tenant], tenant))
            heappush(self._queues[tenant], (seq.id, seq))
        if self._book.is_stale(self.waiting):
            self._drop_aborted()
        if len(self.counters) > self._prune_at:
            self._drop_idle()

    def _least_served(self) -> str | None:
        """Of the tenants that somebody waits for, the one with the lowest counter."""
        while self._tenants:
            counter, tenant = self._tenants[0]
            queue = self._queues[tenant]
            while queue and queue[0][1].status is not Status.WAITING:
                self._book.forget(heappop(queue)[1])
            if not queue:
                heappop(self._tenants)
                del self._queues[tenant]
                self._last = tenant
            elif counter == self.counters[tenant]:
                return tenant
            else:
                heapreplace(self._tenants, (self.counters[tenant], tenant))
        return None

    def _floor(self) -> float:
        """Where a tenant starts that nobody waited for; never falls."""
        tenant = self._least_served() or self._last
        return 0.0 if tenant is None else self.counters[tenant]

    def _drop_aborted(self) -> None:
        self._book.clear()
        self._book.find_new(self.waiting)
        waiting = {
            tenant: [entry for entry in queue if entry[1].status is Status.WAITING]
            for tenant, queue in self._queues.items()
        }
        if self._queues and not any(waiting.values()):  # as if they had left one by one: nobody starts below them
            self._last = min(self._queues, key=self.counters.__getitem__)
        self._queues = {tenant: queue for tenant, queue in waiting.items() if queue}
        for queue in self._queues.values():
            heapify(queue)
        self._tenants = [(self.counters[tenant], tenant) for tenant in self._queues]
        heapify(self._tenants)

    def _drop_idle(self) -> None:
        """Forget the tenants that would be lifted to the floor when they come back, and those beyond the limit."""
        floor = self._floor()
        active = {self.tenant(seq) for seq, _ in self._charged.values()} | self._queues.keys() | {self._last}
        idle = [(counter, t) for t, counter in self.counters.items() if counter > floor and t not in active]
        kept = active.union(tenant for _, tenant in nlargest(self.max_idle_tenants, idle))
        self.counters = {tenant: counter for tenant, counter in self.counters.items() if tenant in kept}
        self._prune_at = 2 * len(self.counters) + _SLACK
