// The page: what its content says, section by section.

const DRAW = {
  facts: drawFacts,
  plot: drawPlot,
  intervals: drawIntervals,
  spread: drawSpread,
  overTime: drawOverTime,
  bars: drawBars,
  matrix: drawMatrix,
  table: drawTable,
  parallel: drawParallel,
  code: drawCode,
};

const content = JSON.parse(document.getElementById("content").textContent);
const page = {
  viewers: [],
  // What is to be told which of a viewer's cases is looked at.
  listeners: [],
  whenShown(viewer, listener) {
    this.listeners.push({ viewer, listener });
  },
  shown(viewer, place) {
    for (const each of this.listeners) if (each.viewer === viewer) each.listener(place);
  },
  open(viewer, place) {
    const chosen = this.viewers[viewer];
    chosen.show(place);
    chosen.node.scrollIntoView({ block: "nearest", behavior: "smooth" });
    chosen.panels.focus({ preventScroll: true });
  },
};

function drawSection(section, index) {
  const grid = element("div", { class: "grid" });
  section.blocks.forEach((block, at) => {
    if (block.type === "viewer") {
      const number = page.viewers.length;
      const viewer = new Viewer(block, (place) => page.shown(number, place));
      page.viewers.push(viewer);
      grid.append(viewer.node);
      return;
    }
    if (block.opens && (section.blocks[at + 1] || {}).type === "viewer") block.viewer = page.viewers.length;
    grid.append(DRAW[block.type](block, page));
  });
  const about = section.about ? element("p", { class: "about" }, section.about) : null;
  return element("section", { id: `part-${index}` }, section.title ? element("h2", {}, section.title) : null, about, grid);
}

function drawBar() {
  const links = content.sections.map((section, index) => (section.title ? element("a", { href: `#part-${index}` }, section.title) : null));
  const title = element("h1", {}, content.title, element("span", { class: "kind" }, content.kind), element("span", { class: `state ${content.state}` }, content.state));
  return element("header", { class: "bar" }, element("div", {}, title, element("nav", { "aria-label": "Parts" }, ...links), themeButton()));
}

function themeButton() {
  const root = document.documentElement;
  const button = element("button", { type: "button", class: "theme" });
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
  say();
  return button;
}

const main = element("main");
if (content.about) main.append(element("p", { class: `notice ${content.state}` }, content.about));
main.append(...content.sections.map(drawSection));
document.body.prepend(drawBar(), main, element("footer", {}, "Written by voxscale. This file is complete: it loads nothing from anywhere."));
