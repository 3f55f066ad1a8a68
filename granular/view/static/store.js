// Lines and thumbnails of datapoints, read in groups of neighbours and forgotten when others are seen.

import { files, get } from './api.js';

const GROUP = 100; // datapoints of a request, whose thumbnails are one fan-out of the server
const GROUPS = 40; // groups that are kept
const PICTURED = new Set(['image', 'video', 'array']);

export class Store {
  /**
   * @param dataset its facts
   * @param indexOf the index of the datapoint at a position
   * @param length the number of positions
   * @param changed called with the positions that have something new
   */
  constructor(dataset, indexOf, length, changed) {
    Object.assign(this, { dataset, indexOf, length, changed });
    this.groups = new Map();
  }

  /** What is there of a position: `{ index, cells, pictures }`, or `{ error }`, or undefined. */
  at(position) {
    const group = this.groups.get(Math.floor(position / GROUP));
    if (!group?.rows) return group?.error ? { error: group.error } : undefined;
    return group.rows[position - group.number * GROUP];
  }

  /** Read what is missing of some positions, and stop reading what is not among them. */
  want(first, last, keys, side) {
    const numbers = [];
    const end = Math.min(last, this.length - 1);
    for (let number = Math.floor(first / GROUP); number * GROUP <= end; number += 1) numbers.push(number);
    for (const [number, group] of this.groups) {
      if (!numbers.includes(number) && !group.done) this.drop(number);
    }
    for (const number of numbers) {
      if (this.groups.get(number)?.error) this.drop(number);
      if (!this.groups.has(number)) this.read(number, keys, side);
    }
    for (const number of this.groups.keys()) {
      if (this.groups.size <= GROUPS) break;
      if (!numbers.includes(number)) this.drop(number);
    }
  }

  drop(number) {
    const group = this.groups.get(number);
    this.groups.delete(number);
    group.asking.abort();
    for (const row of group.rows || []) for (const picture of row.pictures.values()) picture.bitmap?.close();
  }

  async read(number, keys, side) {
    const asking = new AbortController();
    const group = { number, asking, done: false };
    this.groups.set(number, group);
    const first = number * GROUP;
    const last = Math.min(first + GROUP, this.length) - 1;
    const indices = [];
    for (let position = first; position <= last; position += 1) indices.push(this.indexOf(position));
    const path = this.dataset.path;
    try {
      // The server answers in ascending order.
      const order = [...indices].sort((a, b) => a - b);
      const range = order.at(-1) - order[0] === order.length - 1;
      const where = range ? { start: order[0], count: order.length } : { at: order.join(',') };
      const { columns } = await get('rows', { path, ...where }, asking.signal);
      const places = new Map(order.map((index, i) => [index, i]));
      group.rows = indices.map((index) => ({
        index,
        cells: Object.fromEntries(Object.entries(columns).map(([key, cells]) => [key, cells[places.get(index)]])),
        pictures: new Map(),
      }));
      this.changed(first, last);
      for (const key of keys()) {
        const wanted = group.rows.filter((row) => PICTURED.has(row.cells[key].family) && !row.cells[key].error);
        if (!wanted.length) continue;
        const at = wanted.map((row) => row.index).join(',');
        const pictures = await files('pictures', { path, key, side, at }, asking.signal);
        const rows = new Map(wanted.map((row) => [row.index, row]));
        await Promise.all(pictures.map(async (picture) => {
          if (picture.blob) picture.bitmap = await createImageBitmap(picture.blob);
          delete picture.blob;
          if (this.groups.get(number) === group) rows.get(picture.name)?.pictures.set(key, picture);
          else picture.bitmap?.close();
        }));
        this.changed(first, last);
      }
    } catch (error) {
      if (error.name === 'AbortError') return;
      group.error = error.message;
      this.changed(first, last);
    } finally {
      group.done = true;
    }
  }

  end() {
    for (const number of [...this.groups.keys()]) this.drop(number);
  }
}

/** Paint a picture into a canvas; small ones show their pixels. */
export function paint(canvas, picture) {
  const { bitmap } = picture;
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.classList.toggle('exact', Math.max(picture.width, picture.height) <= 64 || /^[a-z]+\d/.test(picture.note || ''));
  canvas.getContext('2d').drawImage(bitmap, 0, 0);
}
