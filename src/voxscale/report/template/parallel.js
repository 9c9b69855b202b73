// Parallel coordinates: a line for each trial across its fields, coloured by how good it is.

const APART = 14; // pixels between the numbers of an axis

function drawParallel(block) {
  const box = element("div", { class: "parallel plot" });
  watchWidth(box, (width) => box.replaceChildren(parallelSvg(block, width, box)));
  const good = block.minimal ? "low" : "high";
  const made = card({ ...block, note: `Blue lines are the best trials (${good} ${block.axes[block.axes.length - 1].name}), orange the others.` }, box);
  made.classList.add("wide");
  return made;
}

function parallelSvg(block, width, box) {
  const height = 300;
  const [top, bottom, left, right] = [44, height - 16, 56, width - 64];
  const svg = drawn("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": block.title });
  const xs = block.axes.map((_, index) => left + ((right - left) * index) / Math.max(1, block.axes.length - 1));
  const axes = block.axes.map((axis) => parallelAxis(axis, top, bottom));
  const results = block.axes[block.axes.length - 1].values;
  const [low, high] = extent(results, 0, false);
  const goodness = (value) => (block.minimal ? (high - value) / (high - low || 1) : (value - low) / (high - low || 1));
  const lines = results.map((result, trial) => {
    const d = axes.map((axis, index) => `${index ? "L" : "M"}${xs[index].toFixed(1)} ${axis.place(block.axes[index].values[trial]).toFixed(1)}`).join("");
    const line = paint(drawn("path", { class: "curve", d }), "stroke", `color-mix(in oklab, var(--c0) ${Math.round(100 * goodness(result))}%, var(--c1))`);
    paint(line, "opacity", String(0.45 + 0.55 * goodness(result)));
    line.addEventListener("pointermove", (event) => {
      const bounds = svg.getBoundingClientRect();
      paint(line, "stroke-width", "4");
      const fields = block.axes.map((axis) => `${axis.name}: ${format(axis.values[trial])}`);
      showTip(box, [block.names[trial], ...fields].join("\n"), event.clientX - bounds.left, event.clientY - bounds.top);
    });
    line.addEventListener("pointerleave", () => {
      paint(line, "stroke-width", "2");
      hideTip();
    });
    return [goodness(result), line];
  });
  svg.append(...lines.sort((a, b) => a[0] - b[0]).map((each) => each[1]));
  axes.forEach((axis, index) => {
    const anchor = index === 0 ? "start" : index === axes.length - 1 ? "end" : "middle";
    const title = anchor === "start" ? 0 : anchor === "end" ? width : xs[index];
    svg.append(drawn("line", { class: "grid-line", x1: xs[index], x2: xs[index], y1: top, y2: bottom }));
    svg.append(drawn("text", { x: title, y: index % 2 && axes.length > 3 && width < 560 ? 32 : 16, "text-anchor": anchor }, block.axes[index].name));
    for (const at of axis.marks) {
      svg.append(drawn("text", { x: xs[index] + (index === axes.length - 1 ? 8 : -8), y: axis.place(at) + 4, "text-anchor": index === axes.length - 1 ? "start" : "end" }, format(at)));
    }
  });
  return svg;
}

function parallelAxis(axis, top, bottom) {
  if (!axis.number) {
    const names = [...new Set(axis.values)].sort();
    const place = (value) => bottom - ((names.indexOf(value) + 0.5) / names.length) * (bottom - top);
    return { place, marks: names };
  }
  const values = axis.values;
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const log = low > 0 && high / low > 20;
  const place = low === high ? () => (top + bottom) / 2 : scaled([low, high], [bottom, top], log);
  if (low === high) return { place, marks: [low] };
  const marks = [low];
  for (const at of axis.choices || (log ? logTicks(low, high) : ticks(low, high, 4, axis.whole))) {
    if (place(marks[marks.length - 1]) - place(at) > APART && place(at) - top > APART) marks.push(at);
  }
  return { place, marks: [...marks, high].map((at) => (axis.whole ? at : Number(at.toPrecision(3)))) };
}
