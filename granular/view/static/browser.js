// The datapoints of a dataset: tiles or a table, in pages, all of them or those that pass a filter.

import { tableRow, tile } from './cells.js';
import { announce, h } from './dom.js';
import { filterTools, Search } from './filter.js';
import { count } from './format.js';
import { List } from './list.js';
import { go, state } from './state.js';
import { Store } from './store.js';

const PAGE = 10000; // datapoints of a page: a browser cannot scroll through ten million
const PICTURED = new Set(['image', 'video', 'array', 'bytes']);
// Pixels at least, and the share of what is left.
const WIDTHS = { number: [110, 0], references: [110, 0], text: [220, 3], json: [200, 2], tree: [200, 2], array: [240, 2],
  image: [210, 1], video: [210, 1] };
const INDEX = 96;

export class Browser {
  constructor(dataset) {
    this.dataset = dataset;
    // Pictures come first, else the order is that of the spec.
    const rank = (row) => (row.many ? 2 : row.family === 'image' ? 0 : row.family === 'video' ? 1 : 2);
    this.keys = dataset.keys.filter((row) => row.type !== 'references').sort((a, b) => rank(a) - rank(b));
    this.names = this.keys.map((row) => row.key);
    this.small = this.keys.filter((row) => !row.many && ['number', 'text'].includes(row.family)).map((row) => row.key);
    this.search = null;
    this.shown = '';
  }

  get total() {
    return this.search ? this.search.matches.length : this.dataset.length;
  }

  look() {
    if (state().look) return state().look;
    return this.keys.some((row) => ['image', 'video'].includes(row.family)) ? 'tiles' : 'table';
  }

  cover() {
    if (this.names.includes(state().cover)) return state().cover;
    for (const family of ['image', 'video', 'array', 'bytes', 'value', 'text', 'json', 'tree']) {
      const row = this.keys.find((one) => one.family === family);
      if (row) return row.key;
    }
    return this.names[0];
  }

  // --- showing

  show(main, bar) {
    const now = state();
    const filter = [now.key, now.is, now.text].join('\n');
    if (filter !== this.filter) {
      this.filter = filter;
      this.search?.end();
      this.search = now.key ? new Search(this.dataset, now, () => this.grown()) : null;
      this.shown = '';
    }
    const position = this.positionOf(now.at);
    const page = Math.max(0, Math.floor(position / PAGE));
    const what = [filter, this.look(), this.cover(), page].join('\n');
    if (what === this.shown && main.querySelector('.scroller')) {
      main.querySelector('.bar').replaceWith(bar);
    } else {
      this.shown = what;
      this.page = page;
      this.build(main, bar);
    }
    const at = Math.min(position - page * PAGE, this.list.length - 1);
    if (at !== this.list.selected) this.list.select(at);
  }

  positionOf(index) {
    if (!this.search) return Math.min(index, Math.max(0, this.dataset.length - 1));
    const position = this.search.matches.findIndex((match) => match >= index);
    return position < 0 ? Math.max(0, this.total - 1) : position;
  }

