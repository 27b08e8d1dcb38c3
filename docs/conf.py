"""Settings of Sphinx for the site: `make docs` writes it to docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cpdhpc  # noqa: E402

project = "cpdhpc"
author = copyright = "the cpdhpc developers"
release = version = cpdhpc.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "docstrings",
    "pictures",
    "public_names",
]
exclude_patterns = ["_build", "examples.rst"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "model_config"}  # pydantic's
python_maximum_signature_line_length = 80
add_module_names = False

html_theme = "furo"
html_title = f"cpdhpc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
