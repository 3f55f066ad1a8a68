"""Fuzz one target, or all of them in turn, with atheris: ``python -m tests.robustness.fuzz TARGET --seconds N``.

Each begins with a few valid inputs, and its corpus is kept in a temporary folder, or in the one given. What fails is
written to ``crash-...`` in the working directory, and ends the run.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time

import atheris

SIMPLE = ('shards', 'sums', 'bytes', 'utf8', 'int', 'i64', 'u64')  # which get a tenth of the others' time


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.robustness.fuzz', description=__doc__)
    parser.add_argument('target', help='its name, or "all"')
    parser.add_argument('--seconds', type=int, default=60, help='how long; of all targets together for "all"')
    parser.add_argument('--corpus', help='a folder that keeps what was found to be interesting')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='corpus-') as kept:
        corpus = args.corpus or kept
        if args.target == 'all':
            sys.exit(everything(args.seconds, corpus))
        one(args.target, args.seconds, os.path.join(corpus, args.target))


def everything(seconds: int, corpus: str) -> int:
    """Each target in a process of its own, as libFuzzer ends the one that it runs in."""
    from tests.robustness.fuzz.targets import targets

    failed, total = [], 0
    shares = {name: 1 if name in SIMPLE else 10 for name in targets}
    for name, share in shares.items():
        span = max(1, seconds * share // sum(shares.values()))
        command = [sys.executable, '-m', 'tests.robustness.fuzz', name, '--seconds', str(span)]
        began = time.monotonic()
        done = subprocess.run([*command, '--corpus', corpus], capture_output=True, text=True, check=False)
        runs = [line.split() for line in done.stderr.splitlines() if line.startswith('Done ')]
        count = int(runs[-1][1]) if runs else 0
        total += count
        print(
            f'{name:10} {count:>12,} executions in {time.monotonic() - began:.0f} s, exit {done.returncode}', flush=True
        )
        if done.returncode:
            failed.append(name)
            print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    print(f'{total:,} executions, {len(failed)} targets failed: {failed}')
    return 1 if failed else 0


def one(name: str, seconds: int, corpus: str) -> None:
    logging.disable(logging.CRITICAL)  # of an index that is not used, a million times
    with atheris.instrument_imports(include=['granular', 'PIL']):
        from tests.robustness.fuzz.targets import seeds, targets
    target = targets[name]
    os.makedirs(corpus, exist_ok=True)
    for i, seed in enumerate(seeds().get(name, [])):
        with open(os.path.join(corpus, f'seed-{i}'), 'wb') as file:
            file.write(seed)
    longest = max(4096, 2 * max(map(len, seeds().get(name, [b'']))))
    limits = [f'-max_total_time={seconds}', f'-max_len={longest}', '-timeout=20', '-rss_limit_mb=2048']
    atheris.Setup([sys.argv[0], *limits, corpus], target)
    atheris.Fuzz()


if __name__ == '__main__':
    main()
