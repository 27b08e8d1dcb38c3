"""What is shown while a study runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .case import Case
from .folder import Folder


class Display:
    """The progress of so many cases."""

    def __init__(self, cases: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=cases)

    def __enter__(self) -> Self:
        """Show the bar until the end of the block."""
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self.bar.stop()

    def start(self, text: str, finished: int) -> None:
        """Begin a batch, some of whose cases are finished already."""
        self.bar.update(self.task, description=text)
        self.bar.advance(self.task, finished)
        if self.bar.disable:
            known = f", {finished} case(s) finished already" if finished else ""
            self.line(f"{text}{known}")

    def look(self, folder: Folder, todo: Sequence[Case]) -> list[Case]:
        """Return those of the cases that are not finished yet."""
        left = [case for case in todo if not folder.finished(case)]
        self.bar.advance(self.task, len(todo) - len(left))
        return left

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)
