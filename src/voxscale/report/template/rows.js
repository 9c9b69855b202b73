// What is read line by line: headline figures, intervals, spreads over cases, shares, a confusion matrix.

function drawFacts(block) {
  const tiles = block.facts.map((fact) =>
    element("div", { class: "fact" }, element("span", {}, fact.label), element("b", { class: fact.value.length > 10 ? "long" : null }, fact.value), element("span", {}, fact.note)),
  );
  return element("div", { class: "facts" }, ...tiles);
}

function drawIntervals(block) {
  const groups = element("div", { class: "groups" });
  block.groups.forEach((group, index) => {
    const list = element("div", { class: "rows" });
    groups.append(list);
    const about = [group.unit, group.low ? "less is better" : ""].filter(Boolean).join(", ");
    list.append(element("div", { class: "group" }, group.metric + (about ? ` (${about})` : "")));
    const ends = group.rows.flatMap((row) => [row.low, row.high, row.mean]);
    const isShare = ends.every((value) => value >= 0 && value <= 1);
    const range = isShare ? [0, 1] : fromZero(ends);
    for (const row of group.rows) list.append(...intervalRow(row, range, colour(index), digitsFor(ends)));
  });
  const made = card(block, groups);
  if (block.groups.length > 2) made.classList.add("wide");
  return made;
}

function intervalRow(row, range, paintWith, digits, guide = null) {
  const at = (value) => `${(100 * (value - range[0])) / (range[1] - range[0] || 1)}%`;
  const svg = drawn("svg", { role: "img", "aria-label": `${row.name}: ${aligned(row.mean, digits)}, ${aligned(row.low, digits)} to ${aligned(row.high, digits)}` });
  svg.append(drawn("line", { class: "track", x1: "0%", x2: "100%", y1: 12, y2: 12 }));
  if (guide !== null) svg.append(drawn("line", { class: "spread-line", x1: at(guide), x2: at(guide), y1: 0, y2: 24 }));
  svg.append(
    paint(drawn("line", { class: "whisker", x1: at(row.low), x2: at(row.high), y1: 12, y2: 12 }), "stroke", paintWith),
    paint(drawn("circle", { cx: at(row.mean), cy: 12, r: 5 }), "fill", paintWith),
  );
  const value = element("div", { class: "value" }, aligned(row.mean, digits), " ", element("small", {}, `${aligned(row.low, digits)} – ${aligned(row.high, digits)}`));
  return [element("div", { class: "name" }, row.name), svg, value];
}

function drawOverTime(block) {
  const list = element("div", { class: "rows" });
  const range = [Math.min(0.3, ...block.rows.map((row) => row.low)), 1];
  for (const row of block.rows) list.append(...intervalRow(row, range, colour(0), 3, block.chance));
  return card({ ...block, note: "The thin line is chance." }, list);
}

function drawSpread(block) {
  const list = element("div", { class: "rows spread" });
  const all = block.groups.flatMap((group) => group.values);
  const range = block.share ? [0, 1] : fromZero(all);
  const at = (value) => `${(100 * (value - range[0])) / (range[1] - range[0] || 1)}%`;
  const digits = digitsFor(all);
  block.groups.forEach((group) => {
    const index = group.index;
    const sorted = [...group.values].sort((a, b) => a - b);
    const [low, middle, high] = [0.25, 0.5, 0.75].map((share) => quantile(sorted, share));
    const svg = drawn("svg", { role: "img", "aria-label": `${group.name}: median ${format(middle)} of ${sorted.length} cases` });
    svg.append(
      drawn("line", { class: "track", x1: "0%", x2: "100%", y1: 12, y2: 12 }),
      paint(drawn("rect", { class: "box", x: at(low), width: at(range[0] + high - low), y: 2, height: 20, rx: 3 }), "fill", colour(index)),
    );
    group.values.forEach((value, number) => {
      const dot = paint(drawn("circle", { class: "dot", cx: at(value), cy: 12 + jitter(number), r: 4 }), "fill", colour(index));
      dot.append(drawn("title", {}, `${group.cases[number]}: ${format(value)}`));
      svg.append(dot);
    });
    svg.append(paint(drawn("line", { class: "median", x1: at(middle), x2: at(middle), y1: 1, y2: 23 }), "stroke", colour(index)));
    const value = element("div", { class: "value" }, aligned(middle, digits), " ", element("small", {}, "median"));
    list.append(element("div", { class: "name" }, group.name), svg, value);
  });
  const scale = element("div", { class: "ends" }, ...range.map((end) => element("span", {}, format(end))));
  list.append(element("div"), scale, element("div"));
  return card(block, list, element("p", { class: "note" }, "Each dot is a case; the box holds the middle half."));
}

function fromZero(values) {
  const [low, high] = extent([...values, 0], 0.03, false);
  return values.every((value) => value >= 0) ? [0, high] : [low, high];
}

function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const below = Math.floor(at);
  return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
}

function jitter(number) {
  return ((number * 5) % 9) - 4;
}

function drawBars(block) {
  const names = [...new Set(block.bars.flatMap((bar) => bar.parts.map((part) => part.name)))];
  const list = element("div", { class: "bars" });
  for (const bar of block.bars) {
    const stack = element("div", { class: "stack", role: "img", "aria-label": bar.parts.map((part) => `${part.name} ${part.text}`).join(", ") });
    for (const part of bar.parts) {
      const piece = element("div", { title: `${part.name}: ${part.text}` });
      paint(piece, "width", `${100 * part.share}%`);
      paint(piece, "background", colour(names.indexOf(part.name)));
      stack.append(piece);
    }
    const parts = bar.parts.length > 1 ? element("div", { class: "legend" }, ...bar.parts.map((part) => barKey(part, names))) : null;
    list.append(element("p", {}, bar.name), stack);
    if (parts) {
      stack.after(parts);
      paint(stack, "margin-bottom", "0.2rem");
      paint(parts, "margin", "0 0 .8rem");
    }
  }
  return card(block, list);
}

function barKey(part, names) {
  return element("span", { class: "key" }, swatch(colour(names.indexOf(part.name)), "block"), `${part.name} ${part.text}`);
}

function drawMatrix(block) {
  const most = Math.max(1, ...block.cells.flat());
  const table = element("table", { class: "matrix" }, element("caption", {}, "Rows are true classes, columns predicted ones."));
  table.append(element("thead", {}, element("tr", {}, element("th", {}), ...block.names.map((name) => element("th", { scope: "col" }, name)))));
  const body = element("tbody");
  block.cells.forEach((row, index) => {
    const whole = row.reduce((a, b) => a + b, 0) || 1;
    const cells = row.map((count, column) => {
      const cell = element("td", {}, element("b", {}, format(count)), `${Math.round((100 * count) / whole)} %`);
      return paint(cell, "background", `color-mix(in oklab, var(--c${index === column ? 0 : 1}) ${Math.round((60 * count) / most)}%, var(--card))`);
    });
    body.append(element("tr", {}, element("th", { scope: "row", class: "side" }, block.names[index]), ...cells));
  });
  table.append(body);
  return card(block, element("div", { class: "scroll" }, table));
}

function drawCode(block) {
  return element("section", { class: "card wide" }, element("details", {}, element("summary", {}, block.title), element("pre", {}, block.text)));
}
