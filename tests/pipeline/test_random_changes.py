"""Random pipelines, changed at random after a state: declared changes continue exactly or are refused, others never."""

import collections
import dataclasses
import itertools
import json
import random

import numpy as np
import pytest

from granular import MapDataset, changes
from granular.errors import StateError
from tests.support.declared import declared_in
from tests.support.tables import plans

CASES = plans(36)
OPERATIONS = ('map', 'filter', 'flat_map', 'window', 'concatenated rows', 'fitted rows')


class Corpus:
    def __init__(self, address, length):
        self._address, self._length = address, length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return element_at(index)

    def __repr__(self):
        return f'Corpus({self._address})'


def element_at(index):
    return {'id': index, 'tokens': 100 * index + np.arange(index % 7 + 1) + 1}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pipeline: the arguments of its stages, None for those that it does not have."""

    address: str = 'here'
    length: int = 20
    excluded: tuple[int, ...] | None = None
    order: int | None = None
    renamed: bool = False
    seed: int | None = None
    size: int | None = None
    drop: bool = False
    epochs: int = 3
    operation: str | None = None
    row: int = 8
    last: int | None = None

    def stream(self):
        dataset = MapDataset.source(Corpus(self.address, self.length))
        if self.excluded is not None:
            dataset = dataset.exclude(self.excluded)
        if self.order is not None:
            dataset = dataset.shuffle(self.order)
        dataset = dataset.map(again if self.renamed else unchanged)
        if self.seed is not None:
            dataset = dataset.random_map(draw, seed=self.seed)
        if self.size is not None:
            dataset = dataset.batch(self.size, drop_remainder=self.drop, batch_fn=list)
        stream = dataset.repeat(self.epochs).to_iter_dataset()
        if self.operation == 'map':
            stream = stream.map(unchanged)
        elif self.operation == 'filter':
            stream = stream.filter(is_kept)
        elif self.operation == 'flat_map':
            stream = stream.flat_map(parts)
        elif self.operation == 'window':
            stream = stream.window_shuffle(4, seed=1)
        elif self.operation == 'concatenated rows':
            stream = stream.pack({'tokens': self.row}, strategy='concat_then_split')
        elif self.operation == 'fitted rows':
            stream = stream.pack({'tokens': self.row}, num_packing_bins=2)
        return stream if self.last is None else stream.batch(self.last, batch_fn=list)

    def epoch_length(self):
        return self.length // self.size * self.size if self.size is not None and self.drop else self.length

    def atoms_from(self, place):
        """Return the atoms of the elements from a place on, each with the place after its element."""
        atoms, dataset = [], MapDataset.source(range(self.length))
        if self.order is not None:
            dataset = dataset.shuffle(self.order)
        for at in range(place, self.epochs * self.epoch_length()):
            epoch, within = divmod(at, self.epoch_length())
            index = dataset[epoch * self.length + within]
            if index in (self.excluded or ()) or (self.operation == 'filter' and not is_kept({'id': index})):
                continue
            element = element_at(index)
            if 'rows' in (self.operation or ''):
                atoms += [(token, at + 1) for token in element['tokens'].tolist()]
                continue
            if self.seed is not None:
                position = epoch * self.length + within
                element = MapDataset.range(position + 1).random_map(draw_of(element), seed=self.seed)[position]
            found = parts(element) if self.operation == 'flat_map' else [element]
            atoms += [(atom_of(part), at + 1) for part in found]
        return atoms


def unchanged(element):
    return element


def again(element):
    return element


def is_kept(element):
    return element['id'] % 3 > 0


def parts(element):
    return [{**element, 'part': i} for i in range(2)]


def draw(element, rng):
    return {**element, 'drawn': int(rng.integers(1 << 30))}


def draw_of(element):
    return lambda _, rng: draw(element, rng)


def atom_of(element):
    return (element['id'], element.get('drawn'), element.get('part'))


def atoms_of(output):
    """Return what an element, a batch or a row consists of."""
    if isinstance(output, list):
        return [atom for part in output for atom in atoms_of(part)]
    if 'tokens_segment_ids' in output:
        return output['tokens'][output['tokens_segment_ids'] > 0].tolist()
    return [atom_of(output)]


def random_plan(chance):
    plan = Plan(
        length=chance.randint(8, 24),
        order=chance.choice([None, 1, 2]),
        seed=chance.choice([None, 3]),
        operation=chance.choice([None, *OPERATIONS]),
        row=chance.choice([7, 12, 30]),
        last=chance.choice([None, 1, 3]),
        epochs=chance.choice([1, 3]),
    )
    if plan.operation is None and chance.random() < 0.5:
        return dataclasses.replace(plan, size=chance.randint(1, 5), drop=chance.random() < 0.5)
    return dataclasses.replace(plan, excluded=chance.choice([None, (1, 5)]))


def declarable(plan, chance):
    """Return changes of a plan that have a declaration, each with the fields that it changes."""
    options = [{'address': 'there'}, {'renamed': True}, {'length': plan.length + chance.randint(1, 5)}]
    if plan.seed is not None:
        options.append({'seed': 4})
    if plan.size is not None:
        options.append({'size': chance.choice([size for size in range(1, 6) if size != plan.size])})
    else:
        options.append({'excluded': (2, 6, 7) if plan.excluded is None else chance.choice([None, (2, 6, 7)])})
    if 'rows' in (plan.operation or ''):
        options.append({'row': chance.choice([row for row in (9, 20, 40) if row != plan.row])})
    return options


def undeclarable(plan, chance):
    options = [{'order': 7}, {'length': plan.length - 1}, {'epochs': plan.epochs + 1}]
    options.append({'operation': chance.choice([name for name in OPERATIONS if name != plan.operation])})
    options.append({'seed': 5 if plan.seed is None else None})
    if plan.size is not None:
        options.append({'drop': not plan.drop})
        return [option for option in options if 'operation' not in option]
    return options


def changed(plan, chance, options):
    fields = {}
    for option in chance.sample(options, chance.choice([1, 1, 2])):
        fields.update(option)
    return dataclasses.replace(plan, **fields)


def saved(plan, chance):
    outputs = list(plan.stream())
    count = chance.randint(0, len(outputs))
    with iter(plan.stream()) as iterator:
        taken = list(itertools.islice(iterator, count))
        return atoms_of(taken), json.loads(json.dumps(iterator.state_dict()))


@pytest.mark.parametrize('case', range(CASES))
def test_declared_changes_continue_exactly_or_are_refused(case):
    chance = random.Random(case)
    plan = random_plan(chance)
    other = changed(plan, chance, declarable(plan, chance))
    taken, state = saved(plan, chance)
    with iter(other.stream()) as iterator:
        with pytest.raises(StateError, match='if this is meant, pass changes=') as caught:
            iterator.load_state_dict(state)
        declared = declared_in(caught.value)
        for i in range(len(declared)):
            with pytest.raises(StateError, match='if this is meant, pass changes='):
                iterator.load_state_dict(state, [*declared[:i], *declared[i + 1 :]])
        try:
            iterator.load_state_dict(state, declared)
            rest = atoms_of(list(iterator))
        except StateError as error:
            assert any(str(change) in str(error) for change in declared) or str(error).startswith('pack('), error
            return
    assert_continued(plan, other, taken, rest)


def assert_continued(plan, other, taken, rest):
    """Check that a run of one plan, and then of the other, has each atom once."""
    before = plan.atoms_from(0)
    first = [atom for atom, _ in before[: len(taken)]]
    if plan.operation not in ('window', 'fitted rows'):
        assert taken == first
    elif collections.Counter(taken) != collections.Counter(first):  # the stage holds elements
        names = collections.Counter(name_of(atom) for atom, _ in before)
        assert names == collections.Counter(name_of(atom) for atom in [*taken, *rest])
        return
    place = before[len(taken) - 1][1] if taken else 0
    following = [atom for atom, _ in other.atoms_from(place_in(plan, other, place))]
    begun = [atom for atom, after in before[len(taken) :] if after == place]
    assert collections.Counter(rest) == collections.Counter([*begun, *following])
    if plan.operation not in ('window', 'fitted rows'):
        assert rest == [*begun, *following]


def place_in(plan, other, place):
    """Return a place in a plan that was changed."""
    epoch, within = divmod(place, plan.epoch_length())
    if other.length == plan.length or not within:
        return epoch * other.epoch_length() + within
    end = (epoch + 1) * plan.epoch_length()  # it is refused before the last element of an epoch
    assert not [atom for atom, after in plan.atoms_from(place) if after <= end]
    return (epoch + 1) * other.epoch_length()


def name_of(atom):
    return (atom[0], atom[2]) if isinstance(atom, tuple) else atom


@pytest.mark.parametrize('case', range(CASES))
def test_what_is_not_declared_is_refused(case):
    chance = random.Random(1000 + case)
    plan = random_plan(chance)
    other = changed(plan, chance, undeclarable(plan, chance))
    _, state = saved(plan, chance)
    everything = [changes.RowLength({'tokens': 8}), changes.Excluded(), changes.Renamed('map(again)')]
    with iter(other.stream()) as iterator, pytest.raises(StateError) as caught:
        iterator.load_state_dict(state, everything)
    assert 'continue with the pipeline that saved it' in str(caught.value)
