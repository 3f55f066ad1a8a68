// A list of which only the visible items are elements: tiles, or rows of a table.

const SPARE = 3; // rows beyond each edge

export class List {
  /**
   * @param options length, tile (pixels of a tile, or 0 for rows), height (of a row), head (pixels),
   *   render(position), seen(first, last), picked(position)
   */
  constructor(scroller, canvas, options) {
    Object.assign(this, { scroller, canvas, ...options });
    this.items = new Map();
    this.selected = -1;
    this.columns = 1;
    this.listeners = new AbortController();
    const { signal } = this.listeners;
    scroller.addEventListener('scroll', () => this.later(), { signal, passive: true });
    canvas.addEventListener('click', (event) => {
      const item = event.target.closest('.item');
      if (item) this.picked(Number(item.dataset.position));
    }, { signal });
    this.observer = new ResizeObserver(() => this.layout());
    this.observer.observe(scroller);
    this.layout();
  }

  layout() {
    const middle = this.selected >= 0 && this.isVisible(this.selected);
    const width = this.scroller.clientWidth - (this.tile ? 16 : 0);
    this.columns = this.tile ? Math.max(1, Math.floor(width / this.tile)) : 1;
    this.width = this.tile ? Math.floor(width / this.columns) : 0;
    this.step = this.tile ? Math.round(this.width * 0.86) + 46 : this.height;
    this.canvas.style.height = `${Math.ceil(this.length / this.columns) * this.step + (this.tile ? 16 : 0)}px`;
    for (const item of this.items.values()) item.remove();
    this.items.clear();
    if (middle) this.reveal(this.selected);
    this.draw();
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  bounds() {
    const top = this.scroller.scrollTop;
    const bottom = top + this.scroller.clientHeight - this.head;
    return [Math.floor(top / this.step), Math.ceil(bottom / this.step)];
  }

  draw() {
    if (!this.step) return;
    const [top, bottom] = this.bounds();
    const first = Math.max(0, (top - SPARE) * this.columns);
    const last = Math.min(this.length, (bottom + SPARE) * this.columns) - 1;
    for (const [position, item] of this.items) {
      if (position < first || position > last) {
        item.remove();
        this.items.delete(position);
      }
    }
    for (let position = first; position <= last; position += 1) {
      if (!this.items.has(position)) this.place(position);
    }
    if (last >= first) {
      const from = Math.min(Math.max(0, top * this.columns), this.length - 1);
      this.seen(from, Math.max(from, Math.min(this.length, bottom * this.columns) - 1));
    }
  }

  place(position) {
    const item = this.render(position);
    const column = position % this.columns;
    const row = Math.floor(position / this.columns);
    item.classList.add('item');
    item.dataset.position = position;
    item.id = `item-${position}`;
    item.setAttribute('role', 'option');
    item.setAttribute('aria-selected', `${position === this.selected}`);
    item.style.transform = `translate(${column * this.width + (this.tile ? 8 : 0)}px, ${row * this.step + (this.tile ? 8 : 0)}px)`;
    if (this.tile) item.style.width = `${this.width}px`;
    item.style.height = `${this.step}px`;
    const old = this.items.get(position);
    if (old) old.replaceWith(item);
    else this.canvas.append(item);
    this.items.set(position, item);
  }

  /** Show items again whose data has changed. */
  refresh(first, last) {
    for (const position of this.items.keys()) if (position >= first && position <= last) this.place(position);
  }

  isVisible(position) {
    if (!this.step) return false;
    const [top, bottom] = this.bounds();
    const row = Math.floor(position / this.columns);
    return row >= top && row < bottom;
  }

  select(position) {
    const before = this.items.get(this.selected);
    before?.setAttribute('aria-selected', 'false');
    this.selected = position;
    this.reveal(position);
    this.items.get(position)?.setAttribute('aria-selected', 'true');
    this.scroller.setAttribute('aria-activedescendant', `item-${position}`);
  }

  /** Scroll so far that an item is seen. */
  reveal(position) {
    const top = Math.floor(position / this.columns) * this.step;
    const height = this.scroller.clientHeight - this.head - (this.tile ? 16 : 0);
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + this.step > this.scroller.scrollTop + height) this.scroller.scrollTop = top + this.step - height;
    this.draw();
  }

  end() {
    this.listeners.abort();
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }
}
