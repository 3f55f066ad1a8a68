"""Handlers of signals, and finalizers, that do what they interrupt: Python calls them in the midst of any function."""

import pytest

# `operation(0)` is interrupted at each point where the interpreter looks for signals, by `operation(1)`.
PROGRAM = """
import faulthandler, os, sys, tempfile
import granular
from granular.aio.runtime.bridge import run
from granular.aio.runtime.loops import ensure_event_loop

root = granular.Path(tempfile.mkdtemp())

def statistics(number):
    granular.io_stats()

async def hop():
    await ensure_event_loop()

def loop(number):
    run(hop())

def file(number):
    path = root / f'{number}.txt'
    path.write_bytes(b'some text')
    with path.open() as opened:
        assert opened.read() == b'some text'
        path.unlink()

def index(number):
    assert reader.fetch([number, 30]) == [{'i': number}, {'i': 30}]

with granular.ShardedDatasetWriter(root / 'shards', {'i': 'int'}, shardlen=10) as writer:
    for i in range(40):
        writer.append({'i': i})
granular.build_index(root / 'shards')
config = granular.IOConfig(index_memory=8)  # so that pages are read and dropped
reader = granular.ShardedDatasetReader(granular.Path(root, config=config) / 'shards', granular.decoders)
index(0)

def interrupted(operation, point):
    seen = 0

    def count(frame, event, argument):
        nonlocal seen
        seen += event in ('call', 'c_return')
        if seen == point:
            sys.setprofile(None)
            operation(1)

    faulthandler.dump_traceback_later(20, exit=True)
    sys.setprofile(count)
    try:
        operation(0)
    finally:
        sys.setprofile(None)
        faulthandler.cancel_dump_traceback_later()
    return seen == point

def forked(operation, point):  # which starts a loop of its own
    if (child := os.fork()) == 0:
        os._exit(0 if interrupted(operation, point) else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 3), code
    return code == 0

operation = globals()[sys.argv[1]]
interrupt = forked if operation is loop else interrupted
point = 1
while interrupt(operation, point):
    point += 1
print('interrupted' if point > 20 else point)
"""


@pytest.mark.parametrize('operation', ['statistics', 'loop', 'file', 'index'])
def test_handler_of_a_signal_does_what_it_interrupts(operation, interpreter):
    done = interpreter.run(PROGRAM, operation)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'interrupted\n', '')
