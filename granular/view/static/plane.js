// An array: a heat map of two of its axes, or a line, with a slider for the others.

import { files } from './api.js';
import { failure, h, s } from './dom.js';
import { count } from './format.js';
import { paint } from './store.js';

export function plot(where) {
  const canvas = h('canvas', { role: 'img', 'aria-label': `${where.key} as a heat map` });
  const box = h('div', {}, canvas);
  const note = h('p', { class: 'note' });
  const hover = h('p', { class: 'note' }, '\u00a0');
  const controls = h('div', { class: 'bar' });
  const figure = h('div', { class: 'plot' }, box, controls, note, hover);
  let facts = null;
  let asking = null;

  async function load(plane) {
    asking?.abort();
    asking = new AbortController();
    try {
      [facts] = await files('plane', { ...where, plane }, asking.signal);
      note.textContent = describe(facts);
      await draw();
      if (facts.planes > 1 && !controls.firstChild) controls.append(...slider(facts));
    } catch (error) {
      if (error.name !== 'AbortError') figure.replaceChildren(failure(error));
    }
  }

  async function draw() {
    if (facts.rows === 1 && facts.numbers?.length > 1 && facts.blob) {
      box.replaceChildren(series(facts.numbers));
    } else if (facts.blob) {
      const bitmap = await createImageBitmap(facts.blob);
      paint(canvas, { bitmap, width: facts.columns, height: facts.rows, note: facts.dtype });
      bitmap.close();
      box.replaceChildren(canvas);
    } else {
      box.replaceChildren(h('pre', {}, (facts.numbers ?? []).join(', ') || 'no values'));
    }
  }

  function slider({ planes }) {
    const output = h('output', {}, `0 of ${count(planes)}`);
    const input = h('input', { type: 'range', min: 0, max: planes - 1, value: 0, 'aria-label': `Plane of ${where.key}` });
    input.addEventListener('input', () => {
      output.textContent = `${count(Number(input.value))} of ${count(planes)}`;
      load(input.value);
    });
    return [input, output];
  }

  canvas.addEventListener('mousemove', (event) => {
    if (!facts?.numbers) return;
    // The picture is fitted into the box of the canvas: find the pixel under the pointer.
    const box = canvas.getBoundingClientRect();
    const scale = Math.min(box.width / facts.columns, box.height / facts.rows);
    const column = Math.floor((event.clientX - box.left - (box.width - facts.columns * scale) / 2) / scale);
    const row = Math.floor((event.clientY - box.top - (box.height - facts.rows * scale) / 2) / scale);
    const inside = row >= 0 && column >= 0 && row < facts.rows && column < facts.columns;
    hover.textContent = inside ? `[${row}, ${column}] = ${facts.numbers[row * facts.columns + column]}` : '\u00a0';
  });

  load(0);
  return figure;
}

function describe(facts) {
  const parts = [`${facts.dtype}, ${facts.shape.length ? facts.shape.map(count).join(' × ') : 'scalar'}`];
  if ('least' in facts) parts.push(`${facts.planes > 1 ? 'this plane: ' : ''}${facts.least} to ${facts.greatest}, mean ${facts.mean}`);
  if (facts.strange) parts.push(`${count(facts.strange)} not finite`);
  return parts.join(' · ');
}

/** A line through numbers; those that are not finite are gaps. */
function series(texts) {
  const numbers = texts.map(Number);
  const finite = numbers.filter(Number.isFinite);
  const least = Math.min(...finite);
  const span = Math.max(...finite) - least || 1;
  let path = '';
  let pen = 'M';
  numbers.forEach((number, i) => {
    if (!Number.isFinite(number)) {
      pen = 'M';
      return;
    }
    path += `${pen}${(i / (numbers.length - 1)) * 1000} ${290 - ((number - least) / span) * 280}`;
    pen = 'L';
  });
  return s('svg', { class: 'series', viewBox: '0 0 1000 300', preserveAspectRatio: 'none', role: 'img', 'aria-label': `${texts.length} numbers` },
    s('path', { d: path }));
}
