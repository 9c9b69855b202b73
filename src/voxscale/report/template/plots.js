// Curves and points over two axes: drag to zoom, double-click to see all, a tip at the nearest point; keys do the same.

const HEIGHT = 258;

function drawPlot(block) {
  const box = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${block.title}: plus and minus zoom, arrows move, 0 shows all` });
  const state = { zoom: null, hidden: new Set(), width: 0, full: null };
  const reset = element("button", { class: "plot-reset", hidden: true, onclick: () => zoomTo(null) }, "Show all");
  const redraw = () => {
    if (state.width) box.replaceChildren(plotSvg(block, state, box, zoomTo), reset);
  };
  function zoomTo(zoom) {
    state.zoom = zoom;
    reset.hidden = zoom === null;
    hideTip();
    redraw();
  }
  box.addEventListener("keydown", (event) => keyZoom(event, state, zoomTo));
  watchWidth(box, (width) => {
    state.width = width;
    redraw();
  });
  return card(block, box, block.series.length > 1 ? plotLegend(block, state, redraw) : null);
}

// By how much of what is shown each key moves the left and the right end.
const KEYS = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] };

function keyZoom(event, state, zoomTo) {
  if (isShortcut(event) || event.target !== event.currentTarget) return;
  if (event.key === "0" || event.key === "Escape") zoomTo(null);
  else if (event.key in KEYS && state.full) {
    const { area, x } = state.view;
    const ends = [area.left, area.right].map((end, at) => x.back(end + KEYS[event.key][at] * (area.right - area.left)));
    const [low, high] = [Math.max(ends[0], state.full[0]), Math.min(ends[1], state.full[1])];
    const isAll = low <= state.full[0] && high >= state.full[1];
    if (low < high) zoomTo(isAll ? null : { x: [low, high], y: null });
  } else return;
  event.preventDefault();
}

function plotLegend(block, state, redraw) {
  const keys = block.series.map((series, index) => {
    const button = element("button", { type: "button", "aria-pressed": "true" });
    button.append(swatch(swatchOf(block, index)), series.name);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      redraw();
    });
    return button;
  });
  return element("div", { class: "legend", role: "group", "aria-label": "Curves shown" }, ...keys);
}

function seriesColour(block, index) {
  return block.series[index].kind === "guide" ? "var(--c7)" : colour(block.series[index].colour);
}

// Where colours come round again, lines are dashed.
function isDashed(block, index) {
  return block.series[index].colour >= COLOURS && block.series[index].kind !== "guide";
}

function swatchOf(block, index) {
  const own = seriesColour(block, index);
  return isDashed(block, index) ? `repeating-linear-gradient(90deg, ${own} 0 4px, transparent 4px 6px)` : own;
}

function plotSvg(block, state, box, zoomTo) {
  const height = block.square ? Math.min(340, Math.max(HEIGHT, state.width * 0.6)) : HEIGHT;
  const area = { left: 52, right: state.width - 12, top: 22, bottom: height - 40 };
  const shown = block.series.map((series, index) => ({ ...series, index })).filter((each) => !state.hidden.has(each.index));
  const [xRange, yRange] = ranges(block, shown, state.zoom);
  const x = scaled(xRange, [area.left, area.right], block.logX);
  const y = scaled(yRange, [area.bottom, area.top], false);
  state.view = { area, x };
  if (!state.zoom) state.full = xRange;
  const id = `clip-${(drawPlot.count = (drawPlot.count || 0) + 1)}`;
  const svg = drawn("svg", { height, viewBox: `0 0 ${state.width} ${height}`, role: "img", "aria-label": block.title });
  svg.append(
    drawn("clipPath", { id }, drawn("rect", { x: area.left - 5, y: area.top - 5, width: area.right - area.left + 10, height: area.bottom - area.top + 10 })),
    ...axes(block, area, x, y, xRange, yRange),
  );
  const inside = drawn("g", { "clip-path": `url(#${id})` });
  if (Number.isFinite(block.mark)) {
    inside.append(drawn("line", { class: "mark", x1: x(block.mark), x2: x(block.mark), y1: area.top, y2: area.bottom }));
  }
  for (const series of shown) inside.append(...seriesMarks(block, series, x, y));
  svg.append(inside);
  listen(svg, block, shown, { area, x, y, box, zoomTo });
  return svg;
}

function ranges(block, shown, zoom) {
  const real = shown.some((each) => each.kind !== "guide") ? shown.filter((each) => each.kind !== "guide" || block.square || block.withGuide) : shown;
  const xRange = zoom ? zoom.x : block.xRange || extent(real.flatMap((each) => each.x), 0.02, block.logX, block.whole);
  if (zoom && zoom.y) return [xRange, zoom.y];
  if (block.yRange && !zoom) return [xRange, padded(block.yRange, 0.02)];
  const visible = real.flatMap((each) => each.y.filter((_, at) => each.x[at] >= xRange[0] && each.x[at] <= xRange[1]));
  const yRange = extent(visible.length ? visible : real.flatMap((each) => each.y), 0.06, false);
  return [xRange, block.fromZero ? [Math.min(0, yRange[0]), yRange[1]] : yRange];
}

function extent(values, share, log, whole = false) {
  const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  if (!known.length) return [0, 1];
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  if (low === high && whole) return [low - 1, high + 1];
  if (low === high) return log ? [low / 2, high * 2] : padded([low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)], 0);
  if (log) return [low / (high / low) ** share, high * (high / low) ** share];
  return padded([low, high], share);
}

