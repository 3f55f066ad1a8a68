// Conditions on the fields of datapoints, and a sort. The server looks at them in steps, and says after each how far it
// came: after a round, the user decides whether it looks further.

import { get } from './api.js';
import { h } from './dom.js';
import { go, state } from './state.js';

const ROUND = 100000; // datapoints of a round
const READ = 256e6; // bytes of a round

const NUMBERS = ['=', '!=', '<', '<=', '>', '>='];
const SIZES = ['bytes=', 'bytes>=', 'bytes<', 'bytes<='];
const RELATIONS = {
  number: NUMBERS,
  text: ['has', '=', '!=', ...SIZES],
  json: ['has', ...SIZES],
  value: [...NUMBERS, 'has', ...SIZES],
  many: ['length=', 'length>=', 'length<', 'length<='],
};
const SIGNS = { '!=': '≠', '<=': '≤', '>=': '≥' };

const relationsOf = (row) => [...(RELATIONS[row.many ? 'many' : row.family] ?? SIZES), 'damaged'];

/** A relation as it is shown: "bytes ≥" for "bytes>=". */
const sign = (is) => is.replace(/^(bytes|length)?(.*)$/, (_, measure, rest) => [measure, SIGNS[rest] ?? rest].filter(Boolean).join(' '));

const ANY_DAMAGED = { key: '', is: 'damaged', text: '' };

export const same = (one, other) => one.key === other.key && one.is === other.is && one.text === other.text;

/** By what a key is sorted: "length of words", "bytes of image", "score". */
export const sortedBy = (row) => (row.many ? `length of ${row.key}`
  : ['number', 'text', 'value'].includes(row.family) ? row.key : `bytes of ${row.key}`);

export class Search {
  constructor(dataset, { where, sort, down }, changed) {
    const fields = { key: where.map((one) => one.key), relation: where.map((one) => one.is), text: where.map((one) => one.text) };
    Object.assign(this, { dataset, where, sort, down, changed, query: { path: dataset.path, ...fields, ...(sort && { sort }) } });
    this.matches = [];
    this.found = []; // with what they are sorted by, until a round is over
    this.next = this.skipped = this.read = 0;
    this.rounds = 1;
    this.error = '';
    this.asking = false;
    this.ended = new AbortController();
    this.more();
  }

  get done() {
    return this.next >= this.dataset.length;
  }

  /** A round is over, and not all was looked at. */
  get paused() {
    return !this.done && (this.next >= this.rounds * ROUND || this.read >= this.rounds * READ);
  }

  get working() {
    return !this.done && !this.paused && !this.error;
  }

  /** Look on, if that is not being done already. */
  async more() {
    if (this.asking || !this.working) return;
    this.asking = true;
    try {
      const to = Math.min(this.rounds * ROUND, this.dataset.length);
      const step = await get('search', { ...this.query, from: this.next, to }, this.ended.signal);
      if (this.sort) for (const [i, match] of step.matches.entries()) this.found.push([step.order[i], match]);
      else this.matches.push(...step.matches);
      this.next = step.next;
      this.skipped += step.skipped;
      this.read += step.read;
      if (this.sort && !this.working) this.arrange();
    } catch (error) {
      if (error.name === 'AbortError') return;
      this.error = error.message;
      this.wrong = error.wrong;
    } finally {
      this.asking = false;
    }
    this.changed();
  }

  /** Sort what was found; what has no value comes last. */
  arrange() {
    const turn = this.down ? -1 : 1;
    this.found.sort(([a, i], [b, j]) => (a === b ? i - j : a === null ? 1 : b === null ? -1 : a < b ? -turn : turn));
    this.matches = this.found.map(([, match]) => match);
  }

  /** Look at ten times as much, or go on after an error. */
  further() {
    if (!this.error) this.rounds *= 10;
    this.error = '';
    this.more();
  }

