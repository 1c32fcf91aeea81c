'use strict';
(() => {
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  document.body.append(tip);
  let lit = null;

  const rows = new Map();
  const table = document.getElementById('weights-table');
  if (table) for (const row of table.tBodies[0].rows) rows.set(row.dataset.index, row);
  const marks = [...document.querySelectorAll('.mark[data-row]')];
  const marked = new Set(marks.map((mark) => mark.dataset.row));

  function words(mark) {
    if (mark.dataset.tip) return [mark.dataset.tip];
    const row = rows.get(mark.dataset.row);
    if (!row) return [];
    const [name, shape, encoding, before, after, zeros, noise] = [...row.cells].map((cell) => cell.textContent);
    const lines = [name, `${shape}, ${encoding}`, `${before} \u2192 ${after}, ${zeros} zeros`];
    if (noise !== '-') lines.push(noise);
    return lines;
  }

  function light(mark) {
    if (lit === mark) return;
    if (lit) lit.classList.remove('on');
    lit = mark;
    if (lit) lit.classList.add('on');
  }

  function tell(lines, x, y) {
    tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement('div'), { textContent: line })));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x - box.width / 2), document.documentElement.clientWidth - box.width - 8);
    const top = y - box.height - 14 < 8 ? y + 18 : y - box.height - 14;
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  }

  function nearest(plot, x, y) {
    const box = plot.querySelector('svg').getBoundingClientRect();
    const at = ((x - box.left) / box.width) * 1000;
    let best = null;
    let distance = Infinity;
    for (const mark of plot.querySelectorAll('.mark')) {
      if (mark.classList.contains('dim')) continue;
      const path = mark.querySelector('path:last-child').getAttribute('d');
      const top = (parseFloat(path.split(' ')[1]) / 1000) * box.height + box.top;
      const found = Math.abs(parseFloat(mark.getAttribute('transform').slice(10)) - at) + Math.abs(top - y) / 1000;
      if (found < distance) [best, distance] = [mark, found];
    }
    return best;
  }

  function follow(event) {
    const plot = event.target.closest?.('.nearest .area');
    const plain = event.target.closest?.('[data-tip]');
    const mark = plot ? nearest(plot, event.clientX, event.clientY) : null;
    light(mark);
    if (mark) tell(words(mark), event.clientX, event.clientY);
    else if (plain && !plain.closest('.mark')) tell([plain.dataset.tip], event.clientX, event.clientY);
    else tip.hidden = true;
  }
  document.addEventListener('pointermove', follow);
  document.addEventListener('pointerdown', follow);
  document.addEventListener('scroll', () => { tip.hidden = true; }, { passive: true });

  if (!table) return;
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll('[data-column]')];
  const orders = [...document.querySelectorAll('[data-order]')];
  let sorted = { column: 0, down: false };

  function value(row, column) {
    if (column === 0) return Number(row.dataset.index);
    const cell = row.cells[column];
    if (column === 2) return cell.textContent;
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  }

  function sort(column, down) {
    sorted = { column, down };
    const list = [...rows.values()].map((row) => [value(row, column), row]);
    list.sort(([a, left], [b, right]) => {
      // What has no figure comes last in either direction.
      if (a === null || b === null) return (a === null) - (b === null) || left.dataset.index - right.dataset.index;
      const order = a < b ? -1 : a > b ? 1 : 0;
      return (down ? -order : order) || left.dataset.index - right.dataset.index;
    });
    body.append(...list.map(([, row]) => row));
    const drawn = list.filter(([, row]) => marked.has(row.dataset.index));
    const place = new Map(drawn.map(([, row], index) => [row.dataset.index, index]));
    const step = 1000 / drawn.length;
    for (const mark of marks) mark.setAttribute('transform', `translate(${((place.get(mark.dataset.row) + 0.5) * step).toFixed(2)} 0)`);
    for (const head of heads) {
      const own = Number(head.dataset.column) === column;
      head.parentElement.setAttribute('aria-sort', own ? (down ? 'descending' : 'ascending') : 'none');
    }
    for (const order of orders) order.setAttribute('aria-pressed', String(Number(order.dataset.order) === column));
  }

  // Small figures of signal to noise are what one looks for, and large ones of everything else.
  const first = (column) => column !== 6 && column > 0 && column !== 2;
  for (const head of heads) {
    head.addEventListener('click', () => {
      const column = Number(head.dataset.column);
      sort(column, sorted.column === column ? !sorted.down : first(column));
    });
  }
  for (const order of orders) {
    order.addEventListener('click', () => sort(Number(order.dataset.order), first(Number(order.dataset.order))));
  }

  const filter = document.querySelector('[data-filter]');
  filter.addEventListener('input', () => {
    const wanted = filter.value.toLowerCase();
    const shown = new Set();
    for (const [index, row] of rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
      if (!row.hidden) shown.add(index);
    }
    for (const mark of marks) mark.classList.toggle('dim', !shown.has(mark.dataset.row));
  });
})();
