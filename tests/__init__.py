"""The tests, in folders that mirror the layers of the package."""

import pathlib

ROOT = pathlib.Path(__file__).parent.parent
"""The folder of the repository."""
