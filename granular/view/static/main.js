// The page: the path in the header, and what is at that path.

import { get } from './api.js';
import { showAbout } from './about.js';
import { Browser } from './browser.js';
import { closeDetail, showDetail } from './detail.js';
import { announce, failure, h, one } from './dom.js';
import { bytes, count, some } from './format.js';
import { bindKeys, showHelp } from './keyboard.js';
import { fresh, go, hash, state, watch } from './state.js';
import { markTree, showTree } from './tree.js';

// The token is a cookie by now.
history.replaceState(null, '', `/${location.hash}`);

let browser = null;
let asking = null;
let root = '';

async function load() {
  const { path } = state();
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  browser?.end();
  browser = null;
  closeDetail();
  const main = one('#main');
  main.replaceChildren(h('p', { class: 'message wait' }, 'Opening …'));
  try {
    const folder = await get('folder', { path }, signal);
    root = folder.root;
    crumbs(path);
    if (folder.kind === 'folder') {
      main.replaceChildren(listing(folder));
      announce(`${some(folder.entries.length, 'entry', 'entries')} in ${path || root}`);
      return;
    }
    const dataset = await get('dataset', { path }, signal);
    browser = new Browser(dataset);
    announce(`${dataset.kind}, ${some(dataset.length, 'datapoint')}`);
    show();
  } catch (error) {
    if (error.name === 'AbortError') return;
    crumbs(path);
    main.replaceChildren(failure(error));
  }
}

function show() {
  if (!browser) return;
  const now = state();
  const main = one('#main');
  if (now.tab === 'about') {
    if (!main.querySelector('.about')) showAbout(main, browser.dataset, tabs(now));
    main.querySelector('.bar')?.replaceWith(bar(now));
    closeDetail();
    return;
  }
  browser.show(main, bar(now));
  if (now.open && browser.selected !== undefined) showDetail(browser.dataset, browser.selected, browser);
  else closeDetail();
}

function bar(now) {
  const { dataset } = browser;
  const fact = (number, noun) => h('span', {}, h('b', {}, count(number)), number === 1 ? ` ${noun}` : ` ${noun}s`);
  return h('div', { class: 'bar' },
    tabs(now),
    h('div', { class: 'facts' },
      fact(dataset.length, 'datapoint'),
      dataset.shards ? fact(dataset.shards, 'shard') : null,
      dataset.bytes === null ? null : h('span', {}, h('b', {}, bytes(dataset.bytes)))),
    now.tab === 'data' ? h('div', { class: 'tools' }, browser.tools()) : null);
}

function tabs(now) {
  const tab = (name, label, key) => h('button', {
    type: 'button', role: 'tab', 'aria-selected': `${now.tab === name}`, title: `${label} (${key})`,
    onclick: () => go({ tab: name, open: false }),
  }, label);
  return h('div', { class: 'group', role: 'tablist' }, tab('data', 'Data', 'd'), tab('about', 'About', 'a'));
}

function crumbs(path) {
  const names = path.split('/').filter(Boolean);
  const parts = [[root, ''], ...names.map((name, i) => [name, names.slice(0, i + 1).join('/')])];
  one('#crumbs').replaceChildren(...parts.flatMap(([name, target], i) => [
    i ? h('span', { 'aria-hidden': 'true' }, '/') : null,
    h('a', { href: hash(fresh(target)), title: name }, name),
  ]).filter(Boolean));
  document.title = `${names.at(-1) || root} · granular`;
}

function listing(folder) {
  const path = (name) => [folder.path, name].filter(Boolean).join('/');
  const rows = folder.entries.map((entry) => h('tr', {},
    h('td', {}, entry.folder || entry.format
      ? h('a', { href: hash(fresh(path(entry.name))) }, entry.folder ? `${entry.name}/` : entry.name)
      : entry.name),
    h('td', { class: 'right soft' }, entry.folder ? '' : bytes(entry.size))));
  const narrowed = ({ target }) => {
    const part = target.value.toLowerCase();
    rows.forEach((row, i) => { row.hidden = !folder.entries[i].name.toLowerCase().includes(part); });
    const shown = rows.filter((row) => !row.hidden).length;
    note.textContent = part ? `${count(shown)} of the ${all}` : all;
    announce(note.textContent);
  };
  const all = folder.more ? `first ${count(folder.entries.length)} entries` : some(folder.entries.length, 'entry', 'entries');
  const note = h('p', { class: 'soft' }, all);
  return h('div', { class: 'page' },
    h('h1', {}, folder.path.split('/').at(-1) || root),
    note,
    rows.length > 1 ? h('form', { class: 'filter', role: 'search', onsubmit: (event) => event.preventDefault() },
      h('input', { placeholder: 'Filter names', 'aria-label': 'Filter names (/)', autocomplete: 'off', spellcheck: 'false', oninput: narrowed })) : null,
    h('table', { class: 'listing' }, h('tbody', {}, rows)));
}

watch((next, before) => {
  announce(''); // what was said of another state is not true of this one
  markTree(next.path);
  if (next.path !== before.path) load();
  else show();
});

const narrow = matchMedia('(max-width: 1000px)');
function toggleTree(open = document.body.dataset.tree === 'closed') {
  document.body.dataset.tree = open ? 'open' : 'closed';
}
toggleTree(!narrow.matches);
narrow.addEventListener('change', () => toggleTree(!narrow.matches));
one('#tree').addEventListener('click', (event) => {
  if (narrow.matches && event.target.closest('a')) toggleTree(false);
});
one('#menu').addEventListener('click', () => toggleTree());
one('#keys').addEventListener('click', showHelp);

bindKeys({ browser: () => browser, toggleTree });
showTree();
load();
