// The datapoints of a dataset: tiles or a table, in pages, all of them or those that pass a filter.

import { tableRow, tile } from './cells.js';
import { announce, h } from './dom.js';
import { chips, filterTools, Search, sortedBy } from './filter.js';
import { count, some } from './format.js';
import { List } from './list.js';
import { go, state } from './state.js';
import { Store } from './store.js';

const PAGE = 10000; // datapoints of a page: a browser cannot scroll through ten million
const PICTURED = new Set(['image', 'video', 'array', 'bytes']);
// Pixels at least, and the share of what is left.
const WIDTHS = { number: [140, 0], references: [110, 0], text: [220, 3], json: [200, 2], tree: [200, 2], array: [240, 2],
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
      // Of several texts, the longest.
      const row = this.keys.filter((one) => one.family === family).reduce((a, b) => (family === 'text' && a?.bytes < b.bytes ? b : a ?? b), null);
      if (row) return row.key;
    }
    return this.names[0];
  }

  // --- showing

  show(main, bar) {
    const now = state();
    const filter = JSON.stringify([now.where, now.sort, now.down]);
    if (filter !== this.filter) {
      this.filter = filter;
      this.search?.end();
      this.search = now.where.length || now.sort ? new Search(this.dataset, now, () => this.grown()) : null;
      this.shown = '';
      bar.querySelector('.pager').replaceWith(this.pager());
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

  /** The index of the datapoint that is selected; undefined if there is none, or none yet. */
  get selected() {
    return state().at ?? (this.search ? this.search.matches : [0])[0];
  }

  positionOf(index) {
    if (!this.search) return Math.min(index, Math.max(0, this.dataset.length - 1));
    const { matches, sort } = this.search;
    const position = matches.indexOf(index);
    if (position >= 0 || sort) return Math.max(0, position);
    const next = matches.findIndex((match) => match >= index);
    return next < 0 ? Math.max(0, this.total - 1) : next;
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
    main.replaceChildren(bar, ...(this.search ? [this.strip()] : []), scroller);
    if (!this.dataset.length) scroller.replaceChildren(h('p', { class: 'message' }, 'This dataset has no datapoints.'));
    this.main = main;
    this.list = new List(scroller, canvas, {
      length,
      tile: tiles ? 190 : 0,
      height: 48,
      head: tiles ? 0 : 34,
      render: (position) => (tiles
        ? tile(this.store.at(position), this.cover(), this.small)
        : tableRow(this.store.at(position), this.names, columns)),
      seen: (first, last) => this.seen(first, last, tiles),
      picked: (position) => go({ at: this.index(position), open: true }, { replace: state().open }),
    });
    this.tell();
    this.goOn();
    scroller.focus({ preventScroll: true });
  }

  head(columns) {
    const { sort, down } = state();
    const head = h('div', { class: 'head' }, h('div', { class: 'soft' }, 'index'), this.keys.map((row) => h('div', {},
      h('button', {
        type: 'button', class: 'quiet', title: `Sort by ${sortedBy(row)}`, 'aria-pressed': `${sort === row.key}`,
        // Upwards, downwards, and as it was.
        onclick: () => go({ sort: sort === row.key && down ? '' : row.key, down: sort === row.key && !down, at: null }),
      }, row.key, sort === row.key ? (down ? ' ↓' : ' ↑') : ''),
      h('span', { class: 'chip', 'data-family': row.family }, row.type))));
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

  /** What holds, how much was looked at, and what can be done with it. */
  strip() {
    const button = (onclick) => h('button', { type: 'button', onclick });
    this.note = h('span', { class: 'note' });
    this.further = button(() => { this.search.further(); this.tell(); });
    this.save = button(() => { this.search.save(); this.tell(); });
    this.save.classList.add('save');
    return h('div', { class: 'found' }, chips(this.dataset), this.note, this.further, this.save);
  }

  /** There are more matches, or a round is over. */
  grown() {
    const { search } = this;
    if (!this.list.scroller.isConnected) { // another tab is shown
      this.shown = '';
      return;
    }
    const length = Math.min(PAGE, this.total - this.page * PAGE);
    if (search.sort && !search.working && search.matches.length) {
      this.build(this.main, this.main.querySelector('.bar'));
      this.list.select(this.positionOf(state().at) % PAGE);
    } else if (length !== this.list.length) {
      this.list.length = this.store.length = length;
      // A group that was read in part is read again.
      const last = Math.max(0, ...this.store.groups.keys());
      if (this.store.groups.has(last)) this.store.drop(last);
      this.list.layout();
      if (this.list.selected < 0) this.list.select(0);
    }
    this.main.querySelector('.pager')?.replaceWith(this.pager());
    // A datapoint that is known not to be among those found is left.
    const { at, open } = state();
    if (at === null && open) this.to(0);
    else if (at !== null && search.next > at && this.total && !search.matches.includes(at)) this.select(at);
    else if (open && search.done && !search.matches.length) go({ open: false }, { replace: true });
    this.tell();
    this.goOn();
  }

  goOn() {
    if (this.search && (this.search.sort || this.total < 100)) this.search.more();
  }

  tell() {
    if (!this.search) return;
    const { matches, next, done, paused, working, error, skipped, where, sort, rounds } = this.search;
    const { length } = this.dataset;
    const part = `${done ? 'all' : `the first ${count(next)} of`} ${some(length, 'datapoint')}`;
    const found = sort && working ? 'looked at' : where.length ? `${count(matches.length)} found in` : 'sorted:';
    // A search for more than fits the window goes on when it is scrolled.
    const goesOn = working && (sort || this.total < 100 || rounds === Infinity);
    let text = error || `${found} ${part}${goesOn ? ' …' : ''}`;
    if (skipped) text += `; ${count(skipped)} with a damaged or large value ${sort ? 'come last or are' : 'are'} left out`;
    this.note.textContent = text;
    this.note.classList.toggle('bad', Boolean(error));
    this.further.hidden = error ? this.search.wrong : !paused;
    this.further.textContent = error ? 'Try again' : `Look at ${next * 10 < length ? `ten times as many` : `all ${count(length)}`}`;
    this.save.hidden = Boolean(error) || (done && !matches.length);
    this.save.textContent = done ? `Save ${some(matches.length, 'index', 'indices')}` : 'Look at all and save the indices';
    announce(text);
  }

  // --- moving

  select(index) {
    const wanted = Math.max(0, Math.min(index, this.dataset.length - 1));
    go({ at: this.search?.matches[this.positionOf(wanted)] ?? wanted }, { replace: true });
  }

  /** Select what is at a position of the list. */
  to(position) {
    if (position < 0 || position >= this.total) return;
    go({ at: this.search ? this.search.matches[position] : position }, { replace: true });
  }

  step(columns, rows) {
    this.to(this.positionOf(state().at) + columns + rows * this.list.columns);
  }

  turn(pages) {
    this.to(Math.max(0, this.page + pages) * PAGE);
  }

  toggle() {
    go({ look: this.look() === 'tiles' ? 'table' : 'tiles' }, { replace: true });
  }

  // --- tools

  tools() {
    const look = this.look();
    const choose = (name, title) => h('button', {
      type: 'button', 'aria-pressed': `${look === name}`, title: `${title} (t)`, onclick: () => go({ look: name }, { replace: true }),
    }, title);
    return [
      ...filterTools(this.dataset, this.keys),
      h('form', {
        onsubmit: (event) => {
          event.preventDefault();
          const field = event.target.elements.index;
          const { length } = this.dataset;
          const index = Number(field.value.replaceAll(/[,\s_]/g, '') || NaN);
          if (!(Number.isInteger(index) && index >= -length && index < length)) {
            field.setCustomValidity(`expected an index from 0 to ${count(length - 1)}`);
            field.reportValidity();
            return;
          }
          field.blur();
          this.select(index < 0 ? length + index : index);
        },
      }, h('input', { oninput: ({ target }) => target.setCustomValidity(''),  class: 'jump', name: 'index', inputmode: 'numeric', placeholder: 'Go to index', 'aria-label': 'Go to index (g)', autocomplete: 'off' })),
      this.pager(),
      look === 'tiles' && this.names.length > 1 ? h('select', {
        'aria-label': 'Key of the tiles', onchange: (event) => go({ cover: event.target.value }, { replace: true }),
      }, this.names.map((key) => h('option', { value: key, selected: key === this.cover() }, key))) : null,
      look === 'tiles' ? h('select', {
        'aria-label': 'Sort by', onchange: ({ target }) => {
          const [sort, down] = JSON.parse(target.value);
          go({ sort, down, at: null });
        },
      }, h('option', { value: '["",false]' }, 'Not sorted'), this.keys.flatMap((row) => [false, true].map((down) => h('option', {
        value: JSON.stringify([row.key, down]), selected: row.key === state().sort && down === state().down,
      }, `${down ? '↓' : '↑'} ${sortedBy(row)}`)))) : null,
      h('div', { class: 'group' }, choose('tiles', 'Tiles'), choose('table', 'Table')),
    ];
  }

  pager() {
    const pages = Math.ceil(this.total / PAGE);
    const page = Math.floor(this.positionOf(state().at) / PAGE);
    const button = (by, sign, title, key) => h('button', {
      type: 'button', disabled: page + by < 0 || page + by >= pages, title: `${title} (${key})`, 'aria-label': title, onclick: () => this.turn(by),
    }, sign);
    return h('div', { class: 'group pager', hidden: pages < 2 }, button(-1, '‹', 'Page before', '['),
      h('button', { type: 'button', class: 'pages', disabled: true }, `${count(page + 1)} / ${count(pages)}`), button(1, '›', 'Page after', ']'));
  }

  end() {
    clearTimeout(this.timer);
    this.search?.end();
    this.list?.end();
    this.store?.end();
  }
}
