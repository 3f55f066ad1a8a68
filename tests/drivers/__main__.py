"""Print the table of docs/frameworks.md: ``python -m tests.drivers``."""

from tests.drivers.verdicts import table

if __name__ == '__main__':
    print(table(), end='')
