// What a dataset is made of: spec, sizes, shards and histograms.

import { get } from './api.js';
import { histogram, rows, shards, share } from './charts.js';
import { failure, h } from './dom.js';
import { only } from './filter.js';
import { bytes, count, some } from './format.js';

export function showAbout(main, dataset, tabs) {
  const charts = h('div', {}, h('p', { class: 'soft wait' }, 'Reading a sample …'));
  const name = dataset.url.split('/').filter(Boolean).at(-1);
  main.replaceChildren(h('div', { class: 'bar' }, tabs), h('div', { class: 'page', tabindex: 0 }, h('div', { class: 'about' },
    h('header', {}, h('h1', {}, name), h('p', { class: 'address' }, dataset.url)),
    cards(dataset),
    h('section', {}, h('h2', {}, 'Keys'), spec(dataset)),
    dataset.shards > 1 ? h('section', {}, h('h2', {}, 'Datapoints by shard'), shards(dataset.lengths, dataset.sizes)) : null,
    h('section', {}, h('h2', {}, 'Values'), charts))));
  sample(dataset, charts);
}

function cards(dataset) {
  const card = (name, value) => (value === null || value === undefined ? null : h('div', {}, h('dt', {}, name), h('dd', {}, value)));
  return h('dl', { class: 'cards' },
    card('kind', dataset.kind),
    card('datapoints', count(dataset.length)),
    card('bytes', dataset.bytes === null ? null : bytes(dataset.bytes)),
    card('bytes per datapoint', dataset.bytes === null || !dataset.length ? null : bytes(Math.round(dataset.bytes / dataset.length))),
    card('shards', dataset.shards ? count(dataset.shards) : null),
    card('layout', dataset.layout),
    card('version of the format', dataset.versions?.join(', ')));
}

function spec(dataset) {
  const sized = dataset.keys.every((row) => 'bytes' in row);
  return h('table', { class: 'shares' },
    h('thead', {}, h('tr', {}, h('th', {}, 'key'), h('th', {}, 'type'),
      sized ? [h('th', { class: 'right' }, 'records'), h('th', { class: 'right' }, 'bytes'), h('th', { class: 'wide' }, 'share')] : null)),
    h('tbody', {}, dataset.keys.map((row) => h('tr', {},
      h('td', { class: 'mono' }, row.key),
      h('td', {}, h('span', { class: 'chip', 'data-family': row.family }, row.type)),
      sized ? [
        h('td', { class: 'right' }, count(row.records)),
        h('td', { class: 'right' }, bytes(row.bytes)),
        h('td', { class: 'wide' }, share(row.bytes, dataset.bytes))] : null))));
}

async function sample(dataset, box) {
  try {
    const found = await get('histograms', { path: dataset.path });
    const all = found.sampled === found.length;
    const note = all ? `All ${some(found.length, 'datapoint')}.` : `A sample of ${count(found.sampled)} of ${count(found.length)} datapoints.`;
    const damaged = found.keys.filter((row) => row.damaged).map((row) => h('button', {
      type: 'button', class: 'bad', onclick: () => only([{ key: row.key, is: 'damaged', text: '' }]),
    }, `${row.key}: ${some(row.damaged, 'value is damaged', 'values are damaged')}`));
    const chartOf = (row, chart) => {
      const figure = histogram(row.key, chart);
      const countable = !all && chart.exact && chart.title === 'values';
      if (countable) figure.append(h('button', { type: 'button', class: 'count', onclick: () => countAll(dataset, row.key, figure) }, `Count all ${count(found.length)}`));
      return figure;
    };
    box.replaceChildren(
      h('p', { class: 'soft sampled' }, note),
      damaged.length ? h('p', {}, damaged) : '',
      h('div', { class: 'charts' }, found.keys.flatMap((row) => row.charts.map((chart) => chartOf(row, chart)))));
  } catch (error) {
    box.replaceChildren(failure(error));
  }
}

/** Count the classes of all datapoints, in steps, while they are seen. */
async function countAll(dataset, key, figure) {
  const note = h('p', { class: 'note' }, 'Counting …');
  figure.querySelector('button.count').replaceWith(note);
  const counts = new Map();
  try {
    for (let next = 0; next < dataset.length && figure.isConnected;) {
      const step = await get('search', { path: dataset.path, count: key, from: next });
      for (const [value, name, number] of step.counts) counts.set(value, [value, value, (counts.get(value)?.[2] ?? 0) + number, name]);
      next = step.next;
      note.textContent = `Counted in ${next < dataset.length ? `${count(next)} of ` : 'all '}${some(dataset.length, 'datapoint')}.`;
    }
    const bars = [...counts.values()].sort(([a], [b]) => a - b || (a < b ? -1 : 1));
    figure.querySelector('.counts').replaceWith(rows(bars, (text) => only([{ key, is: '=', text }])));
  } catch (error) {
    note.replaceWith(failure(error));
  }
}