function padded([low, high], share) {
  return [low - (high - low) * share, high + (high - low) * share];
}

function scaled([low, high], [from, to], log) {
  const turn = log ? Math.log10 : (value) => value;
  const [a, b] = [turn(low), turn(high)];
  const scale = (value) => from + ((turn(value) - a) / (b - a || 1)) * (to - from);
  scale.back = (at) => {
    const value = a + ((at - from) / (to - from)) * (b - a);
    return log ? 10 ** value : value;
  };
  return scale;
}

function axes(block, area, x, y, xRange, yRange) {
  const parts = [];
  const across = block.choices || (block.logX ? logTicks(...xRange) : ticks(...xRange, Math.max(2, (area.right - area.left) / 90), block.whole));
  let last = -Infinity;
  const acrossTexts = block.logX ? across.map(format) : tickTexts(across);
  for (const [number, at] of across.entries()) {
    const place = x(at);
    if (place < area.left - 1 || place > area.right + 1) continue;
    parts.push(drawn("line", { class: "grid-line", x1: place, x2: place, y1: area.top, y2: area.bottom }));
    const text = acrossTexts[number];
    if (place - last < text.length * 6.5 + 10) continue;
    last = place;
    const anchor = place > area.right - 16 ? "end" : "middle";
    parts.push(drawn("text", { x: anchor === "end" ? area.right + 8 : place, y: area.bottom + 16, "text-anchor": anchor }, text));
  }
  const upwards = ticks(...yRange, 5);
  const upwardsTexts = tickTexts(upwards);
  for (const [number, at] of upwards.entries()) {
    const place = y(at);
    if (place < area.top - 1 || place > area.bottom + 1) continue;
    parts.push(drawn("line", { class: "grid-line", x1: area.left, x2: area.right, y1: place, y2: place }));
    parts.push(drawn("text", { x: area.left - 8, y: place + 4, "text-anchor": "end" }, upwardsTexts[number]));
  }
  parts.push(drawn("text", { class: "axis-name", x: (area.left + area.right) / 2, y: area.bottom + 34, "text-anchor": "middle" }, block.x));
  parts.push(drawn("text", { class: "axis-name", x: 2, y: 9 }, block.y));
  return parts;
}

function seriesMarks(block, series, x, y) {
  const stroke = seriesColour(block, series.index);
  const marks = [];
  const dashed = isDashed(block, series.index) ? "7 4" : null;
  const line = (ys, kind) => paint(drawn("path", { class: `curve ${kind}`, d: pathOf(series.x, ys, x, y, series.kind === "step"), "stroke-dasharray": dashed }), "stroke", stroke);
  if (series.kind !== "points") {
    const smooth = series.smooth && series.x.length > 20;
    if (smooth) marks.push(line(series.y, "raw"));
    marks.push(line(smooth ? smoothed(series.y) : series.y, series.kind));
  }
  if (series.kind === "points" || series.kind === "both" || series.x.length === 1) {
    const radius = series.x.length > 400 ? 2 : series.kind === "both" ? 3 : 4;
    series.x.forEach((value, at) => {
      marks.push(paint(drawn("circle", { class: "dot", cx: x(value), cy: y(series.y[at]), r: radius }), "fill", stroke));
    });
  }
  return marks;
}

