// The table of ops, which can be sorted by column and filtered by name, type, precision or reason.
const ROWS_AT_FIRST = 250;
const micros = value => !value ? "–" : value >= 1e6 ? (value / 1e6).toPrecision(3) + " s" : value >= 1e3 ? (value / 1e3).toPrecision(3) + " ms" : value.toPrecision(3) + " µs";
const fraction = value => value == null ? "–" : (value >= 1e-6 ? +(value * 100).toPrecision(2) : (value * 100).toExponential(1)) + " %";
const times = value => value == null ? "–" : value.toFixed(2) + "×";
const whole = value => value ? value.toLocaleString("en") : "–";

class OpTable {
  constructor(data, state, events) {
    Object.assign(this, {data, state, events, by: -1, falling: false, most: ROWS_AT_FIRST});
    this.kernelOf = [];
    data.levels[0].boxes.forEach(box => box[2].forEach(index => { this.kernelOf[index] = box[2]; }));
    const op = at => index => data.ops[index][at];
    const single = letter => index => data.ops[index][OP.times][letter];
    const columns = [
      ["op", op(OP.name)],
      ["type", index => data.types[data.ops[index][OP.type]], "l"],
      ["precision", index => state.runs[index], "l"],
      ["reason", index => this.reason(index), "why"],
      ["quantization noise", op(OP.noise), "", fraction],
      ["output noise", op(OP.output_noise), "", fraction],
      [data.source + " model", op(OP.before), "", micros],
      ["result", op(OP.after), "", micros],
      ["single op in FP32", single("."), "", micros],
      ["in INT8", single("8"), "", micros],
      ["in BF16", single("b"), "", micros],
      ["in FP16", single("h"), "", micros],
      ["gain", index => this.gain(index), "", gain => gain >= data.most_gain ? `clipped at ${data.most_gain}×` : times(gain)],
      ["weights", op(OP.weights), "", whole],
      ["multiply-adds", op(OP.adds), "", whole],
    ];
    this.columns = columns.filter(([, get], at) => at < 3 || data.ops.some((_, index) => get(index)));
    byId("filter").addEventListener("input", () => this.fill());
  }
  /** The gain of the kernel that runs an op: alone, an op fused into another would gain without bound. */
  gain(index) { return gainOf(this.data, this.state, this.kernelOf[index]); }
  /** The reason for the precision of an op; in the plan of a trial, the reason against INT8. */
  reason(index) {
    const op = this.data.ops[index], runs = this.state.runs[index];
    if (this.state.runs === this.data.result) return this.data.why[op[OP.because]];
    if (runs === "8") return "";
    const why = op[OP.why]["8"];
    if (why != null) return this.data.why[why];
    return op[OP.config] ? "supported; kept by the plan" : "follows adjacent ops";
  }
  listed() {
    const asked = byId("filter").value.trim().toLowerCase();
    let list = this.data.ops.map((_, index) => index);
    if (asked) list = list.filter(index => {
      const op = this.data.ops[index];
      return [op[OP.name], this.data.types[op[OP.type]], NAMES[this.state.runs[index]], this.reason(index)].join(" ").toLowerCase().includes(asked);
    });
    if (this.by >= 0) {
      const get = this.columns[this.by][1], sign = this.falling ? -1 : 1;
      list.sort((one, other) => {
        const [a, b] = [get(one), get(other)];
        if (a == null || b == null) return (a == null) - (b == null);
        return (a < b ? -1 : a > b ? 1 : 0) * sign;
      });
    }
    return list;
  }
  fill() {
    const list = this.listed(), head = built("tr"), body = built("tbody"), thead = built("thead");
    this.columns.forEach((column, at) => head.append(this.heading(column, at)));
    thead.append(head);
    for (const index of list.slice(0, this.most)) body.append(this.row(index));
    byId("ops").replaceChildren(thead, body);
    const more = byId("more");
    more.replaceChildren();
    if (list.length > this.most) {
      const button = built("button", `Show all ${list.length.toLocaleString("en")}`);
      button.addEventListener("click", () => { this.most = Infinity; this.fill(); });
      more.append(button);
    } else if (list.length < this.data.ops.length) more.textContent = `${list.length} of ${this.data.ops.length}`;
  }
  heading([words, , kind], at) {
    const made = built("th", null, {class: kind ? "l" : "", scope: "col"});
    const button = built("button", words + (at === this.by ? (this.falling ? " ↓" : " ↑") : ""));
    if (at === this.by) made.setAttribute("aria-sort", this.falling ? "descending" : "ascending");
    button.addEventListener("click", () => { this.falling = at === this.by ? !this.falling : at > 0 && !kind; this.by = at; this.fill(); });
    made.append(button);
    return made;
  }
  row(index) {
    const box = this.state.boxOf[index], made = built("tr", null, {id: "row" + index, class: box === this.state.chosen ? "on" : ""});
    this.columns.forEach(([words, get, kind, shown], at) => {
      const none = at > 2 && !get(index), cell = built("td", null, {class: (kind || "") + (none ? " none" : ""), "data-label": words});
      if (at === 0) cell.append(built("code", get(index)));
      else if (at === 2) cell.append(chip(this.state.runs[index]));
      else cell.textContent = shown ? shown(get(index)) : get(index);
      made.append(cell);
    });
    made.addEventListener("click", () => this.events.choose(box, true));
    return made;
  }
  mark(chosen) {
    document.querySelectorAll("#ops tr.on").forEach(row => row.classList.remove("on"));
    if (chosen >= 0) this.data.boxes[chosen][2].forEach(op => byId("row" + op)?.classList.add("on"));
  }
}
const chip = letter => built("span", NAMES[letter], {class: "chip " + CLASSES[letter]});
