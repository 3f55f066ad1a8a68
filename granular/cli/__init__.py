"""The command line: ``granular demo``, ``info``, ``ls``, ``cat``, ``copy``, ``copy-to-local``, ``convert``,
``verify``, ``index``, ``clean``, ``view``, ``cache`` and ``bench``.

Data goes to stdout, everything else to stderr; progress is drawn only on a terminal.
"""

import io
import os
import sys

from granular._support.lazy import import_extra
from granular.errors import GranularError, MissingExtraError


def main() -> None:
    """Run the command line."""
    try:
        for module in ('typer', 'rich'):
            import_extra(module, 'cli', "granular's command line needs its extra")
    except MissingExtraError as error:
        sys.stderr.write(f'{error}\n')
        raise SystemExit(2) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')  # of encodings without some characters, as stderr does
    try:
        from granular.cli import measuring, transfers  # noqa: F401 - which add to the commands
        from granular.cli.commands import app

        app()
    except (GranularError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # of a reader of the output that has closed it
            from granular.cli.describe import printable

            sys.stderr.write(f'error: {printable(str(error))}\n')
        if not isinstance(error, GranularError):
            # Drop output that may be buffered, and would raise another error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
