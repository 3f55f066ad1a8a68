// Nested values, and bytes.

import { h } from './dom.js';
import { count, some } from './format.js';

const OPEN = 3; // levels that are open at first

/** A nested value, of lists that say what they hold. */
export function nodes(tree) {
  return h('ul', { class: 'nodes' }, node(null, tree, 0));
}

function node(name, [kind, content, length], depth) {
  const label = name === null ? null : h('span', { class: 'name' }, `${name}: `);
  if (kind !== 'map' && kind !== 'list') {
    return h('li', {}, label, h('span', { 'data-kind': kind }, kind === 'text' ? JSON.stringify(content) : content));
  }
  const children = kind === 'map'
    ? content.map(([key, value]) => node(key, value, depth + 1))
    : content.map((value, i) => node(i, value, depth + 1));
  const missing = length - content.length;
  if (missing > 0) children.push(h('li', { class: 'soft' }, `and ${count(missing)} more`));
  const summary = h('summary', {}, label, kind === 'map' ? `{ ${some(length, 'key')} }` : `[ ${some(length, 'item')} ]`);
  return h('li', {}, h('details', { open: depth < OPEN && length <= 100 }, summary, h('ul', {}, children)));
}

export const dump = (text) => h('pre', { class: 'dump' }, text);
