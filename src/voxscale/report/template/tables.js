// Tables: sorted by a click on a column's name, searched, and where a case can be looked at, its row opens it.

const SHOWN_ROWS = 100;
const SHORT = 20; // signs of a cell that is not broken into lines

function drawTable(block, page) {
  const state = {
    column: Math.max(0, block.columns.findIndex((column) => column.name === block.sort)),
    descending: Boolean(block.descending),
    all: false,
    open: null,
    wide: false,
    text: "",
  };
  const body = element("tbody");
  const digits = block.columns.map((column, index) => (column.number && !column.exact ? digitsFor(block.rows.map((row) => row[index])) : null));
  const head = element("tr");
  const order = element("span", { class: "note" });
  const more = element("button", { type: "button", onclick: () => change({ all: true }) });
  const isHidden = (column) => !state.wide && (block.hidden || []).includes(column.name);
  const change = (fields) => {
    Object.assign(state, fields);
    redraw();
  };
  const redraw = () => {
    head.replaceChildren(...block.columns.map((column, index) => (isHidden(column) ? null : heading(block, column, index, state, change))).filter(Boolean));
    const rows = block.plain ? block.rows.map((_, index) => index) : sortedRows(block, state);
    const shown = state.all ? rows : rows.slice(0, SHOWN_ROWS);
    order.textContent = orderText(block.columns[state.column], state.descending);
    body.replaceChildren(...shown.map((row) => tableRow(block, row, isHidden, page, digits)));
    markOpen(body, state.open);
    more.hidden = shown.length === rows.length;
    more.textContent = `Show all ${rows.length}`;
  };
  redraw();
  if (block.opens) {
    page.whenShown(block.viewer, (place) => {
      state.open = place;
      markOpen(body, place);
    });
  }
  const table = element("table", {}, block.columns.some((column) => column.name) ? element("thead", {}, head) : null, body);
  const scroll = element("div", { class: "scroll", tabindex: block.rows.length > 8 ? "0" : null, role: "region", "aria-label": block.title || "Table" }, table);
  const made = card(block, tableTools(block, state, change, order), scroll, more);
  made.classList.add(block.plain ? "plain" : "wide");
  return made;
}

// The row of the case that is looked at.
function markOpen(body, place) {
  for (const line of body.children) {
    const isOpen = place !== null && line.dataset.place === String(place);
    line.classList.toggle("open", isOpen);
    if (isOpen) line.setAttribute("aria-current", "true");
    else line.removeAttribute("aria-current");
  }
}

function heading(block, column, index, state, change) {
  const kind = column.number ? "number" : null;
  if (block.plain) return element("th", { scope: "col", class: kind }, column.name);
  const sorted = index === state.column;
  const arrow = sorted ? (state.descending ? " ↓" : " ↑") : "";
  const flip = () => change({ column: index, descending: sorted ? !state.descending : false });
  const button = element("button", { type: "button", onclick: flip }, column.name + (column.unit ? ` (${column.unit})` : "") + arrow);
  return element("th", { scope: "col", class: kind, "aria-sort": sorted ? (state.descending ? "descending" : "ascending") : null }, button);
}

function sortedRows(block, state) {
  const sign = state.descending ? -1 : 1;
  const value = (row) => block.rows[row][state.column];
  const isMissing = (cell) => cell === null || cell === undefined || cell === "";
  const rows = block.rows.map((_, index) => index).filter((row) => matches(block.rows[row], state.text));
  return rows.sort((a, b) => {
    const [left, right] = [value(a), value(b)];
    if (isMissing(left) || isMissing(right)) return isMissing(left) - isMissing(right) || a - b; // what is missing comes last
    const order = typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), "en", { numeric: true });
    return sign * order || a - b;
  });
}

function matches(row, text) {
  return !text || row.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(text));
}

function tableRow(block, row, isHidden, page, digits) {
  const cells = block.rows[row].map((cell, index) => {
    const column = block.columns[index];
    if (isHidden(column)) return null;
    const missing = cell === null || cell === undefined || cell === "";
    const text = block.plain ? "" : String(cell).length <= SHORT ? "short" : "long";
    return element("td", { class: [column.number ? "number" : text, missing ? "none" : ""].join(" ").trim() || null }, ...(missing ? ["–"] : breakable(aligned(cell, digits[index]))));
  });
  const line = element("tr", {}, ...cells);
  const opens = block.opens ? block.opens[row] : null;
  if (opens !== null && opens !== undefined) {
    const open = () => page.open(block.viewer, opens);
    filled(line, { class: "opens", tabindex: 0, title: "Show the case", onclick: open, onkeydown: (event) => keyOpens(event, open) }, []);
    line.dataset.place = opens;
  }
  return line;
}

// The parts of a field's name, between which a line may end.
function breakable(text) {
  return text.split(/(?<=[._/])(?=[A-Za-z])/).flatMap((part, index) => (index ? [element("wbr"), part] : [part]));
}

function keyOpens(event, open) {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  open();
}

function orderText(column, descending) {
  const ends = column.number ? ["lowest first", "highest first"] : ["from the beginning", "from the end"];
  return `In the order of ${column.name}, ${ends[Number(descending)]}.`;
}

function tableTools(block, state, change, order) {
  const parts = [];
  if (block.search) {
    const type = (event) => change({ text: event.target.value.trim().toLowerCase() });
    parts.push(element("input", { type: "search", placeholder: "Find", "aria-label": "Find in the table", oninput: type }));
  }
  if ((block.hidden || []).length) {
    const toggle = element("button", { type: "button", "aria-pressed": "false" }, "All columns");
    toggle.addEventListener("click", () => {
      change({ wide: !state.wide });
      toggle.setAttribute("aria-pressed", String(state.wide));
    });
    parts.push(toggle);
  }
  if (block.ordered) parts.push(order);
  if (block.opens) parts.push(element("span", { class: "note" }, "Choose a row to look at the case."));
  return parts.length ? element("div", { class: "table-tools" }, ...parts) : null;
}
