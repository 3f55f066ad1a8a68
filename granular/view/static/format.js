// Numbers and sizes as people read them.

const plain = new Intl.NumberFormat('en-US');

export const count = (number) => plain.format(number);

export const some = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  const units = ['kB', 'MB', 'GB', 'TB', 'PB'];
  let unit = -1;
  do { size /= 1000; unit += 1; } while (size >= 999.5 && unit < units.length - 1);
  return `${size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}
