// A sequence of images or arrays, of which only the parts that are seen are read.

import { files } from './api.js';
import { h } from './dom.js';
import { count } from './format.js';
import { paint } from './store.js';

const PART = 24; // values of a request
const PARTS = 8; // parts that are kept

export function scrub(value, where) {
  const canvas = h('canvas', { role: 'img', 'aria-label': `${where.key} of datapoint ${where.index}` });
  const slider = h('input', { type: 'range', min: 0, max: value.length - 1, value: 0, 'aria-label': `Position in ${where.key}` });
  const output = h('output', {});
  const play = h('button', { type: 'button', class: 'play', 'aria-label': 'Play', title: 'Play (Space)' }, '▶');
  const note = h('p', { class: 'note' });
  const parts = new Map();
  const box = h('div', { class: 'scrub' }, canvas, h('div', { class: 'bar' }, play, slider, output), note);
  let timer = null;

  function part(number) {
    if (!parts.has(number)) {
      const asked = files('pictures', { ...where, from: number * PART, count: PART, side: 640 }).then((pictures) => Promise.all(
        pictures.map(async (picture) => (picture.blob ? { ...picture, bitmap: await createImageBitmap(picture.blob) } : picture))));
      asked.catch(() => parts.delete(number));
      parts.set(number, asked);
      if (parts.size > PARTS) {
        const [oldest, old] = parts.entries().next().value;
        parts.delete(oldest);
        old.then((pictures) => pictures.forEach((picture) => picture.bitmap?.close())).catch(() => {});
      }
    }
    return parts.get(number);
  }

  async function show() {
    const position = Number(slider.value);
    output.textContent = `${count(position)} of ${count(value.length)}`;
    const number = Math.floor(position / PART);
    try {
      const picture = (await part(number))[position % PART];
      if (Number(slider.value) !== position) return;
      note.classList.toggle('bad', Boolean(picture.error));
      note.textContent = picture.error || picture.note || `${picture.width} × ${picture.height}`;
      canvas.hidden = !picture.bitmap;
      if (picture.bitmap) paint(canvas, picture);
      canvas.dataset.position = position;
      // The next part is there before it is played.
      if (timer && position % PART > PART / 2 && (number + 1) * PART < value.length) part(number + 1).catch(() => {});
    } catch (error) {
      note.textContent = error.message;
      note.classList.add('bad');
      stop();
    }
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = '▶';
  }

  async function run() {
    if (!box.isConnected) return stop();
    slider.value = (Number(slider.value) + 1) % value.length;
    const due = performance.now() + 60;
    await show();
    if (timer) timer = setTimeout(run, Math.max(0, due - performance.now()));
    return undefined;
  }

  play.addEventListener('click', () => {
    if (timer) return stop();
    play.textContent = '❚❚';
    timer = setTimeout(run, 0);
    return undefined;
  });
  slider.addEventListener('input', show);
  show();
  return box;
}
