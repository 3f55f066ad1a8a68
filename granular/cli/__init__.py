"""The command line: ``granular demo``, ``info``, ``ls``, ``cat``, ``copy``, ``copy-to-local``, ``convert``,
``verify``, ``clean`` and ``cache``.

Data goes to stdout, everything else to stderr; progress is drawn only on a terminal.
"""

import os
import sys

from granular.errors import GranularError


def main() -> None:
    """Run the command line."""
    try:
        from granular.cli import transfers  # noqa: F401 - which adds to the commands
        from granular.cli.commands import app
    except ImportError:
        sys.stderr.write("granular's command line needs its extra: pip install 'granular-stream[cli]'\n")
        raise SystemExit(2) from None
    try:
        app()
    except GranularError as error:
        from granular.cli.describe import printable

        sys.stderr.write(f'error: {printable(str(error))}\n')
        raise SystemExit(1) from None
    except BrokenPipeError:
        # The reader of the pipe has closed it: drop buffered output, which would raise another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
