"""Covers of tables hold what they promise."""

import itertools

import pytest

from tests.support import tables

GROUPS = [['stat', 'list', 'read'], ['write']]
FAMILIES = [['reset', 'hang'], ['html', 'empty', 'cut', 'error'], ['lost']]
ROWS = [row for row in itertools.product('ab', range(4), [(), {}, None]) if row[:2] != ('a', 3)]


@pytest.fixture(autouse=True)
def covers_only(monkeypatch):
    monkeypatch.setattr(tables, 'FULL_TABLES', False)


def test_cover_pairs_operations_with_families_and_faults_with_groups():
    pairs = tables.cover(GROUPS, FAMILIES)
    for operation, family in itertools.product(itertools.chain(*GROUPS), FAMILIES):
        assert {(operation, fault) for fault in family} & set(pairs)
    for fault, group in itertools.product(itertools.chain(*FAMILIES), GROUPS):
        assert {(operation, fault) for operation in group} & set(pairs)
    assert len(pairs) == len(set(pairs)) < 4 * 7


def test_pairwise_holds_every_pair_of_values():
    chosen = tables.pairwise(ROWS)
    for left, right in itertools.combinations(range(3), 2):
        assert {repr((row[left], row[right])) for row in chosen} == {repr((row[left], row[right])) for row in ROWS}
    assert len(chosen) < len(ROWS)
    assert chosen == tables.pairwise(ROWS)


def test_each_value_holds_every_value():
    chosen = tables.each_value(ROWS)
    for column in range(3):
        assert {repr(row[column]) for row in chosen} == {repr(row[column]) for row in ROWS}
    assert len(chosen) == 4


def test_full_tables_hold_every_row(monkeypatch):
    monkeypatch.setattr(tables, 'FULL_TABLES', True)
    assert tables.pairwise(ROWS) == tables.each_value(ROWS) == ROWS
    assert len(tables.cover(GROUPS, FAMILIES)) == 4 * 7
