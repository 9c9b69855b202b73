// Looking through cases: slice after slice, in three planes, with label and prediction over the image.

const TINTS = [
  [86, 180, 233], [230, 159, 0], [0, 190, 140], [213, 94, 0], [204, 121, 167], [240, 228, 66], [120, 130, 255], [180, 180, 180],
  [150, 220, 60], [255, 90, 120], [0, 120, 200], [170, 110, 40], [160, 60, 200], [0, 215, 225], [255, 190, 170], [110, 140, 60],
];
const BITS = 8; // of a voxel: so many overlapping classes a picture holds
const [MISSED, EXTRA, RIGHT] = [[230, 159, 0], [86, 180, 233], [0, 190, 140]];

class Viewer {
  constructor(block, whenShown) {
    this.block = block;
    this.whenShown = whenShown;
    this.state = { place: 0, plane: "axial", slice: 0, channel: 0, opacity: 0.45, overlay: true, view: "beside" };
    this.hidden = new Set();
    this.read = new Map();
    this.labelled = block.cases.some((each) => each.codes);
    this.build();
    this.show(0);
  }

  build() {
    const { block } = this;
    this.choice = select(block.cases.map((each, at) => [at, `${each.case}${each.split ? ` (${each.split})` : ""}`]), (value) => this.show(Number(value)), "Case");
    this.planes = select(Object.keys(PLANES).map((name) => [name, name]), (value) => this.turn(value), "Plane");
    this.channels = select([], (value) => this.set({ channel: Number(value) }), "Channel");
    this.views = select([["beside", "label and prediction"], ["errors", "errors"]], (value) => this.set({ view: value }), "View");
    this.slider = element("input", { type: "range", min: 0, value: 0, "aria-label": "Slice", oninput: (event) => this.set({ slice: Number(event.target.value) }) });
    this.output = element("output");
    this.sides = element("span", { class: "note sides", title: "Where in the patient the right and the top of the picture lie" });
    this.opacity = element("input", { type: "range", min: 0, max: 1, step: 0.05, value: this.state.opacity, "aria-label": "Opacity", oninput: (event) => this.set({ opacity: Number(event.target.value) }) });
    this.toggle = element("button", { type: "button", class: "overlay", onclick: () => this.set({ overlay: !this.state.overlay }) }, "Overlay");
    this.panels = element("div", { class: "panels", tabindex: 0, role: "application", "aria-label": "Slices: arrow keys move, o toggles the overlay" });
    this.panels.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.panels.addEventListener("keydown", (event) => this.key(event));
    watchWidth(this.panels, () => this.volumes && this.draw());
    this.legend = element("div", { class: "legend", role: "group", "aria-label": "Classes shown" });
    const step = (name, text, by) => element("button", { type: "button", "aria-label": name, onclick: () => this.show(this.state.place + by) }, text);
    this.node = card(
      { ...block, type: "viewer" },
      element("div", { class: "viewer" },
        element("div", { class: "viewer-head" }, step("Previous case", "←", -1), this.choice, step("Next case", "→", 1), this.planes, this.channels, this.labelled ? this.views : null),
        this.panels,
        element("div", { class: "viewer-tools" },
          element("label", { class: "slice" }, "Slice", this.slider, this.output),
          this.sides,
          this.labelled ? element("label", {}, "Opacity", this.opacity) : null,
          this.labelled ? this.toggle : null),
        this.legend,
        keysHelp(this.labelled)),
    );
    this.node.classList.add("wide");
  }

  async show(place) {
    const { cases } = this.block;
    this.state.place = Math.max(0, Math.min(cases.length - 1, place));
    this.choice.value = String(this.state.place);
    const preview = cases[this.state.place];
    if (!this.read.has(preview)) {
      if (this.read.size > 4) this.read.delete(this.read.keys().next().value);
      this.read.set(preview, await readVolumes(preview).catch(() => null));
    }
    if (preview !== cases[this.state.place]) return; // another was chosen meanwhile
    this.volumes = this.read.get(preview);
    this.preview = preview;
    if (!this.volumes) {
      this.panels.replaceChildren(element("p", { class: "note" }, "The pictures of this case are damaged."));
      this.output.textContent = this.sides.textContent = "";
      this.whenShown(this.state.place);
      return;
    }
    this.state.channel = Math.min(this.state.channel, preview.channels - 1);
    this.channels.replaceChildren(...options(Array.from({ length: preview.channels }, (_, at) => [at, `channel ${at + 1}`])));
    this.channels.hidden = preview.channels === 1;
    this.channels.value = String(this.state.channel);
    this.planes.replaceChildren(...options(Object.keys(PLANES).map((plane) => [plane, planeName(plane, preview.axes)])));
    this.planes.hidden = preview.shape[2] === 1;
    this.drawLegend();
    this.turn(this.state.plane);
    this.whenShown(this.state.place);
  }

