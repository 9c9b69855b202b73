// Elements, numbers and colours. Text only ever becomes text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function colour(index) {
  return `var(--c${index % COLOURS})`;
}

// Keys that are the browser's own.
function isShortcut(event) {
  return event.ctrlKey || event.metaKey || event.altKey;
}

function paint(node, property, value) {
  node.style.setProperty(property, value); // the style attribute itself is forbidden by the page's policy
  return node;
}

function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(size >= 1 && size < 10 ? 4 : size < 1 ? 3 : 4)));
}

// How many digits behind the point let numbers that stand above each other be compared; null: each as it is.
function digitsFor(values) {
  const sizes = values.filter((value) => Number.isFinite(value)).map(Math.abs);
  if (sizes.every(Number.isInteger)) return null;
  const most = sizes.reduce((a, b) => Math.max(a, b));
  const least = sizes.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), Infinity);
  if (most >= 1000 || least < 1e-3) return null;
  return most >= 100 ? 1 : most >= 10 ? 2 : 3;
}

function aligned(value, digits) {
  return digits === null || !Number.isFinite(value) ? format(value) : value.toFixed(digits);
}

function card(block, ...children) {
  const title = block.title ? element("h3", {}, block.title) : null;
  const note = block.note ? element("p", { class: "note" }, block.note) : null;
  return element("section", { class: `card ${block.type}-card` }, title, ...children, note);
}

function swatch(paintWith, shape = "") {
  return paint(element("span", { class: `swatch ${shape}`, "aria-hidden": "true" }), "background", paintWith);
}

// Numbers that people like to read, between two ends.
function ticks(low, high, count, whole = false) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const nice = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  // Numbers that lie closer are not told apart: adding such a step would lead nowhere.
  const least = 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const step = Math.max(nice, least, whole ? 1 : 0);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
}

// Ticks of one axis as text, all with as many digits as the one that needs most.
function tickTexts(values) {
  const digits = values.reduce((most, value) => Math.max(most, (String(value).split(".")[1] || "").length), 0);
  const plain = digits < 6 && values.every((value) => Math.abs(value) < 1e6 && !String(value).includes("e"));
  return values.map((value) => (plain ? value.toLocaleString("en", { minimumFractionDigits: digits }) : format(value)));
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of high / low > 300 ? [1] : [1, 2, 5]) found.push(Number((factor * 10 ** power).toPrecision(3)));
  }
  return found.filter((at) => at >= low * 0.999 && at <= high * 1.001);
}

function watchWidth(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(node.clientWidth);
    if (now > 0 && now !== width) {
      width = now;
      draw(now);
    }
  }).observe(node);
}

const tip = element("div", { class: "tip", role: "status", hidden: true });

function showTip(host, text, x, y) {
  if (tip.parentNode !== host) host.append(tip);
  tip.textContent = text;
  tip.hidden = false;
  const room = host.clientWidth - tip.offsetWidth;
  paint(tip, "left", `${Math.max(0, Math.min(room, x + 14))}px`);
  paint(tip, "top", `${Math.max(0, y - tip.offsetHeight - 10)}px`);
}

function hideTip() {
  tip.hidden = true;
}
