"""Diagrams of the pages as pictures: docs/diagrams has an SVG for each mermaid block.

An SVG is named by a digest of its block, so a block that changes needs a new one:
`python docs/pictures.py` draws what is missing and removes what is not used. It needs the command
`mmdc` of @mermaid-js/mermaid-cli and a browser. Sphinx needs neither.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
FOLDER = DOCS / "diagrams"
SETTINGS = {
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "useMaxWidth": False, "rankSpacing": 35, "nodeSpacing": 30},
    "sequence": {"useMaxWidth": False},
}
BROWSER = {"args": ["--no-sandbox"]}


def picture_of(block: str) -> str:
    """Return the file name of the picture of a mermaid block."""
    return hashlib.sha256(block.strip().encode()).hexdigest()[:16] + ".svg"


def blocks() -> dict[str, str]:
    """Return every mermaid block of the pages, by the file name of its picture."""
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    found = [re.findall(r"```mermaid\n(.*?)```", page.read_text(), re.DOTALL) for page in pages]
    return {picture_of(block): block for of_page in found for block in of_page}


def draw(block: str, path: Path) -> None:
    """Draw a block by mmdc. Raises CalledProcessError if mmdc refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "settings.json").write_text(json.dumps(SETTINGS))
        (here / "browser.json").write_text(json.dumps(BROWSER))
        (here / "block.mmd").write_text(block)
        words = ["--configFile", "settings.json", "--puppeteerConfigFile", "browser.json"]
        words += ["--input", "block.mmd", "--output", "block.svg", "--quiet"]
        subprocess.run(["mmdc", *words], cwd=here, check=True)
        path.write_text((here / "block.svg").read_text())


def setup(app: Sphinx) -> dict[str, bool]:
    """Replace mermaid blocks by their pictures while Sphinx reads pages."""
    from docutils import nodes
    from sphinx.transforms import SphinxTransform
    from sphinx.util import logging

    logger = logging.getLogger(__name__)

    class Pictures(SphinxTransform):
        """An image for each mermaid block; a block without its picture is a warning."""

        default_priority = 210

        def apply(self, **options: object) -> None:
            for block in [*self.document.findall(nodes.literal_block)]:
                if block.get("language") != "mermaid":
                    continue
                name = picture_of(block.astext())
                if not (FOLDER / name).exists():
                    logger.warning(
                        "no picture of a mermaid block: run docs/pictures.py", location=block
                    )
                    continue
                labels = re.findall(r'"([^"]+)"|Note over [^:]+: (.+)', block.astext())
                said = "; ".join(a or b for a, b in labels)
                image = nodes.image(uri=f"/diagrams/{name}", alt=f"Diagram: {said}")
                block.replace_self(nodes.container("", image, classes=["diagram"]))

    app.add_transform(Pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    wanted = blocks()
    FOLDER.mkdir(exist_ok=True)
    for unused in {path.name for path in FOLDER.glob("*.svg")} - wanted.keys():
        (FOLDER / unused).unlink()
    for name, text in wanted.items():
        if not (FOLDER / name).exists():
            print(FOLDER / name, file=sys.stderr)
            draw(text, FOLDER / name)
