"""Every exception that batchkit raises on purpose.

::

    BatchkitError
    |-- RequestError (ValueError)        a request that cannot be taken, refused by add_request
    |   |-- RequestTooLong               can never fit the model's length or the KV pool
    |   `-- DuplicateRequest             its id is that of a request which is still alive
    |-- PromptsFailed (ValueError)       the iterable given to generate or stream raised
    |-- PolicyError (RuntimeError)       a scheduler used a verb of its Step in a way that has no meaning
    |-- SchedulerStalled (RuntimeError)  a scheduler left live requests without work and without a time to wait for
    |-- EngineBusy (RuntimeError)        called from another thread, or from inside the step, while a step runs
    |-- EngineClosed (RuntimeError)      called after close()
    |-- EngineFull (RuntimeError)        as many requests wait as EngineThread(max_waiting=) allows
    |-- EngineFailed (RuntimeError)      the runner kept failing; the requests are still there
    |-- RunnerError (RuntimeError)       raised by runners, handled by the engine
    |   |-- RunnerOutOfMemory            this step was too large; a smaller one may work
    |   `-- KVLost                       the KV cache no longer holds what was written to it
    |-- UnsupportedModel (ValueError)    a model that cannot be bound, with every reason
    |-- OutOfKVMemory (ValueError)       not even one KV block fits in the memory given
    |-- InvariantError (AssertionError)  a check() found broken books: a bug in batchkit or in a part plugged into it
    `-- ConformanceError (AssertionError) batchkit.testing found a part that breaks a rule of its interface

Mistakes in the arguments of constructors raise plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import RequestOutput


class BatchkitError(Exception):
    """Base of every exception that batchkit raises on purpose."""


class RequestError(BatchkitError, ValueError):
    """A request that cannot be taken. The engine is as it was before the call."""


class RequestTooLong(RequestError):
    """A request that can never run alone: it exceeds the model's length or the whole KV pool."""


class DuplicateRequest(RequestError):
    """A request id that a live request already has."""


class PromptsFailed(BatchkitError, ValueError):
    """The iterable of prompts, or of params, raised; its exception is the cause.

    Attributes:
        outputs: of `Engine.generate`: the final outputs of the prompts before, in their order.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.outputs: list[RequestOutput] = []


class PolicyError(BatchkitError, RuntimeError):
    """A scheduler used a verb of its Step in a way that has no meaning, such as running a sequence twice."""


class SchedulerStalled(BatchkitError, RuntimeError):
    """Requests are alive, but the scheduler chose none of them and named no time to wait for."""


class EngineBusy(BatchkitError, RuntimeError):
    """The engine was called while one of its steps was running."""


class EngineClosed(BatchkitError, RuntimeError):
    """The engine was called after close()."""


class EngineFull(BatchkitError, RuntimeError):
    """As many requests wait as `EngineThread` may have, and none began to run in the time that the caller has."""


class EngineFailed(BatchkitError, RuntimeError):
    """The runner failed again and again without producing a token in between.

    No request was ended by it: they can be stepped again, aborted, or closed with the engine.
    """


class RunnerError(BatchkitError, RuntimeError):
    """Base of the faults that a runner reports in a way the engine understands."""


class RunnerOutOfMemory(RunnerError):
    """The step was too large for the device's free memory. The engine tries again with fewer tokens."""


class KVLost(RunnerError):
    """The KV cache no longer holds what was written to it. The engine recomputes every running sequence."""


class UnsupportedModel(BatchkitError, ValueError):
    """A model that cannot run right under batchkit.

    Attributes:
        reasons: every reason that was found, not only the first.
    """

    def __init__(self, model: str, reasons: tuple[str, ...] | list[str]) -> None:
        self._model = model
        self.reasons = tuple(reasons)
        super().__init__(f"{model} cannot be bound: " + "; ".join(self.reasons))

    def __reduce__(self) -> tuple[type[UnsupportedModel], tuple[str, tuple[str, ...]]]:
        return type(self), (self._model, self.reasons)


class OutOfKVMemory(BatchkitError, ValueError):
    """Not even one KV block fits in the memory given or found."""


class InvariantError(BatchkitError, AssertionError):
    """A check() found books that do not balance; the message prints them."""


class ConformanceError(BatchkitError, AssertionError):
    """`batchkit.testing` found a part that breaks a rule of its interface.

    Attributes:
        rule: the rule, in one sentence.
    """

    def __init__(self, part: str, rule: str, details: str, where: str = "") -> None:
        self._parts = (part, rule, details, where)
        self.rule = rule
        super().__init__(f"{part} breaks a rule{f' {where}' if where else ''}: {rule}. {details}")

    def __reduce__(self) -> tuple[type[ConformanceError], tuple[str, str, str, str]]:
        return type(self), self._parts
