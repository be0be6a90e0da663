// Fetches the page every few seconds and replaces the sections that changed.
'use strict';

const EVERY_MS = 3000;

function replace(fresh) {
  for (const section of fresh.querySelectorAll('section')) {
    const old = document.getElementById(section.id);
    const opened = [...old.querySelectorAll('details[open]')].map((x) => x.id);
    for (const id of opened) section.querySelector('#' + id)?.setAttribute('open', '');
    if (old.outerHTML !== section.outerHTML) old.replaceWith(section);
  }
}

async function renew() {
  try {
    const found = await fetch(location.href, {cache: 'no-store'});
    if (!found.ok) throw new Error(found.status);
    clear();
    replace(new DOMParser().parseFromString(await found.text(), 'text/html'));
    document.getElementById('gone').hidden = true;
  } catch (error) {
    document.getElementById('gone').hidden = false;
  }
  setTimeout(renew, EVERY_MS);
}

function clear() {
  for (const cursor of document.querySelectorAll('.cursor')) cursor.remove();
}

function node(name, attributes, text) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text ?? '';
  return made;
}

// The value below the pointer.
document.addEventListener('pointermove', (event) => {
  clear();
  const chart = event.target.closest?.('.chart');
  if (!chart || !chart.dataset.points) return;
  const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
  const points = chart.dataset.points.split(' ').map((x) => x.split(','));
  const apart = (point) => Math.abs(point[0] - place.x);
  const [x, y, at, value] = points.reduce((a, b) => (apart(b) < apart(a) ? b : a));
  const [top, bottom, left, right] = chart.dataset.box.split(',').map(Number);
  const after = x < (left + right) / 2;
  const cursor = node('g', {class: 'cursor'});
  cursor.append(
    node('path', {d: `M${x} ${top}V${bottom}`}),
    node('circle', {cx: x, cy: y, r: 3}),
    node('text', {x: Number(x) + (after ? 6 : -6), y: top + 8, style: `text-anchor: ${after ? 'start' : 'end'}`},
      `${value} at ${at}`),
  );
  chart.append(cursor);
});

setTimeout(renew, EVERY_MS);
