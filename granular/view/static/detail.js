// All values of one datapoint.

import { get, media } from './api.js';
import { announce, failure, h, one } from './dom.js';
import { bytes, count } from './format.js';
import { plot } from './plane.js';
import { scrub } from './scrub.js';
import { go } from './state.js';
import { dump, nodes } from './values.js';

let shown = '';
let asking = null;

export function closeDetail() {
  asking?.abort();
  shown = '';
  const panel = one('#detail');
  if (panel.contains(document.activeElement)) one('.scroller')?.focus({ preventScroll: true });
  panel.hidden = true;
  panel.replaceChildren();
}

export async function showDetail(dataset, index, browser) {
  const name = `${dataset.path}\n${index}`;
  if (name === shown) return;
  shown = name;
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  const panel = one('#detail');
  const scrolled = panel.querySelector('.body')?.scrollTop ?? 0;
  panel.hidden = false;
  const head = header(dataset, index, browser);
  // The values that are shown stay until the next ones are there, so that nothing flickers.
  if (panel.firstChild) panel.firstChild.replaceWith(head);
  else panel.append(head);
  let body;
  try {
    const found = await get('datapoint', { path: dataset.path, index }, signal);
    const values = new Map(found.values.map((value) => [value.key, value]));
    body = h('div', { class: 'body' }, browser.names.map((key) => section(dataset, index, values.get(key))));
  } catch (error) {
    if (error.name === 'AbortError') return;
    body = h('div', { class: 'body' }, failure(error));
  }
  for (const player of panel.querySelectorAll('video, audio')) player.pause();
  panel.replaceChildren(head, body);
  body.scrollTop = scrolled;
  announce(`datapoint ${index}`);
}

function header(dataset, index, browser) {
  const step = (by, sign, title) => h('button', {
    type: 'button', class: 'quiet', title, 'aria-label': title, onclick: () => browser.step(by, 0),
  }, sign);
  return h('div', { class: 'bar' },
    h('h1', {}, `#${count(index)}`),
    h('span', { class: 'soft' }, shardOf(dataset, index)),
    h('span', { class: 'space' }),
    step(-1, '‹', 'The datapoint before (←)'),
    step(1, '›', 'The datapoint after (→)'),
    h('button', { type: 'button', class: 'quiet', title: 'Close (Esc)', 'aria-label': 'Close', onclick: () => go({ open: false }) }, '×'));
}

function shardOf(dataset, index) {
  if (!dataset.shards) return '';
  let start = 0;
  for (let shard = 0; shard < dataset.lengths.length; shard += 1) {
    if (index < start + dataset.lengths[shard]) return `shard ${`${shard}`.padStart(6, '0')}, ${count(index - start)}`;
    start += dataset.lengths[shard];
  }
  return '';
}

function section(dataset, index, value) {
  const where = { path: dataset.path, key: value.key, index };
  const many = 'length' in value;
  const size = many ? `${count(value.length)} values` : bytes(value.size);
  return h('section', { class: 'value', 'data-key': value.key },
    h('header', {},
      h('h2', { title: value.key }, value.key),
      h('span', { class: 'chip', 'data-family': value.family }, many ? `${value.type ?? ''}[]` : value.type),
      h('span', { class: 'size' }, size),
      many ? null : h('a', { href: media({ ...where, download: 1 }), download: '' }, 'Save')),
    many ? sequence(value, where) : content(value, where));
}

function content(value, where) {
  if (value.error) return h('p', { class: 'bad', role: 'alert' }, value.error);
  switch (value.family) {
    case 'number': return h('p', { class: 'figure' }, value.text, value.name ? h('span', { class: 'name' }, ` ${value.name}`) : null);
    case 'text': return [h('div', { class: 'prose' }, value.full), value.tokens ? h('p', { class: 'note' }, value.tokens) : null, cut(value)];
    case 'json': case 'tree':
      if (value.tree) return nodes(value.tree);
      return [h('pre', {}, value.full ?? ''), cut(value)];
    case 'array': return plot(where);
    case 'image': return image(where);
    case 'video': return player('video', where);
    case 'audio': return player('audio', where);
    default: return [dump(value.full ?? ''), cut(value)];
  }
}

function cut(value) {
  return value.cut ? h('p', { class: 'note' }, `The beginning of ${bytes(value.size)}.`) : null;
}

function image(where) {
  const note = h('p', { class: 'note' });
  const picture = h('img', { alt: `${where.key} of datapoint ${where.index}`, src: media(where), draggable: 'false' });
  picture.addEventListener('load', async () => {
    note.textContent = `${picture.naturalWidth} × ${picture.naturalHeight}, as decoded: without EXIF orientation`;
    picture.classList.toggle('exact', Math.max(picture.naturalWidth, picture.naturalHeight) <= 128);
    // A browser shows what it can of a damaged image.
    const { path, key, index } = where;
    const found = await get('search', { path, key, relation: 'damaged', text: '', from: index, to: index + 1 }).catch(() => null);
    if (found?.matches.length) note.append(h('span', { class: 'bad' }, '; damaged: decoders refuse it'));
  });
  picture.addEventListener('error', () => {
    picture.replaceWith(h('p', { class: 'bad broken', role: 'alert' }, 'The browser cannot show this image: it is damaged, or of another type.'));
  });
  picture.addEventListener('click', () => picture.classList.toggle('actual'));
  return [h('div', { class: 'frame' }, picture), note];
}

export function player(tag, where) {
  const element = h(tag, { controls: true, preload: 'metadata', src: media(where), 'aria-label': `${where.key} of datapoint ${where.index}` });
  if (tag === 'video') Object.assign(element, { loop: true, muted: true, playsInline: true });
  const note = h('p', { class: 'note' });
  element.addEventListener('loadedmetadata', () => {
    const sides = tag === 'video' ? `${element.videoWidth} × ${element.videoHeight}, ` : '';
    note.textContent = `${sides}${element.duration.toFixed(2)} s`;
  });
  element.addEventListener('error', () => {
    element.replaceWith(h('p', { class: 'bad broken', role: 'alert' }, `The browser cannot play this ${tag}: it is damaged, or of another type.`));
  });
  return [element, note];
}

function sequence(value, where) {
  if (!value.length) return h('p', { class: 'soft' }, 'empty');
  if (['image', 'array'].includes(value.family)) return scrub(value, where);
  const box = h('div', {});
  if (['video', 'audio'].includes(value.family)) {
    const choose = (position) => box.replaceChildren(...player(value.family, { ...where, position }));
    choose(0);
    const slider = h('input', { type: 'range', min: 0, max: value.length - 1, value: 0, 'aria-label': `Position in ${where.key}` });
    const output = h('output', {}, `1 / ${count(value.length)}`);
    slider.addEventListener('change', () => {
      output.textContent = `${count(Number(slider.value) + 1)} / ${count(value.length)}`;
      choose(Number(slider.value));
    });
    return h('div', { class: 'scrub' }, box, h('div', { class: 'bar' }, slider, output));
  }
  const list = h('ol', { class: 'items', start: 0 });
  const more = h('button', { type: 'button', onclick: () => load() }, 'More');
  let next = 0;
  async function load() {
    try {
      const found = await get('values', { ...where, from: next });
      list.append(...found.values.map((item) => h('li', { class: item.error ? 'bad' : '' }, item.error || item.text || bytes(item.size))));
      next += found.values.length;
      more.hidden = next >= value.length || !found.values.length;
    } catch (error) {
      more.replaceWith(failure(error));
    }
  }
  load();
  return [list, more];
}
