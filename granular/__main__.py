"""``python -m granular`` is ``granular``."""

from granular.cli import main

if __name__ == '__main__':
    main()
