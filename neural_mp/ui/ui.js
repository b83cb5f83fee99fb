// The browser view: search, refresh of what has changed, edits of a plan and their replay.
{
  const POLL_MS = 2000, REPLAY_MS = 700, MOST_ROWS = 300;
  const get = id => document.getElementById(id), state = get("ui")?.dataset ?? {};
  const node = (tag, text = "", attributes = {}) => {
    const made = Object.assign(document.createElement(tag), {textContent: text});
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    return made;
  };
  const reply = async response => {
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error ?? response.statusText);
    return answer;
  };
  const post = (path, body) => fetch(path, {method: "POST", headers: {"X-Token": state.token}, body: JSON.stringify(body ?? {})}).then(reply);

  /** Show the rows of runs that contain all words. */
  const search = () => {
    const words = get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("#runs tbody tr")];
    rows.forEach(row => { row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word)); });
    const shown = rows.filter(row => !row.hidden).length;
    get("shown").textContent = shown === rows.length ? `${shown} runs` : `${shown} of ${rows.length} runs`;
  };
  if (get("search")) {
    const boxes = [...document.querySelectorAll("#runs input")];
    const count = () => { get("compare").disabled = boxes.filter(box => box.checked).length !== 2; };
    get("search").addEventListener("input", search);
    get("search").addEventListener("keydown", event => { if (event.key === "Enter") event.preventDefault(); });
    boxes.forEach(box => box.addEventListener("change", count));
    search();
    count();
  }

  /** Reload once the run, or any run of the list, has changed, unless the user is typing. */
  let replaying = false;
  const watch = async () => {
    try {
      const query = state.run ? `?run=${encodeURIComponent(state.run)}` : "";
      const busy = document.hidden || replaying || document.activeElement?.matches("input[type=search], select");
      const checked = document.querySelector("#runs input:checked");
      if (!busy && !checked && (await fetch("/state" + query).then(reply)).state !== state.state) location.reload();
    } catch { /* the server has ended */ }
    setTimeout(watch, POLL_MS);
  };
  if (state.state) setTimeout(watch, POLL_MS);

  class Editor {
    constructor() {
      this.ops = JSON.parse(get("edit-data").textContent);
      this.key = `edits ${state.run} ${state.base}`;
      this.edits = JSON.parse(sessionStorage.getItem(this.key) ?? "{}");
      get("edit-filter").addEventListener("input", () => this.fill());
      get("base")?.addEventListener("change", event => { location.assign(`?base=${event.target.value}#edit`); });
      get("predict").addEventListener("click", () => this.run(() => this.predict()));
      get("replay").addEventListener("click", () => this.run(() => this.replay()));
      get("stop").addEventListener("click", () => post("/stop"));
      get("discard").addEventListener("click", () => { this.keep({}); this.fill(); get("prediction").replaceChildren(); });
      get("save-plan").addEventListener("click", () => this.run(() => this.save()));
      this.fill();
      this.follow();
    }
    keep(edits) { this.edits = edits; sessionStorage.setItem(this.key, JSON.stringify(edits)); }
    path(what) { return `/${what}/${state.run}`; }
    get body() { return {base: state.base, edits: this.edits}; }
    fill() {
      const asked = get("edit-filter").value.trim().toLowerCase();
      const found = this.ops.filter(([op, type]) => `${op} ${type}`.toLowerCase().includes(asked));
      get("edits").tBodies[0].replaceChildren(...found.slice(0, MOST_ROWS).map(op => this.row(op)));
      get("edit-more").textContent = found.length > MOST_ROWS ? `… and ${found.length - MOST_ROWS} more: enter a part of a name.` : "";
    }
    row([op, type, runs, planned, choices]) {
      const row = node("tr"), select = node("select", "", {"aria-label": `Precision of ${op}`}), cell = node("td");
      select.append(...choices.map(name => node("option", name.toUpperCase(), {value: name})));
      select.value = this.edits[op] ?? planned;
      row.classList.toggle("changed", op in this.edits);
      select.addEventListener("change", () => {
        const {[op]: _, ...others} = this.edits;
        this.keep(select.value === planned ? others : {...others, [op]: select.value});
        row.classList.toggle("changed", op in this.edits);
        get("prediction").replaceChildren();
      });
      cell.append(select);
      const now = node("td");
      now.append(node("span", runs.toUpperCase(), {class: `chip ${runs}`}));
      row.append(node("th", op, {scope: "row"}), node("td", type), now, cell);
      return row;
    }
    async run(action) {
      try { await action(); } catch (error) { get("prediction").replaceChildren(node("p", error.message, {class: "none"})); }
    }
    async predict() {
      const {rows, plan} = await post(this.path("predict"), this.body), list = node("dl");
      rows.forEach(([name, value]) => list.append(node("dt", name), node("dd", value)));
      get("prediction").replaceChildren(list);
      return plan;
    }
    async save() {
      const link = node("a", "", {download: "plan.yaml"});
      link.href = URL.createObjectURL(new Blob([await this.predict()], {type: "text/yaml"}));
      link.click();
    }
    async replay() {
      await this.predict();
      await post(this.path("replay"), this.body);
      this.follow();
    }
    /** Show the progress of a replay of this run, and its trial once there is one. */
    async follow() {
      const replay = await fetch("/replay").then(reply).catch(() => null);
      const running = replay?.is_running && replay.run === state.run;
      if (running || replaying) get("replayed").textContent = running ? `${replay.message} …` : "";
      get("stop").hidden = !running;
      if (!get("replay").disabled || replaying) get("replay").disabled = !!running;
      if (running) { replaying = true; setTimeout(() => this.follow(), REPLAY_MS); return; }
      if (!replaying) return;
      if (replay?.trial == null) { replaying = false; get("replayed").textContent = `Not replayed: ${replay?.message}`; return; }
      this.keep({});
      location.assign(`${location.pathname}?base=${replay.trial}#trial=${replay.trial + 1}`);
    }
  }
  if (get("edit-data")) new Editor();
}
