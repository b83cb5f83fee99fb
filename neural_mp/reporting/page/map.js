// The map: boxes on a canvas that can be dragged and zoomed. The rest of the page is in page.js.
const NAMES = {2: "INT2", 3: "INT3", 4: "INT4", 8: "INT8", w: "INT16", W: "W16A16", b: "BF16", h: "FP16", ".": "FP32"};
const CLASSES = {2: "int2", 3: "int3", 4: "int4", 8: "int8", w: "int16", W: "w16a16", b: "bf16", h: "fp16", ".": "fp32"};
const BOX_WIDTH = 132, BOX_HEIGHT = 34, LEAST_ZOOM = 0.01, MOST_ZOOM = 4;
const OP = {name: 0, type: 1, why: 2, noise: 3, output_noise: 4, times: 5, before: 6, after: 7, weights: 8, adds: 9, config: 10, because: 11, shapes: 12};

const byId = id => document.getElementById(id);
const built = (tag, text, attributes) => {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  return made;
};
const counted = count => `${count} op${count > 1 ? "s" : ""}`;
/** The gain of the ops of a kernel or module; clipped, as kernels that gain more hide in others. */
function gainOf(data, state, indices) {
  const ops = indices.map(index => data.ops[index]), before = sum(ops.map(op => op[OP.before])), after = sum(ops.map(op => op[OP.after]));
  const alone = ops[0][OP.times], letter = state.runs[indices[0]], low = letter === "." ? null : alone[letter];
  const gain = before && after ? before / after : alone["."] && low ? alone["."] / low : null;
  return gain && Math.min(gain, data.most_gain);
}
const sum = values => values.reduce((total, value) => total + (value || 0), 0);

/** Colours of the style sheet as [red, green, blue], light or dark. */
function palette() {
  const style = getComputedStyle(document.body), found = {};
  for (const name of ["int2", "int3", "int4", "int8", "int16", "w16a16", "bf16", "fp16", "fp32", "ink", "soft", "line", "card", "faint", "focus", "on", "bad"]) {
    const text = style.getPropertyValue("--" + name).trim().slice(1);
    const digits = text.length === 3 ? [...text].map(digit => digit + digit).join("") : text;
    found[name] = [0, 2, 4].map(at => parseInt(digits.slice(at, at + 2), 16));
  }
  return found;
}
const css = colour => `rgb(${colour.map(Math.round).join()})`;
const between = (low, high, weight) => low.map((value, at) => value + (high[at] - value) * Math.min(1, Math.max(0, weight)));

class ModelMap {
  constructor(data, state, events) {
    Object.assign(this, {data, state, events, canvas: byId("map"), view: {x: 0, y: 0, zoom: 1}, shortened: new Map(), fingers: new Map()});
    this.context = this.canvas.getContext("2d");
    this.colours = palette();
    this.listen();
    this.show(0);
  }
  /** Show a level: all kernels, or the modules at a depth. */
  show(level) {
    Object.assign(this.data, this.data.levels[level]);
    this.state.boxOf = [];
    this.data.boxes.forEach((box, index) => box[2].forEach(op => { this.state.boxOf[op] = index; }));
    this.most = Math.max(...this.data.boxes.map(box => this.time(box) || 0), 1);
    this.fit();
  }

  // Properties that determine the colour of a box.
  ops(box) { return box[2].map(op => this.data.ops[op]); }
  time(box) {
    const ops = this.ops(box), measured = sum(ops.map(op => op[OP.after])) || sum(ops.map(op => op[OP.before]));
    return measured || sum(ops.map(op => op[OP.times]["."])) || null;
  }
  gain(box) { return gainOf(this.data, this.state, box[2]); }
  noise(box, which) { return Math.max(...this.ops(box).map(op => op[which] || 0)); }
  fill(box) {
    const {card, bad, int8, faint} = this.colours, colour = this.state.colour;
    if (colour === "precision") return this.colours[CLASSES[this.state.runs[box[2][0]]]];
    if (colour === "time") { const time = this.time(box); return time ? between(card, int8, Math.max(.06, Math.sqrt(time / this.most))) : faint; }
    if (colour === "gain") {
      const gain = this.gain(box);
      if (!gain) return faint;
      return gain >= 1 ? between(card, int8, Math.max(.1, Math.log2(gain) / 3)) : between(card, bad, Math.max(.15, -Math.log2(gain)));
    }
    const noise = this.noise(box, OP[colour]);
    return noise ? between(card, bad, Math.max(.06, (Math.log10(noise) + 5) / 5)) : faint;
  }
  legend() {
    const {card, bad, int8, faint} = this.colours, colour = this.state.colour;
    if (colour === "precision") return Object.keys(NAMES).flatMap(letter => {
      const count = [...this.state.runs].filter(run => run === letter).length;
      return count ? [[this.colours[CLASSES[letter]], `${NAMES[letter]}: ${counted(count)}`]] : [];
    });
    if (colour === "time") return [[between(card, int8, .1), "little time"], [int8, micros(this.most)], [faint, "not measured, or fused into another kernel"]];
    if (colour === "gain") return [[bad, "slower than " + this.data.source], [card, "equal"], [int8, "8 times as fast or more"], [faint, "not measured"]];
    return [[between(card, bad, .1), "0.003 %"], [between(card, bad, .55), "0.6 %"], [bad, "100 %"], [faint, "not measured"]];
  }

