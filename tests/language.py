"""Counts habits of language that the rules forbid, per 1,000 words of pages and of docstrings.

`make lint` runs it: `python tests/language.py`. It fails if a count is above its limit. The limits
are what was counted when they were set, rounded up; they may be lowered, never raised.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES, DOCSTRINGS = "pages", "docstrings"
CODE = r"```.*?```|^(?:    [^\n]*\n)+|`[^`\n]*`|\]\([^)]*\)"  # and targets of links


@dataclass(frozen=True)
class Habit:
    """A habit, and its limits per 1,000 words of pages and of docstrings.

    instead: what to write in its place
    """

    pattern: str
    instead: str
    pages: float
    docstrings: float


HABITS = {
    "where": Habit(r"\bwhere\b", '"if" for a condition', pages=0.3, docstrings=0.5),
    "alike": Habit(r"\balike\b", "the same, identical", pages=0.1, docstrings=0.1),
    "behind": Habit(r"\bbehind\b", "after", pages=0.1, docstrings=0.1),
    "told": Habit(r"\btold\b", "raised, printed, given", pages=0.1, docstrings=0.1),
    "of which, whom": Habit(
        r"\b[Oo]f (?:which|whom)\b", "a sentence of its own", pages=0.1, docstrings=0.3
    ),
    "opening what, who": Habit(
        r"(?:\A|(?<=[.!?:;] )|(?<=\n\n))(?:What|Who|Whose|Whatever|Whoever)\b(?![^.!?]*\?)",
        "name the thing",
        pages=0.1,
        docstrings=0.2,
    ),
}


def prose(page: str) -> str:
    """Return a page's sentences: no code, no links' targets, a space at line ends."""
    text = re.sub(
        r"```.*?```|^(?:    [^\n]*\n)+|`[^`\n]*`|\]\([^)]*\)", " ", page, flags=re.S | re.M
    )
    return re.sub(r"(?<!\n)\n(?![\n|#-])", " ", text)


def pages() -> Iterator[Path]:
    """Yield the pages that people write: README.md, CONTRIBUTING.md and those of docs."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        if not {"_build", "api"} & set(path.relative_to(ROOT).parts):
            yield path


def texts(kind: str) -> Iterator[tuple[Path, str]]:
    """Yield files and the texts of that kind in them."""
    if kind == PAGES:
        yield from ((path, prose(path.read_text())) for path in pages())
        return
    for path in (ROOT / "cpdhpc").rglob("*.py"):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = ast.walk(ast.parse(path.read_text()))
        found = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
        yield path, re.sub(r"(?<!\n)\n(?!\n)", " ", "\n\n".join(found))


def main() -> int:
    """Print a line for each habit and kind; return 1 if a count is above its limit."""
    over = 0
    for kind in (PAGES, DOCSTRINGS):
        found = [*texts(kind)]
        words = sum(len(text.split()) for _, text in found)
        for name, habit in HABITS.items():
            hits = [(path, len(re.findall(habit.pattern, text))) for path, text in found]
            rate, limit = 1000 * sum(n for _, n in hits) / words, getattr(habit, kind)
            print(f"{kind:10s} {name:18s} {rate:6.2f} per 1,000 words, at most {limit:.2f}")
            if rate > limit:
                over += 1
                worst = sorted(hits, key=lambda hit: -hit[1])[:5]
                shown = ", ".join(f"{path.relative_to(ROOT)} {n}" for path, n in worst)
                print(f"    too many: write {habit.instead}; most are in {shown}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