function pathOf(xs, ys, x, y, stepped) {
  let path = "";
  xs.forEach((value, at) => {
    const [px, py] = [x(value).toFixed(1), y(ys[at]).toFixed(1)];
    path += at === 0 ? `M${px} ${py}` : stepped ? `H${px}V${py}` : `L${px} ${py}`;
  });
  return path;
}

// A running mean to both sides, over a twentieth of the curve.
function smoothed(values) {
  const reach = Math.max(1, Math.round(values.length / 40));
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, at) => {
    const [from, to] = [Math.max(0, at - reach), Math.min(values.length, at + reach + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

function listen(svg, block, shown, { area, x, y, box, zoomTo }) {
  let start = null;
  const place = (event) => {
    const bounds = svg.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  };
  const frame = drawn("rect", { class: "zoom", visibility: "hidden" });
  const cursor = drawn("line", { class: "cursor", visibility: "hidden", y1: area.top, y2: area.bottom });
  svg.append(frame, cursor);
  const dragged = (from, to) => {
    const tall = Math.abs(to[1] - from[1]) > 24;
    const [left, right] = [Math.max(area.left, Math.min(from[0], to[0])), Math.min(area.right, Math.max(from[0], to[0]))];
    const [top, bottom] = tall ? [Math.max(area.top, Math.min(from[1], to[1])), Math.min(area.bottom, Math.max(from[1], to[1]))] : [area.top, area.bottom];
    return { left, right, top, bottom, tall };
  };
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = place(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (start && Math.abs(at[0] - start[0]) > 4) {
      const span = dragged(start, at);
      filled(frame, { x: span.left, y: span.top, width: Math.max(0, span.right - span.left), height: Math.max(0, span.bottom - span.top), visibility: "visible" }, []);
      hideTip();
      return;
    }
    const near = nearest(shown, x, y, at);
    cursor.setAttribute("visibility", near ? "visible" : "hidden");
    if (!near) return hideTip();
    filled(cursor, { x1: near.x, x2: near.x }, []);
    showTip(box, tipText(block, shown, near), near.x, Math.max(40, at[1]));
  });
  svg.addEventListener("pointerup", (event) => {
    const at = place(event);
    if (start && Math.abs(at[0] - start[0]) > 12) {
      const span = dragged(start, at);
      zoomTo({ x: [x.back(span.left), x.back(span.right)], y: span.tall ? [y.back(span.bottom), y.back(span.top)] : null });
    }
    start = null;
    frame.setAttribute("visibility", "hidden");
  });
  svg.addEventListener("pointercancel", () => {
    start = null; // a finger that scrolls the page
    frame.setAttribute("visibility", "hidden");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  });
  svg.addEventListener("dblclick", () => zoomTo(null));
}

function nearest(shown, x, y, [px, py]) {
  let best = null;
  for (const series of shown) {
    if (series.kind === "guide") continue;
    series.x.forEach((value, at) => {
      const [sx, sy] = [x(value), y(series.y[at])];
      const distance = Math.abs(sx - px) + (series.kind === "points" ? Math.abs(sy - py) : Math.abs(sy - py) / 1000);
      if (!best || distance < best.distance) best = { distance, series, at, value, x: sx, y: sy };
    });
  }
  return best && best.distance < 60 ? best : null;
}

function tipText(block, shown, near) {
  if (near.series.kind === "points") {
    const name = near.series.tips ? `${near.series.tips[near.at]}\n` : "";
    return `${name}${block.x}: ${format(near.value)}\n${block.y}: ${format(near.series.y[near.at])}`;
  }
  const lines = [`${block.x} ${format(near.value)}`];
  for (const series of shown) {
    if (series.kind === "guide") continue;
    const at = series.kind === "step" ? series.x.findLastIndex((value) => value <= near.value) : series.x.indexOf(near.value);
    if (at >= 0) lines.push(`${series.name}: ${format(series.y[at])}${series.tips ? ` (${series.tips[at]})` : ""}`);
  }
  return lines.slice(0, 14).join("\n");
}
