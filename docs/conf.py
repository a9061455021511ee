"""Sphinx: ``sphinx-build -W -n -c docs . build/docs`` in the root of the checkout.

The root of the sources is that of the checkout, so that links in README.md and in the guides are the same here and on a
code host.
"""

from __future__ import annotations

from typing import Any

project = "ls_strategy"
author = "the authors of ls_strategy"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**",
    "recipes/README.md",
    "recipes/*/README.md",
]
html_title = project
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4

# Docstrings: Google style; single backticks are names, which the reference may have or not.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["ls_strategy.extras.ray.train"]  # so that the extra ``docs`` builds the site without Ray
autoclass_content = "both"  # what a class is, and what its constructor takes
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# Every name of this package that the reference mentions is in the reference; names of others are text.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!ls_strategy\b).*"),
    (r"py:class", r"ls_strategy\.lightning\.checkpointing\.loading\.Module"),  # a type variable
    (r"py:class", r"ls_strategy\.extras\.inference\.sampling\.Uniforms"),  # an alias
    (r"py:class", r"ls_strategy\.registry\.EntryOf"),  # names of other packages, in the hints of options
    (r"py:class", r"ls_strategy\.layout\.TensorPart"),  # what `init_inference` passes on
]

_as_written: dict[str, list[str]] = {}


def _keep(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    _as_written[name] = list(lines)


def _put_back(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what in ("attribute", "property", "data"):
        lines[:] = _as_written[name]


def setup(app: Any) -> None:
    """The docstring of a field is text; napoleon, between these two, takes what is before a colon for its type."""
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _put_back, priority=600)
