// Folders as a tree, each listed when it is opened.

import { get } from './api.js';
import { h, one } from './dom.js';
import { bytes, count } from './format.js';
import { fresh, hash, state } from './state.js';

/** Show the folders, opened up to the one that is shown. */
export async function showTree() {
  const top = await branch('');
  one('#tree').replaceChildren(top);
  let path = '';
  for (const name of state().path.split('/').filter(Boolean)) {
    path = path ? `${path}/${name}` : name;
    const item = find(path);
    if (!item) break;
    await expand(item);
  }
  markTree(state().path);
}

/** Mark the folder that is shown, and open it. */
export function markTree(path) {
  for (const link of one('#tree').querySelectorAll('[aria-current]')) link.removeAttribute('aria-current');
  const item = find(path);
  if (!item) return;
  item.querySelector('a').setAttribute('aria-current', 'page');
  expand(item);
}

const find = (path) => [...one('#tree').querySelectorAll('li')].find((item) => item.dataset.path === path);

async function branch(path) {
  let folder;
  try {
    folder = await get('folder', { path });
  } catch (error) {
    return h('ul', {}, h('li', { class: 'bad' }, error.message));
  }
  // The files of a dataset are shown as its keys: only shards are folders of their own.
  const entries = folder.kind === 'data' ? folder.entries.filter((entry) => entry.folder) : folder.entries;
  return h('ul', { 'data-kind': folder.kind }, entries.map((entry) => row(path, entry)),
    folder.more ? h('li', { class: 'soft' }, `and more than ${count(folder.entries.length)}`) : null);
}

function row(parent, entry) {
  const path = parent ? `${parent}/${entry.name}` : entry.name;
  if (!entry.folder && !entry.format) {
    return h('li', {}, h('a', { class: 'plain', title: entry.name },
      h('span', { class: 'mark' }), h('span', { class: 'name' }, entry.name), h('span', { class: 'size' }, bytes(entry.size))));
  }
  return h('li', { 'data-path': path, 'data-folder': entry.folder },
    h('a', { href: hash(fresh(path)), title: entry.name },
      h('span', { class: 'mark', 'data-kind': entry.format ? 'data' : 'folder' }, entry.folder ? '▸' : '●'),
      h('span', { class: 'name' }, entry.name),
      h('span', { class: 'size' }, entry.folder ? '' : bytes(entry.size))));
}

async function expand(item) {
  if (!('folder' in item.dataset) || item.dataset.open) return;
  item.dataset.open = 'yes';
  const list = await branch(item.dataset.path);
  const mark = item.querySelector('.mark');
  if (list.dataset.kind === 'data') {
    mark.dataset.kind = 'data';
    mark.textContent = '●';
  } else {
    mark.textContent = '▾';
  }
  item.append(list);
}