  // The visible section.
  fit() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight, [wide, high] = this.data.size;
    const zoom = Math.min((width - 96) / Math.max(wide, 1), (height - 72) / Math.max(high, 1), 1.3);
    this.view = {zoom: Math.max(zoom, LEAST_ZOOM), x: (width - 44 - wide * zoom) / 2, y: Math.max((height - high * zoom) / 2, 26)};
    this.draw();
  }
  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const before = this.view.zoom, zoom = Math.min(MOST_ZOOM, Math.max(LEAST_ZOOM, before * factor));
    this.view = {zoom, x: x - (x - this.view.x) * zoom / before, y: y - (y - this.view.y) * zoom / before};
    this.draw();
  }
  reveal(index) {
    const [x, y] = this.data.boxes[index], zoom = this.view.zoom < .6 ? .9 : this.view.zoom;
    this.view = {zoom, x: this.canvas.clientWidth / 2 - x * zoom, y: this.canvas.clientHeight / 2 - y * zoom};
    this.draw();
  }
  hit(x, y) {
    const left = (x - this.view.x) / this.view.zoom, top = (y - this.view.y) / this.view.zoom;
    return this.data.boxes.findIndex(box => Math.abs(box[0] - left) <= BOX_WIDTH / 2 && Math.abs(box[1] - top) <= BOX_HEIGHT / 2);
  }

  draw() { if (!this.waiting) { this.waiting = true; requestAnimationFrame(() => this.paint()); } }
  paint() {
    this.waiting = false;
    const {canvas, context, view} = this, width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.setTransform(ratio * view.zoom, 0, 0, ratio * view.zoom, ratio * view.x, ratio * view.y);
    const left = -view.x / view.zoom - BOX_WIDTH, top = -view.y / view.zoom - BOX_HEIGHT;
    this.seen = {left, top, right: left + width / view.zoom + 2 * BOX_WIDTH, foot: top + height / view.zoom + 2 * BOX_HEIGHT};
    for (const far of [0, 1]) this.paintEdges(this.data.edges.filter(edge => edge[3] === far), this.colours.soft, far);
    if (this.state.chosen >= 0) this.paintEdges(this.data.edges.filter(edge => edge[0] === this.state.chosen || edge[1] === this.state.chosen), this.colours.focus, 0, true);
    this.data.boxes.forEach((box, index) => this.paintBox(box, index));
    context.globalAlpha = 1;
  }
  paintEdges(edges, colour, far, bold) {
    const {context, view, seen} = this;
    context.beginPath();
    context.setLineDash(far ? [5, 4] : []);
    context.strokeStyle = css(colour);
    context.globalAlpha = bold ? 1 : (far ? .35 : .55) * Math.min(1, Math.max(.25, view.zoom * 3));
    context.lineWidth = bold ? Math.max(2.2, 1.5 / view.zoom) : Math.max(1.2, .7 / view.zoom);
    for (const [, , points, around] of edges) {
      const xs = points.filter((_, at) => at % 2 === 0), ys = points.filter((_, at) => at % 2);
      if (Math.max(...xs) < seen.left || Math.min(...xs) > seen.right || Math.max(...ys) < seen.top || Math.min(...ys) > seen.foot) continue;
      context.moveTo(xs[0], ys[0]);
      for (let at = 1; at < xs.length; at++) {
        const middle = (ys[at - 1] + ys[at]) / 2;
        if (around && at + 1 < xs.length) context.arcTo(xs[at], ys[at], xs[at + 1], ys[at + 1], 7);
        else if (around || view.zoom < .25) context.lineTo(xs[at], ys[at]);
        else context.bezierCurveTo(xs[at - 1], middle, xs[at], middle, xs[at], ys[at]);
      }
    }
    context.stroke();
    context.setLineDash([]);
  }
  paintBox(box, index) {
    const {context, view, seen, state, colours} = this, [x, y] = box;
    if (x < seen.left || x > seen.right || y < seen.top || y > seen.foot) return;
    context.globalAlpha = state.found.size && !state.found.has(index) ? .22 : 1;
    context.fillStyle = css(this.fill(box));
    context.beginPath();
    context.roundRect(x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, 6);
    context.fill();
    if (box[4] && state.colour === "precision") this.paintShares(box);
    if (index === state.chosen || state.colour !== "precision") {
      context.strokeStyle = css(index === state.chosen ? colours.focus : colours.line);
      context.lineWidth = index === state.chosen ? Math.max(3, 2 / view.zoom) : 1;
      context.stroke();
    }
    if (view.zoom > .42) this.paintWords(box, view.zoom > .62);
  }
  /** The precisions in a module, as shares of its box. */
  paintShares(box) {
    const {context, colours, state} = this, [x, y, ops] = box;
    context.save();
    context.clip();
    let left = x - BOX_WIDTH / 2;
    for (const letter of Object.keys(NAMES)) {
      const wide = BOX_WIDTH * ops.filter(op => state.runs[op] === letter).length / ops.length;
      context.fillStyle = css(colours[CLASSES[letter]]);
      context.fillRect(left, y - BOX_HEIGHT / 2, wide, BOX_HEIGHT);
      left += wide;
    }
    context.restore();
  }
  paintWords(box, named) {
    const {context, colours} = this, [x, y] = box, left = x - BOX_WIDTH / 2 + 8;
    const kinds = this.ops(box).map(op => this.data.types[op[OP.type]]);
    context.fillStyle = css(this.state.colour === "precision" ? colours.on : colours.ink);
    context.textBaseline = "middle";
    context.font = "600 12px system-ui, sans-serif";
    context.fillText(this.short(box[4] ? counted(kinds.length) : kinds.length > 3 ? `${kinds[0]} + ${kinds.length - 1}` : kinds.join(" + ")), left, y - (named ? 7 : 0));
    if (!named) return;
    context.globalAlpha *= .85;
    context.font = "10.5px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    context.fillText(this.short(box[3], true), left, y + 8);
  }
  /** A text truncated to the width of a box, at its start if `tail`. */
  short(text, tail) {
    const key = this.context.font + text;
    if (!this.shortened.has(key)) {
      let left = [...text], shown = text;
      while (left.length > 3 && this.context.measureText(shown).width > BOX_WIDTH - 14) {
        left = tail ? left.slice(1) : left.slice(0, -1);
        shown = tail ? "…" + left.join("") : left.join("") + "…";
      }
      this.shortened.set(key, shown);
    }
    return this.shortened.get(key);
  }

  // Input by mouse, touch and keyboard.
  listen() {
    const {canvas} = this, at = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    let moved = 0, apart = 0;
    canvas.addEventListener("pointerdown", event => { this.fingers.set(event.pointerId, at(event)); moved = 0; canvas.setPointerCapture(event.pointerId); canvas.classList.add("held"); });
    canvas.addEventListener("pointermove", event => {
      const [x, y] = at(event), before = this.fingers.get(event.pointerId);
      if (!before) return this.events.hover(this.hit(x, y), event);
      this.fingers.set(event.pointerId, [x, y]);
      moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
      if (this.fingers.size === 2) {
        const [one, other] = [...this.fingers.values()], now = Math.hypot(one[0] - other[0], one[1] - other[1]);
        if (apart) this.zoom(now / apart, (one[0] + other[0]) / 2, (one[1] + other[1]) / 2);
        apart = now;
      } else { this.view.x += x - before[0]; this.view.y += y - before[1]; this.draw(); }
    });
    const release = event => {
      this.fingers.delete(event.pointerId); apart = 0; canvas.classList.remove("held");
      if (event.type === "pointerup" && moved < 5) this.events.choose(this.hit(...at(event)));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => this.events.hover(-1));
    canvas.addEventListener("wheel", event => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.zoom(Math.exp(-event.deltaY * .0022), ...at(event)); } }, {passive: false});
    canvas.addEventListener("dblclick", event => this.zoom(1.8, ...at(event)));
    canvas.addEventListener("keydown", event => this.key(event));
    document.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", () => +button.dataset.zoom ? this.zoom(+button.dataset.zoom) : this.fit()));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }
  key(event) {
    const count = this.data.boxes.length, chosen = this.state.chosen;
    const along = {ArrowDown: [0, 1], ArrowUp: [1, 0]}[event.key], step = {ArrowRight: 1, ArrowLeft: count - 1}[event.key];
    if (along || step) event.preventDefault();
    if (along) {
      const edge = this.data.edges.find(candidate => candidate[along[0]] === chosen);
      if (chosen < 0) this.events.choose(0, true); else if (edge) this.events.choose(edge[along[1]], true);
    } else if (step) this.events.choose((Math.max(chosen, 0) + step) % count, true);
    else if (event.key === "+") this.zoom(1.3);
    else if (event.key === "-") this.zoom(1 / 1.3);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.events.choose(-1);
  }
}
