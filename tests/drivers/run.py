"""Run one program: ``python -m tests.drivers.run NAME FOLDER SECONDS``, after which it ends with its stacks."""

import faulthandler
import importlib
import multiprocessing
import sys
import warnings

if __name__ == '__main__':
    name, folder, seconds = sys.argv[1:]
    faulthandler.enable()
    # Does not return: the process may hang where no exception reaches it.
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    warnings.simplefilter('ignore')
    program = importlib.import_module(f'tests.drivers.programs.{name}')
    # Workers are forked from a process without threads: in one that has some, CPython 3.11 may hang in the worker. They
    # find what they need imported.
    multiprocessing.set_start_method('forkserver')
    multiprocessing.set_forkserver_preload(['tests.drivers.kinds', *getattr(program, 'OF_WORKERS', ())])
    program.main(folder)
    faulthandler.cancel_dump_traceback_later()
