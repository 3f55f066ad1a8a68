"""Entry point of ``python -m granular``, the same program as ``granular``."""

from granular.cli import main

if __name__ == '__main__':
    main()
