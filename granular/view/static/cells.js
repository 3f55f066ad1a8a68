// Tiles and table rows.

import { h } from './dom.js';
import { bytes, count } from './format.js';
import { paint } from './store.js';

const GLYPHS = { video: '▶', audio: '♪', array: '▦', image: '▣', bytes: '01' };

export function label(cell) {
  if (cell.length === 0 || !cell.family) return 'empty';
  return cell.name || cell.text || bytes(cell.size);
}

function painted(picture, name) {
  const canvas = h('canvas', { role: 'img', 'aria-label': name });
  paint(canvas, picture);
  return canvas;
}

const full = (cell) => [cell.text, cell.name].filter(Boolean).join(' ');

/** A tile: the picture or text of one key, and a caption: a text or class, the index and other small fields. */
export function tile(row, cover, fields) {
  if (!row) return h('div', {}, h('div', { class: 'tile' }, h('div', { class: 'cover wait' }), h('div', { class: 'caption' })));
  if (row.error) return h('div', { title: row.error }, h('div', { class: 'tile' }, h('div', { class: 'cover' }, h('p', { class: 'bad' }, row.error))));
  const cell = row.cells[cover];
  const there = fields.filter((key) => key !== cover && !row.cells[key].error);
  const title = there.find((key) => row.cells[key].name || row.cells[key].family === 'text') ?? there[0];
  const bad = fields.filter((key) => key !== cover && row.cells[key].error);
  const others = there.filter((key) => key !== title).map((key) => ` · ${key} ${label(row.cells[key])}`);
  return h('div', { 'aria-label': `datapoint ${row.index}` },
    h('div', { class: 'tile' },
      coverOf(cell, row.pictures.get(cover)),
      h('div', { class: 'caption', title: there.map((key) => `${key}: ${full(row.cells[key])}`).join('\n') },
        h('span', {}, title ? label(row.cells[title]) : `${cell.type ?? ''}`),
        h('span', { class: 'index' }, count(row.index),
          bad.map((key) => h('span', { class: 'bad', title: row.cells[key].error }, ` · ${key} cannot be shown`)), others))));
}

function coverOf(cell, picture) {
  const box = h('div', { class: 'cover' });
  if (picture?.bitmap) {
    box.append(painted(picture, `${cell.family}, ${picture.width} by ${picture.height}`));
  } else if (cell.error || picture?.error) {
    box.append(h('p', { class: 'bad', title: cell.error || picture.error }, cell.error || picture.error));
  } else if (cell.family in GLYPHS && !(picture && cell.text)) {  // an array of dates has a text, but no picture
    box.append(h('span', { class: 'glyph' }, `${GLYPHS[cell.family]} ${bytes(cell.size)}`));
  } else {
    box.append(h('p', {}, label(cell)));
  }
  const badge = 'length' in cell ? `${count(cell.length)} ×` : cell.family === 'video' ? `▶ ${picture?.note ?? ''}` : picture?.note;
  if (badge) box.append(h('span', { class: 'badge' }, badge));
  return box;
}

/** A row of the table. */
export function tableRow(row, keys, columns) {
  const line = h('div', {});
  line.style.gridTemplateColumns = columns;
  if (!row) line.append(h('div', { class: 'cell index wait' }, '…'));
  else if (row.error) line.append(h('div', { class: 'cell index' }), h('div', { class: 'cell bad', title: row.error }, row.error));
  else {
    line.setAttribute('aria-label', `datapoint ${row.index}`);
    line.append(h('div', { class: 'cell index' }, count(row.index)));
    line.append(...keys.map((key) => tableCell(row.cells[key], row.pictures.get(key))));
  }
  return line;
}

function tableCell(cell, picture) {
  const error = cell.error || picture?.error;
  const box = h('div', { class: `cell ${cell.family ?? ''}`, title: error || full(cell) });
  if (picture?.bitmap) box.append(painted(picture, cell.family));
  if ('length' in cell) box.append(h('span', { class: 'small' }, `${count(cell.length)} ×`));
  const facts = [];
  if (picture?.bitmap && !cell.text) facts.push(`${picture.width} × ${picture.height}`);
  if (cell.family && (!cell.text || cell.family === 'bytes')) facts.push(bytes(cell.size));
  if (error) box.append(h('span', { class: 'bad' }, error));
  else if (cell.text) box.append(h('span', {}, cell.text));
  if (cell.name) box.append(h('span', { class: 'name' }, cell.name));
  if (facts.length) box.append(h('span', { class: 'small' }, facts.join(' · ')));
  return box;
}