  turn(plane) {
    if (!this.volumes) return;
    this.state.plane = this.preview.shape[2] === 1 ? "axial" : plane;
    this.planes.value = this.state.plane;
    this.slider.max = this.count - 1;
    this.set({ slice: this.mostLabelled() });
  }

  get count() {
    return this.preview.shape[PLANES[this.state.plane].through];
  }

  // The slice that shows most of the label, else of the prediction; else the middle.
  mostLabelled() {
    let [best, at] = [0, Math.floor(this.count / 2)];
    for (const volume of [this.volumes.label, this.volumes.predicted]) {
      if (!volume || best) continue;
      for (let slice = 0; slice < this.count; slice += 1) {
        const inside = sliceOf(this.volumes, volume, this.state.plane, slice).values.reduce((sum, code) => sum + (code > 0), 0);
        if (inside > best) [best, at] = [inside, slice];
      }
    }
    return at;
  }

  set(fields) {
    Object.assign(this.state, fields);
    if (!this.volumes) return; // it is still unpacked, or damaged
    this.state.slice = Math.max(0, Math.min(this.count - 1, this.state.slice));
    this.slider.value = String(this.state.slice);
    this.opacity.value = String(this.state.opacity);
    this.output.textContent = `${this.state.slice + 1} / ${this.count}`;
    this.sides.textContent = sidesOf(this.state.plane, this.preview);
    this.toggle.setAttribute("aria-pressed", String(this.state.overlay));
    this.draw();
  }

  wheel(event) {
    const slice = this.state.slice + Math.sign(event.deltaY);
    if (event.ctrlKey || !this.volumes || slice < 0 || slice >= this.count) return; // at the ends the page scrolls on
    event.preventDefault();
    this.set({ slice });
  }

  key(event) {
    if (!this.preview || isShortcut(event)) return;
    const moves = { ArrowUp: 1, ArrowDown: -1, PageUp: 5, PageDown: -5 };
    if (event.key in moves) this.set({ slice: this.state.slice + moves[event.key] });
    else if (event.key === "ArrowLeft") this.show(this.state.place - 1);
    else if (event.key === "ArrowRight") this.show(this.state.place + 1);
    else if (event.key === "o") this.set({ overlay: !this.state.overlay });
    else if (event.key === "p") this.turn(Object.keys(PLANES)[(Object.keys(PLANES).indexOf(this.state.plane) + 1) % 3]);
    else return;
    event.preventDefault();
  }

  draw() {
    const { volumes, state } = this;
    const wanted = !volumes.label ? [["image", null]] : state.view === "errors" ? [["image", null], ["errors", "errors"]] : [["label", volumes.label], ["prediction", volumes.predicted]];
    if (this.errorKeys) this.errorKeys.hidden = state.view !== "errors";
    if (this.panels.querySelectorAll("canvas").length !== wanted.length) {
      this.panels.replaceChildren(...wanted.map(() => element("figure", {}, element("figcaption"), element("canvas"))));
      this.panels.classList.toggle("one", wanted.length === 1);
    }
    wanted.forEach(([name, codes], index) => {
      const figure = this.panels.children[index];
      figure.firstChild.textContent = name;
      this.drawPanel(figure.lastChild, codes);
    });
  }

