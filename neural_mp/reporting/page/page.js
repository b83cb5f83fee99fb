// The page: connects the trials, the map and the table.
async function unpacked(source) {
  if (source.dataset.packed === undefined) return JSON.parse(source.textContent);
  const bytes = Uint8Array.from(atob(source.textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Boxes of the first map at most; ops described for a module at most.
const MOST_BOXES = 160, MOST_DETAILS = 11;

class Page {
  constructor(data) {
    this.data = data;
    this.state = {runs: data.result, colour: "precision", chosen: -1, found: new Set(), boxOf: []};
    const events = {choose: (box, show) => this.choose(box, show), hover: (box, event) => this.hover(box, event)};
    this.map = new ModelMap(data, this.state, events);
    this.table = new OpTable(data, this.state, events);
    this.listen();
    this.legend();
    this.folds();
    this.table.fill();
    this.choose(-1);
    this.follow(new URLSearchParams(location.hash.slice(1)));
  }
  listen() {
    byId("colour").addEventListener("change", event => this.colour(event.target.value));
    byId("find").addEventListener("input", event => this.find(event.target.value));
    byId("find").addEventListener("keydown", event => { if (event.key === "Enter") this.next(); });
    byId("back").addEventListener("click", () => this.trial(null));
    document.querySelectorAll("[data-trial]").forEach(point => {
      point.addEventListener("click", () => this.trial(+point.dataset.trial));
      point.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.trial(+point.dataset.trial); } });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.map.colours = palette(); this.legend(); this.map.draw(); });
    if (this.data.plan) byId("plan").href = URL.createObjectURL(new Blob([this.data.plan], {type: "text/yaml"}));
  }
  /** Offer the maps folded by module; a map of many kernels begins with the finest that fits. */
  folds() {
    const levels = this.data.levels, first = levels.findIndex(level => level.boxes.length <= MOST_BOXES);
    levels.forEach((level, at) => byId("fold").append(built("option", `${level.title} (${level.boxes.length})`, {value: at})));
    byId("folds").hidden = levels.length < 2;
    byId("fold").addEventListener("change", event => this.fold(+event.target.value));
    this.fold(first < 0 ? levels.length - 1 : first);
  }
  fold(level) {
    byId("fold").value = level;
    this.level = level;
    this.map.show(level);
    this.find(byId("find").value);
    this.choose(-1);
  }
  /** Show the ops of a module as boxes. */
  unfold(op) {
    this.fold(Math.max(this.level - 1, 0));
    this.choose(this.state.boxOf[op], true);
  }
  colour(name) { this.state.colour = name; byId("colour").value = name; this.legend(); this.map.draw(); }
  legend() {
    byId("maplegend").replaceChildren(...this.map.legend().map(([colour, words]) => {
      const entry = built("li"), swatch = built("i", "", {class: "swatch"});
      swatch.style.background = css(colour);
      entry.append(swatch, words);
      return entry;
    }));
  }
  find(text) {
    const asked = text.trim().toLowerCase();
    this.state.found = new Set();
    if (asked) this.data.ops.forEach((op, index) => {
      if (op[OP.name].toLowerCase().includes(asked) || this.data.types[op[OP.type]].toLowerCase() === asked) this.state.found.add(this.state.boxOf[index]);
    });
    this.map.draw();
  }
  next() {
    const found = [...this.state.found];
    if (found.length) this.choose(found[(found.indexOf(this.state.chosen) + 1) % found.length], true);
  }
  /** Show the plan of a trial on the map and in the table; null for the plan of the result. */
  trial(number) {
    const plan = number === null || number === this.data.best ? null : this.data.plans[number];
    this.state.runs = plan ?? this.data.result;
    document.querySelectorAll(".pick.on").forEach(point => point.classList.remove("on"));
    if (plan) document.querySelectorAll(`[data-trial="${number}"]`).forEach(point => point.classList.add("on"));
    byId("showing").textContent = plan ? `Showing the plan of trial ${number + 1}.` : "";
    byId("back").hidden = !plan;
    this.legend();
    this.table.fill();
    this.choose(this.state.chosen);
  }
  hover(box, event) {
    const tip = byId("tip");
    if (box < 0) { tip.style.display = "none"; return; }
    const [, , ops, , module] = this.data.boxes[box];
    tip.textContent = module ? `${module}\n${this.precisions(ops)}` : ops.map(op => `${this.data.ops[op][OP.name]} (${this.data.types[this.data.ops[op][OP.type]]}): ${NAMES[this.state.runs[op]]}`).join("\n");
    tip.style.display = "block";
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - 330)) + "px";
    tip.style.top = event.clientY + 14 + "px";
  }
  choose(box, show) {
    this.state.chosen = box;
    byId("detail").replaceChildren(...(box < 0 ? [built("p", "Select a box to show the precisions of its ops and the reasons.")] : this.details(this.data.boxes[box])));
    this.table.mark(box);
    if (show && box >= 0) this.map.reveal(box);
    this.map.draw();
  }
  precisions(ops) {
    return Object.keys(NAMES).flatMap(letter => {
      const count = ops.filter(op => this.state.runs[op] === letter).length;
      return count ? [`${NAMES[letter]}: ${counted(count)}`] : [];
    }).join(", ");
  }
  details([, , ops, , module]) {
    const described = ops.slice(0, module ? MOST_DETAILS : ops.length).map(op => this.described(op));
    if (!module) return described;
    const made = built("div"), button = built("button", "Unfold");
    button.addEventListener("click", () => this.unfold(ops[0]));
    made.append(built("h3", module), built("p", this.precisions(ops)), button);
    if (ops.length > MOST_DETAILS) made.append(built("p", `The first ${MOST_DETAILS} of its ops:`));
    return [made, ...described];
  }
  described(index) {
    const op = this.data.ops[index], made = built("div"), first = built("p"), say = words => made.append(built("p", words));
    first.append(this.data.types[op[OP.type]] + " in ", chip(this.state.runs[index]));
    if (typeof op[OP.config] === "string" && this.state.runs === this.data.result) first.append(" " + op[OP.config]);
    made.append(built("h3", op[OP.name]), first);
    const shapes = this.data.why[op[OP.shapes]];
    if (shapes) say("shape " + shapes);
    if (op[OP.before] || op[OP.after]) say(`${this.data.source} model ${micros(op[OP.before])}, result ${micros(op[OP.after])}`);
    const alone = Object.entries(op[OP.times]).map(([letter, value]) => `${NAMES[letter]} ${micros(value)}`).join(", ");
    if (alone) say("timed as a single op: " + alone);
    if (op[OP.noise] != null) say(`quantization noise of the output: ${fraction(op[OP.noise])}`);
    if (op[OP.output_noise] != null) say(`output noise: ${fraction(op[OP.output_noise])}`);
    if (op[OP.weights]) say(`${whole(op[OP.weights])} weights` + (op[OP.adds] ? `, ${whole(op[OP.adds])} multiply-adds` : ""));
    if (this.state.runs === this.data.result) say(this.data.why[op[OP.because]]);
    for (const [letter, why] of Object.entries(op[OP.why])) say(`no ${NAMES[letter]}: ${this.data.why[why]}`);
    return made;
  }
  /** Apply the fragment of the address: report.html#trial=4&colour=noise&op=head */
  follow(asked) {
    if ([...byId("colour").options].some(option => option.value === asked.get("colour"))) this.colour(asked.get("colour"));
    if (asked.get("trial") - 1 in this.data.plans) this.trial(asked.get("trial") - 1);
    const op = this.data.ops.findIndex(candidate => candidate[OP.name] === asked.get("op"));
    if (op >= 0) this.fold(0);
    if (op >= 0) this.choose(this.state.boxOf[op], true);
  }
}
unpacked(byId("data")).then(data => new Page(data));
