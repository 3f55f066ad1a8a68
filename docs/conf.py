"""Settings of Sphinx for the documentation site, built by `make docs`. The extension is `_site/granular_site.py`."""

import pathlib
import sys

DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS / '_site'), str(DOCS.parent)]

import granular  # noqa: E402

project = html_title = 'granular'
author = 'The granular authors'
version = release = granular.__version__

extensions = [
    'myst_parser',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx_copybutton',
    'granular_site',
]
exclude_patterns = ['_site']
# Every reference in a docstring must lead somewhere; the types in signatures need not (granular_site.py).
nitpicky = True

myst_heading_anchors = 4
myst_links_external_new_tab = False

# Frameworks are not needed to describe our integrations with them, and the result does not depend on what is installed.
autodoc_mock_imports = ['grain', 'jax', 'opentelemetry', 'orbax', 'prometheus_client', 'pyarrow', 'ray', 'torch']
autodoc_default_options = {'members': True, 'inherited-members': 'BaseException,ImportError,OSError,dict,object,tuple'}
autodoc_member_order = 'bysource'
autodoc_class_signature = 'mixed'
autodoc_preserve_defaults = True
autodoc_typehints_format = 'short'
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
add_module_names = True
toc_object_entries_show_parents = 'hide'
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = 'furo'
html_static_path = ['_site/static']
html_css_files = ['site.css']
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    'light_css_variables': {'color-brand-primary': '#0b6e6e', 'color-brand-content': '#0b6e6e'},
    'dark_css_variables': {'color-brand-primary': '#5fd0c5', 'color-brand-content': '#5fd0c5'},
    'navigation_with_keys': True,
}
copybutton_exclude = '.linenos, .gp, .go'
copybutton_only_copy_prompt_lines = True

linkcheck_timeout = 20
linkcheck_workers = 4
