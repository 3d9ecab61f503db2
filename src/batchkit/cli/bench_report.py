"""What the experiments on the command line say, and the file in which their figures are kept."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..experiment.compare import Comparison, Goal, Run
from ..experiment.loads import Workload
from ..experiment.plots import NoPlots, check_plot
from ..experiment.policies import Policy
from ..experiment.targets import Target
from .bench_options import OUTPUTS
from .faults import NotDone, one_line

__all__ = ["Bar", "Cell", "Results", "check_outputs", "settings", "write_json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One comparison of an experiment.

    Attributes:
        label: for people, such as ``cap 96``.
        value: the number in it, for plots.
        workload, target: see `compare`.
        facts: of its own, for the JSON file: the budget and the like.
    """

    label: str
    value: float
    workload: Workload
    target: Target
    facts: dict[str, Any]


class Results:
    """What was measured so far, by cell, and its file.

    Args:
        path: of the file; None: none is written.
        head: what it says above the cells.
        cells: all of the experiment.
        policies, seeds: of each cell.
        goal: of the goodput.
    """

    def __init__(
        self,
        path: str | None,
        head: dict[str, Any],
        cells: Sequence[Cell],
        *,
        policies: Sequence[Policy],
        seeds: Sequence[int],
        goal: Goal | None = None,
    ) -> None:
        self._path = path
        self._head = head
        self._cells = cells
        self._goal = goal
        self._runs: dict[str, list[dict[str, Any]]] = {cell.label: [] for cell in cells}  # as JSON, made once
        self._todo = [(policy.name, seed) for seed in seeds for policy in policies]
        self.found = {cell.label: self._comparison(cell, ()) for cell in cells}
        self.write()

    def add(self, cell: Cell, run: Run) -> None:
        """Take in a run, and write the file anew."""
        self._runs[cell.label].append(run.to_json(self._goal, is_simulated=cell.target.is_simulated))
        self.found[cell.label] = self._comparison(cell, (*self.found[cell.label].runs, run))
        self.write()

    def _comparison(self, cell: Cell, runs: tuple[Run, ...]) -> Comparison:
        return Comparison(
            workload=cell.workload.name,
            runs=runs,
            is_simulated=cell.target.is_simulated,
            missing=tuple(self._todo[len(runs) :]),
        )

    def write(self) -> None:
        """Write the file, if there is to be one; see `write_json`."""
        if self._path is None:
            return
        cells = [
            {"cell": cell.label, **cell.facts, **self.found[cell.label].head(), "runs": self._runs[cell.label]}
            for cell in self._cells
        ]
        write_json(self._path, {**self._head, "cells": cells})


def write_json(path: str, content: dict[str, Any]) -> None:
    """Put a file in the place of the one before, so that there is a whole one at any time.

    A link stays one, and the file that it leads to is the one that is replaced. What is no file, such as a pipe or a
    device, is written to.

    Raises:
        NotDone: it cannot be written.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            _write(path, text)
        else:
            _replace(os.path.realpath(path), text)
    except OSError as error:
        raise NotDone(f"{path} cannot be written: {error.strerror}") from None


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _replace(path: str, text: str) -> None:
    fresh = f"{path}.part"
    try:
        _write(fresh, text)
        os.replace(fresh, path)
    except BaseException:  # Ctrl-C too leaves the file that was there, and no part of another
        with suppress(OSError):
            os.unlink(fresh)
        raise


def settings(args: argparse.Namespace, policies: Sequence[Policy]) -> dict[str, Any]:
    """What was asked for, without the places of results."""
    left_out = {*OUTPUTS, "run", "command", "experiment", "policies", "scheduler"}
    return {
        **{name: value for name, value in vars(args).items() if name not in left_out},
        "policies": [
            {
                "name": policy.name,
                "scheduler": f"{policy.scheduler.__module__}:{policy.scheduler.__qualname__}",
                "arguments": {name: _plain(value) for name, value in policy.arguments.items()},
            }
            for policy in policies
        ],
    }


def _plain(value: Any) -> Any:
    """An argument as JSON takes it: what JSON cannot say, as Python writes it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value


def check_outputs(args: argparse.Namespace) -> None:
    """Find out before hours of work whether their results can be kept. Makes the folder for traces.

    Raises:
        NotDone: they cannot.
    """
    if args.plot is not None:
        folder = os.path.dirname(args.plot) or "."
        if not os.path.isdir(folder):
            raise NotDone(f"{args.plot} cannot be written: there is no folder {folder}")
        try:
            check_plot(args.plot)
        except (NoPlots, ValueError) as error:
            raise NotDone(one_line(error)) from None
    if args.trace_folder is not None:
        try:
            os.makedirs(args.trace_folder, exist_ok=True)
        except OSError as error:
            raise NotDone(f"{args.trace_folder} cannot be made: {error.strerror}") from None


class Bar:
    """Progress on stderr, if that is a terminal and tqdm is there."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        with suppress(ModuleNotFoundError):
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="run", disable=None)

    def begin(self, label: str) -> None:
        """Say which cell comes."""
        if self._bar is not None:
            self._bar.set_description(label)

    def advance(self) -> None:
        """One run more is there."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Leave it as it stands."""
        if self._bar is not None:
            self._bar.close()
