// Bars as SVG.

import { h, s } from './dom.js';
import { only } from './filter.js';
import { bytes, count } from './format.js';

// What the conditions of a bar begin with; the first values of sequences have none.
const MEASURES = { values: '', bytes: 'bytes', 'values per sequence': 'length' };
const CLASSES = 1000; // rows

/** A histogram, of intervals or of single values. A bar leads to the datapoints that it counts. */
export function histogram(key, chart) {
  const measure = MEASURES[chart.title];
  const pick = measure === undefined ? null : (...conditions) => only(conditions.map(([is, text]) => ({ key, is: `${measure}${is}`, text })));
  if (chart.exact) return frame(key, chart, rows(chart.bars, pick && ((value) => pick(['=', value]))));
  const round = (label) => `${Number(Number(label).toPrecision(6))}`;
  const text = chart.title.startsWith('bytes') ? (label) => bytes(Math.round(Number(label))) : round;
  const most = Math.max(1, ...chart.bars.map((bar) => bar[2]));
  const width = 300 / Math.max(chart.bars.length, 4);
  const columns = chart.bars.map(([low, high, number], i) => {
    const height = number ? Math.max(2, (number / most) * 92) : 0;
    const name = `${text(low)} to ${text(high)}: ${count(number)}`;
    const chosen = () => pick(['>=', low], [i === chart.bars.length - 1 ? '<=' : '<', high]);
    return s('g', {
      class: 'column', 'aria-label': name, ...(pick && {
        tabindex: 0, role: 'button', onclick: chosen, onkeydown: (event) => { if (event.key === 'Enter') chosen(); },
      }),
    }, s('title', {}, name), s('rect', { x: i * width, width, height: 96, opacity: 0 }),
    s('rect', { x: i * width + 1, y: 96 - height, width: Math.max(1, width - 2), height, rx: 1.5 }));
  });
  const first = chart.bars[0];
  const last = chart.bars.at(-1);
  const notes = [chart.mean ? `mean ${chart.title.startsWith('bytes') ? bytes(Math.round(Number(chart.mean))) : chart.mean}` : '',
    ...Object.entries(chart.padding || {}).map(([plan, part]) => `${part} padding in ${plan}`),
    chart.strange ? `${count(chart.strange)} not finite` : ''].filter(Boolean);
  return frame(key, chart,
    s('svg', { viewBox: '0 0 300 96', preserveAspectRatio: 'none', role: 'img', 'aria-label': `${chart.title} of ${key}` }, columns),
    h('div', { class: 'axis' }, h('span', {}, first ? text(first[0]) : ''), h('span', {}, last ? text(last[1]) : '')),
    notes.length ? h('p', { class: 'note' }, notes.join(' · ')) : null);
}

const frame = (key, chart, ...content) => h('figure', { class: 'chart', 'data-key': key },
  h('header', {}, h('b', { title: key }, key), h('span', { class: 'soft' }, chart.title)), content);

/** Single values or classes with their numbers. */
export function rows(bars, pick) {
  const most = Math.max(1, ...bars.map((bar) => bar[2]));
  return h('ol', { class: 'counts' }, bars.slice(0, CLASSES).map(([value, , number, name]) => h('li', {},
    h('button', { type: 'button', class: 'quiet', disabled: !pick, title: `Show the ${count(number)}`, onclick: () => pick(value) },
      h('span', { class: 'name' }, name || value || 'empty', name ? h('span', { class: 'soft' }, ` ${value}`) : null), share(number, most), count(number)))),
  bars.length > CLASSES ? h('li', { class: 'soft' }, `and ${count(bars.length - CLASSES)} more`) : null);
}

/** The share of a whole as a line. */
export function share(part, whole) {
  return s('svg', { class: 'share', viewBox: '0 0 100 8', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    s('rect', { width: 100, height: 8, rx: 2 }),
    s('rect', { width: whole ? (part / whole) * 100 : 0, height: 8, rx: 2 }));
}

/** The shards as bars of their datapoints; neighbours share a bar if there are many. */
export function shards(lengths, sizes) {
  const group = Math.ceil(lengths.length / 200);
  const bars = [];
  for (let start = 0; start < lengths.length; start += group) {
    const sum = (list) => list.slice(start, start + group).reduce((total, one) => total + one, 0);
    bars.push({ start, stop: Math.min(start + group, lengths.length) - 1, length: sum(lengths), size: sum(sizes) });
  }
  const most = Math.max(1, ...bars.map((bar) => bar.length));
  const width = 1000 / Math.max(bars.length, 12);
  return s('svg', { class: 'shards', viewBox: '0 0 1000 70', preserveAspectRatio: 'none', role: 'img', 'aria-label': 'Datapoints by shard' },
    bars.map((bar, i) => {
      const height = bar.length ? Math.max(1, (bar.length / most) * 70) : 0;
      const name = bar.start === bar.stop ? `shard ${bar.start}` : `shards ${bar.start} to ${bar.stop}`;
      return s('rect', { x: i * width, y: 70 - height, width: Math.max(1, width - 2), height },
        s('title', {}, `${name}: ${count(bar.length)} datapoints, ${bytes(bar.size)}`));
    }));
}