  build(main, bar) {
    this.list?.end();
    this.store?.end();
    const start = this.page * PAGE;
    const tiles = this.look() === 'tiles';
    const length = Math.min(PAGE, this.total - start);
    this.store = new Store(this.dataset, (position) => this.index(position), length,
      (first, last) => this.list.refresh(first, last));
    const widths = this.keys.map((row) => (row.many ? [200, 2] : WIDTHS[row.family] ?? [150, 1]));
    const columns = `${INDEX}px ${widths.map(([least, share]) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`)).join(' ')}`;
    const canvas = h('div', { class: 'canvas' });
    const head = tiles ? null : this.head(columns);
    if (!tiles) canvas.style.minWidth = head.style.minWidth = `${INDEX + widths.reduce((sum, [least]) => sum + least, 0)}px`;
    const scroller = h('div', {
      class: `scroller ${tiles ? 'tiles' : 'rows'}`, tabindex: 0, role: 'listbox', 'aria-label': 'Datapoints',
    }, head, canvas);
    this.note = h('div', { class: 'message' });
    main.replaceChildren(bar, scroller);
    if (!this.dataset.length) scroller.replaceChildren(h('p', { class: 'message' }, 'This dataset has no datapoints.'));
    if (this.search) scroller.append(this.note);
    this.list = new List(scroller, canvas, {
      length,
      tile: tiles ? 190 : 0,
      height: 48,
      head: tiles ? 0 : 34,
      render: (position) => (tiles
        ? tile(this.store.at(position), position, this.cover(), this.small)
        : tableRow(this.store.at(position), position, this.names, columns)),
      seen: (first, last) => this.seen(first, last, tiles),
      picked: (position) => go({ at: this.index(position), open: true }, { replace: state().open }),
    });
    this.tell();
    scroller.focus({ preventScroll: true });
  }

  head(columns) {
    const head = h('div', { class: 'head' }, h('div', { class: 'soft' }, 'index'), this.keys.map((row) => h('div', {},
      h('b', { title: row.key }, row.key), h('span', { class: 'chip', 'data-family': row.family }, row.type))));
    head.style.gridTemplateColumns = columns;
    return head;
  }

  index(position) {
    const at = this.page * PAGE + position;
    return this.search ? this.search.matches[at] : at;
  }

  /** Read what is seen once scrolling has stopped for a moment. */
  seen(first, last, tiles) {
    clearTimeout(this.timer);
    const keys = () => (tiles ? [this.cover()] : this.keys.filter((row) => PICTURED.has(row.family) || row.family === 'value').map((row) => row.key));
    const side = (tiles ? 180 : 52) * Math.min(2, Math.ceil(devicePixelRatio));
    this.timer = setTimeout(() => {
      this.store.want(first, last, keys, side);
      if (this.search && last >= this.list.length - 50) this.search.more();
    }, this.timer === undefined ? 0 : 60);
  }

  // --- filter

  /** There are more matches, or all parts were searched. */
  grown() {
    const length = Math.min(PAGE, this.total - this.page * PAGE);
    if (this.list && length !== this.list.length) {
      this.list.length = this.store.length = length;
      // A group that was read in part is read again.
      const last = Math.max(0, ...this.store.groups.keys());
      if (this.store.groups.has(last)) this.store.drop(last);
      this.list.layout();
      if (this.list.selected < 0) this.list.select(0);
    }
    this.tell();
    if (this.total < 100) this.search.more();
  }

  tell() {
    if (!this.search) return;
    const { matches, next, done, error, skipped } = this.search;
    const part = done ? 'all' : `${count(next)} of`;
    let text = error || `${count(matches.length)} found in ${part} ${count(this.dataset.length)} datapoints`;
    if (skipped) text += `; ${count(skipped)} were not compared, as they are damaged or larger than 64 KiB`;
    this.note.textContent = done || error ? `${text}. ` : `${text} … `;
    if (matches.length) this.note.append(h('button', { type: 'button', class: 'save', onclick: () => this.search.save() }, 'Save all indices'));
    this.note.classList.toggle('bad', Boolean(error));
    announce(text);
  }

  // --- moving

  select(index) {
    go({ at: Math.max(0, Math.min(index, this.dataset.length - 1)) }, { replace: true });
  }

  step(columns, rows) {
    const position = this.positionOf(state().at) + columns + rows * this.list.columns;
    if (position < 0 || position >= this.total) return;
    go({ at: this.search ? this.search.matches[position] : position }, { replace: true });
  }

  turn(pages) {
    const page = this.page + pages;
    if (page < 0 || page * PAGE >= this.total) return;
    go({ at: this.search ? this.search.matches[page * PAGE] : page * PAGE });
  }

  toggle() {
    go({ look: this.look() === 'tiles' ? 'table' : 'tiles' }, { replace: true });
  }

  // --- tools

  tools() {
    const look = this.look();
    const pages = Math.ceil(this.total / PAGE);
    const page = Math.floor(this.positionOf(state().at) / PAGE);
    const choose = (name, title) => h('button', {
      type: 'button', 'aria-pressed': `${look === name}`, title: `${title} (t)`, onclick: () => go({ look: name }, { replace: true }),
    }, title);
    return [
      filterTools(this.keys),
      h('form', {
        onsubmit: (event) => {
          event.preventDefault();
          const index = Number(event.target.elements.index.value.replaceAll(/[,\s_]/g, ''));
          if (Number.isInteger(index)) this.select(index < 0 ? this.dataset.length + index : index);
          event.target.elements.index.blur();
        },
      }, h('input', { class: 'jump', name: 'index', inputmode: 'numeric', placeholder: 'Go to index', 'aria-label': 'Go to index (g)', autocomplete: 'off' })),
      pages > 1 ? h('div', { class: 'group' },
        h('button', { type: 'button', disabled: page === 0, title: 'Page before ([)', 'aria-label': 'Page before', onclick: () => this.turn(-1) }, '‹'),
        h('button', { type: 'button', class: 'pages', disabled: true }, `${count(page + 1)} / ${count(pages)}`),
        h('button', { type: 'button', disabled: page === pages - 1, title: 'Page after (])', 'aria-label': 'Page after', onclick: () => this.turn(1) }, '›')) : null,
      look === 'tiles' && this.names.length > 1 ? h('select', {
        'aria-label': 'Key of the tiles', onchange: (event) => go({ cover: event.target.value }, { replace: true }),
      }, this.names.map((key) => h('option', { value: key, selected: key === this.cover() }, key))) : null,
      h('div', { class: 'group' }, choose('tiles', 'Tiles'), choose('table', 'Table')),
    ];
  }

  end() {
    clearTimeout(this.timer);
    this.search?.end();
    this.list?.end();
    this.store?.end();
  }
}
