// A filter on a small field. The server searches in steps, and says after each how far it came.

import { get } from './api.js';
import { h } from './dom.js';
import { go, state } from './state.js';

const RELATIONS = {
  number: ['=', '!=', '<', '<=', '>', '>='],
  text: ['has', '=', '!='],
  json: ['has'],
};
RELATIONS.value = [...RELATIONS.number, 'has'];
const SIGNS = { '!=': '≠', '<=': '≤', '>=': '≥' };

export class Search {
  constructor(dataset, { key, is, text }, changed) {
    Object.assign(this, { dataset, query: { path: dataset.path, key, relation: is, text }, changed });
    this.matches = [];
    this.next = this.skipped = 0;
    this.error = '';
    this.asking = null;
    this.ended = new AbortController();
    this.more();
  }

  get done() {
    return this.next >= this.dataset.length;
  }

  /** Search on, if that is not being done already. */
  async more() {
    if (this.asking || this.done || this.error) return;
    this.asking = true;
    try {
      const found = await get('search', { ...this.query, from: this.next }, this.ended.signal);
      this.matches.push(...found.matches);
      this.next = found.next;
      this.skipped += found.skipped;
    } catch (error) {
      if (error.name === 'AbortError') return;
      this.error = error.message;
    } finally {
      this.asking = false;
    }
    this.changed();
  }

  /** Search to the end, and save the indices of the matches as a list that `MapDataset.subset` takes. */
  async save() {
    while (!this.done && !this.error && !this.ended.signal.aborted) {
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

/** The fields of a filter: key, relation, text. */
export function filterTools(keys) {
  const fit = keys.filter((row) => !row.many && row.family in RELATIONS);
  if (!fit.length) return null;
  const now = state();
  const relationsOf = (key) => {
    const row = fit.find((one) => one.key === key);
    return RELATIONS[row.family];
  };
  const chosen = fit.some((row) => row.key === now.key) ? now.key : fit[0].key;
  const options = (key) => relationsOf(key).map((is) => h('option', { value: is, selected: is === now.is }, SIGNS[is] ?? is));
  const relation = h('select', { name: 'is', 'aria-label': 'Relation' }, options(chosen));
  const key = h('select', {
    name: 'key', 'aria-label': 'Key of the filter', onchange: () => relation.replaceChildren(...options(key.value)),
  }, fit.map((row) => h('option', { value: row.key, selected: row.key === chosen }, row.key)));
  const text = h('input', { name: 'text', placeholder: 'Filter', 'aria-label': 'Filter (/)', autocomplete: 'off', spellcheck: 'false' });
  text.value = now.text;
  return h('form', {
    class: 'filter', role: 'search',
    onsubmit: (event) => {
      event.preventDefault();
      text.blur();
      if (text.value) go({ key: key.value, is: relation.value, text: text.value, at: 0, open: false });
      else clear();
    },
  },
  h('div', { class: 'group' }, key, relation, text,
    now.key ? h('button', { type: 'button', 'aria-label': 'Remove the filter', title: 'Remove the filter', onclick: clear }, '×') : null));
}

const clear = () => go({ key: '', is: '', text: '' });
