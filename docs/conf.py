"""Sphinx's settings. `make docs` builds into build/docs; `tools/pages.py` says how a page is written."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # for the package benchmarks; coda_jax is the one that is installed
# For the cells, which run in processes of their own: on a CPU of eight devices, without lines on stderr.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "CODA_JAX_QUIET": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
os.environ.pop("XLA_FLAGS", None)
os.environ.pop("CODA_JAX_STRICT", None)

from tools import docstrings, made, pages

import coda_jax

project = "coda_jax"
author = "the coda_jax authors"
copyright = author
version = release = coda_jax.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_nb"]
exclude_patterns = ["tools", "device", "**.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb"}
suppress_warnings = ["myst.header"]  # lab notes leave out a level of headings

html_theme = "sphinx_book_theme"
html_title = f"coda_jax {release}"
html_static_path = ["static"]
html_css_files = ["coda.css"]
NO_HEADER = {f"navbar_{part}": [] for part in ("start", "center", "end", "persistent")}  # the sidebar has it all
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True, "use_download_button": False, **NO_HEADER}
html_copy_source = False
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = True

nb_execution_mode = "force"  # a page is right for this library, not for the one of the last build
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "warn"
nb_merge_streams = True

autodoc_typehints = "none"  # the Args sections have shapes and dtypes, which types do not
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # else "x, y: what both are" is y, of a type x
napoleon_custom_sections = [("Attributes", "params_style")]  # the same; else each name is looked up in all classes
toc_object_entries_show_parents = "hide"


def rewritten(app: Any, docname: str, source: list[str]) -> None:
    source[0] = pages.to_notebook(source[0], docname, made.MADE)


def counted(app: Any, exception: Exception | None) -> None:
    """Ends with how many blocks were executed."""
    if exception is None:
        found = app.env.found_docs
        counts = [len(pages.blocks_of(Path(app.env.doc2path(name)).read_text())) for name in found]
        print(f"{sum(counts)} blocks executed on {sum(map(bool, counts))} of {len(counts)} pages")


def setup(app: Any) -> None:
    app.connect("source-read", rewritten)
    app.connect("build-finished", counted)
    app.connect("autodoc-process-docstring", docstrings.process, priority=100)