  drawPanel(canvas, codes) {
    const { state, volumes, preview } = this;
    const grey = sliceOf(volumes, volumes.images[state.channel], state.plane, state.slice);
    const { across, up } = PLANES[state.plane];
    const ratio = (grey.width * preview.spacing_mm[across]) / (grey.height * preview.spacing_mm[up]);
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round((canvas.clientWidth || 320) * scale);
    canvas.height = Math.round((canvas.clientHeight || 320) * scale);
    const width = Math.min(canvas.width, canvas.height * ratio);
    const height = width / ratio;
    const place = [(canvas.width - width) / 2, (canvas.height - height) / 2, width, height];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(painted(grey, (value) => [value, value, value, 255]), ...place);
    if (!codes || !state.overlay) return;
    context.globalAlpha = state.opacity;
    context.imageSmoothingEnabled = false;
    context.drawImage(codes === "errors" ? this.errors() : this.classes(codes), ...place);
    context.globalAlpha = 1;
  }

  classes(codes) {
    const slice = sliceOf(this.volumes, codes, this.state.plane, this.state.slice);
    return painted(slice, (code) => {
      const found = this.shownClass(code);
      return found < 0 ? [0, 0, 0, 0] : [...TINTS[found % TINTS.length], 255];
    });
  }

  errors() {
    const [label, predicted] = [this.volumes.label, this.volumes.predicted].map((codes) => sliceOf(this.volumes, codes, this.state.plane, this.state.slice));
    return painted(label, (code, at) => {
      const [is, said] = [this.shownCode(code), this.shownCode(predicted.values[at])];
      if (is === said) return is ? [...RIGHT, 255] : [0, 0, 0, 0];
      const isMissed = this.block.exclusive ? is : is & ~said;
      return [...(isMissed ? MISSED : EXTRA), 255];
    });
  }

  // The class, or of overlapping ones the bits of those, that are shown.
  shownCode(code) {
    if (this.block.exclusive) return this.hidden.has(code - 1) ? 0 : code;
    let bits = code;
    for (const index of this.hidden) bits &= ~(1 << index);
    return bits;
  }

  // Of overlapping classes the innermost: the one that holds the least of the case.
  shownClass(code) {
    if (this.block.exclusive) return code && !this.hidden.has(code - 1) ? code - 1 : -1;
    return this.order.find((index) => (code >> index) & 1 && !this.hidden.has(index)) ?? -1;
  }

  drawLegend() {
    const { exclusive } = this.block;
    const classes = exclusive ? this.block.classes : this.block.classes.slice(0, BITS);
    const { label, predicted } = this.volumes;
    if (!label) return;
    const held = classes.map((_, index) => (exclusive ? 0 : label.reduce((sum, code) => sum + ((code >> index) & 1), 0) || predicted.reduce((sum, code) => sum + ((code >> index) & 1), 0)));
    this.order = classes.map((_, index) => index).sort((a, b) => held[a] - held[b]);
    const keys = classes.map((name, index) => {
      const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(index)) }, swatch(`rgb(${TINTS[index % TINTS.length].join(" ")})`, "block"), name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(index)) this.hidden.add(index);
        button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
        this.draw();
      });
      return button;
    });
    const errors = [["right", RIGHT], ["missed", MISSED], ["too much", EXTRA]].map(([name, tint]) => element("span", { class: "key" }, swatch(`rgb(${tint.join(" ")})`, "block"), name));
    this.errorKeys = element("span", {}, ...errors);
    const left = this.block.classes.length - classes.length;
    const others = left ? element("span", { class: "note" }, `${left} more are not in the pictures`) : "";
    this.legend.replaceChildren(...keys, others, this.errorKeys);
  }
}

function painted(slice, tint) {
  const canvas = element("canvas", { width: slice.width, height: slice.height });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(slice.width, slice.height);
  slice.values.forEach((value, at) => pixels.data.set(tint(value, at), 4 * at));
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function options(pairs) {
  return pairs.map(([value, text]) => element("option", { value }, text));
}

function select(pairs, change, name) {
  return element("select", { "aria-label": name, onchange: (event) => change(event.target.value) }, ...options(pairs));
}

function keysHelp(labelled) {
  const keys = [["↑ ↓", "slices"], ["← →", "cases"], ["p", "plane"], ...(labelled ? [["o", "overlay"]] : [])];
  const parts = keys.flatMap(([key, what]) => [element("kbd", {}, key), ` ${what}  `]);
  return element("p", { class: "keys" }, "With the picture chosen: ", ...parts, " or turn the wheel.");
}
