"""Run a function of a benchmark in its own process: ``python -m benchmarks.part MODULE FUNCTION JOB``, in JSON."""

import importlib
import sys

if __name__ == '__main__':
    module = importlib.import_module(f'benchmarks.{sys.argv[1]}')  # before anything else, as clients measures imports
    import json
    import os
    import pathlib

    print(json.dumps(getattr(module, sys.argv[2])(json.loads(pathlib.Path(sys.argv[3]).read_text()))), flush=True)
    os._exit(0)  # what a function leaves open need not end: the caller kills its processes