  /** Look at all, and save the indices of the matches as a list that `MapDataset.subset` takes. */
  async save() {
    this.rounds = Infinity;
    while (this.working && !this.ended.signal.aborted) {
      await this.more();
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    if (!this.done) return;
    const file = new Blob([JSON.stringify(this.matches)], { type: 'application/json' });
    const link = h('a', { href: URL.createObjectURL(file), download: 'indices.json' });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  end() {
    this.ended.abort();
  }
}

/** Add conditions to those that hold. */
export function narrow(added) {
  const kept = state().where.filter((one) => !added.some((other) => same(one, other)));
  go({ where: [...kept, ...added], tab: 'data', at: null, open: false });
}

/** Show the datapoints that meet conditions, and no others. */
export const only = (where) => go({ where, tab: 'data', at: null, open: false });

const widen = (removed) => go({ where: state().where.filter((one) => !same(one, removed)) });

let draft = null; // the condition that was entered last, or is changed

/** The conditions that hold, and the sort: each can be removed. */
export function chips(dataset) {
  const { where, sort, down } = state();
  const remove = (name, onclick) => h('button', { type: 'button', 'aria-label': `Remove ${name}`, title: `Remove ${name}`, onclick }, '×');
  const row = dataset.keys.find((one) => one.key === sort);
  return [
    ...where.map((condition) => {
      const { key, is, text } = condition;
      const name = dataset.keys.find((one) => one.key === key)?.classes?.[text];
      const label = [key || 'any key', sign(is), text, is === '=' && name].filter(Boolean).join(' ');
      return h('div', { class: 'group condition' },
        h('button', { type: 'button', title: 'Change the condition', onclick: () => { draft = condition; widen(condition); document.querySelector('.filter input')?.focus(); } }, label),
        remove(label, () => widen(condition)));
    }),
    row ? h('div', { class: 'group condition' },
      h('button', { type: 'button', title: 'Turn the order round', onclick: () => go({ down: !down }) }, `${down ? '↓' : '↑'} ${sortedBy(row)}`),
      remove('the sort', () => go({ sort: '', down: false }))) : null,
  ];
}

/** The fields of a further condition: key, relation, text. */
export function filterTools(dataset, keys) {
  const fit = [...keys].sort((a, b) => (a.many || !(a.family in RELATIONS)) - (b.many || !(b.family in RELATIONS)));
  const rowOf = (key) => fit.find((row) => row.key === key) ?? fit[0];
  const options = (key) => relationsOf(rowOf(key)).map((is) => h('option', { value: is, selected: is === draft?.is }, sign(is)));
  const names = h('datalist', { id: 'classes' });
  const text = h('input', { name: 'text', placeholder: 'Filter', 'aria-label': 'Filter (/)', autocomplete: 'off', spellcheck: 'false', list: 'classes' });
  const relation = h('select', { name: 'is', 'aria-label': 'Relation', onchange: () => fitText() }, options(draft?.key));
  const key = h('select', {
    name: 'key', 'aria-label': 'Key of the filter', onchange: () => { relation.replaceChildren(...options(key.value)); fitText(); },
  }, fit.map((row) => h('option', { value: row.key, selected: row.key === draft?.key }, row.key)));
  function fitText() {
    text.disabled = relation.value === 'damaged';
    names.replaceChildren(...(rowOf(key.value).classes ?? []).map((name) => h('option', { value: name })));
  }
  fitText();
  text.value = draft?.text ?? '';
  const damaged = state().where.some((one) => same(one, ANY_DAMAGED));
  return [
    h('form', {
      class: 'filter', role: 'search',
      onsubmit: (event) => {
        event.preventDefault();
        text.blur();
        const added = { key: key.value, is: relation.value, text: text.disabled ? '' : text.value };
        if (!added.text && !text.disabled) return;
        draft = { ...added, text: '' };
        narrow([added]);
      },
    }, h('div', { class: 'group' }, key, relation, text, h('button', { type: 'submit', title: 'Add the condition (Enter)' }, 'Add')), names),
    h('button', {
      type: 'button', 'aria-pressed': `${damaged}`, title: 'Datapoints with a value that cannot be decoded: all values are read',
      onclick: () => (damaged ? widen(ANY_DAMAGED) : narrow([ANY_DAMAGED])),
    }, 'Damaged'),
  ];
}
