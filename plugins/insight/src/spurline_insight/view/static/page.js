"use strict";
// The page of `spurline view`. Content of a run is inserted only as text, never as markup.

const byId = (id) => document.getElementById(id);
const state = { runs: [], attempt: null, pinned: null, query: "", offset: 0, list: 0 };
const POLL_MS = 3000;
const PAGE = 50;

// Characters that are invisible or reverse the text beside them, and halves of surrogate pairs.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;
function visible(text) {
  return String(text).replace(HIDDEN, (found) => {
    const code = found.codePointAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = visible(text);
  return element;
}

async function ask(path, query) {
  const response = await fetch("/api/" + path + (query ? "?" + query : ""));
  if (response.status === 403) throw new Error("Open the address that `spurline view` has printed. It contains the token.");
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function complain(error) {
  const gone = error instanceof TypeError;
  byId("problem").textContent = error ? visible(gone ? "spurline view does not answer; has it ended?" : error.message) : "";
  byId("problem").hidden = !error;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  // Some ticks are -0, because they are rounded up. Show them as 0.
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return (value || 0).toLocaleString("en");
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// Give an element the colour of a run.
function coloured(element, number) {
  element.style.color = `var(--series-${(number % 8) + 1})`;
  return element;
}

const swatch = (number) => coloured(make("span", { class: "swatch", "aria-hidden": "true" }), number);

// Read the part of the address after #: the view, and a query that selects what it shows.
function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: byId(view) && byId(view).tagName === "SECTION" ? view : "curves", query: new URLSearchParams(query) };
}

async function show() {
  const { view, query } = place();
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === "#" + (["attempt", "diff"].includes(view) ? "rollouts" : view)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    await { curves: showCurves, evaluation: showEvaluation, rollouts: showRollouts, attempt: showAttempt, diff: showDiff, shares: showShares }[view](query);
    complain(null);
  } catch (error) {
    complain(error);
  }
}

// Runs

async function refreshRuns() {
  const before = JSON.stringify(state.runs);
  state.runs = await ask("runs");
  if (JSON.stringify(state.runs) === before) return false;
  byId("runs").replaceChildren(...state.runs.map((run, number) => {
    const steps = run.total_steps ? `${short(run.step)} of ${short(run.total_steps)} steps` : `${short(run.step)} steps`;
    const item = make("li", { title: visible(run.path) }, swatch(number), run.name, " ", make("small", {}, `${run.status}, ${steps}`));
    if (run.error) item.append(make("div", { class: "marked" }, run.error));
    return item;
  }));
  const select = byId("filter").elements.run;
  const chosen = select.value;
  select.replaceChildren(...state.runs.map((run, number) => make("option", { value: number }, run.name)));
  if (chosen) select.value = chosen;
  return true;
}

async function poll() {
  try {
    if (!document.hidden) {
      const { view } = place();
      const isNew = await refreshRuns();
      if (isNew && ["curves", "evaluation"].includes(view)) await show();
      // The rollouts of a step may come after its metrics.
      if (view === "rollouts" && (isNew || state.runs.some((run) => run.status === "running"))) await list();
    }
  } catch (error) {
    complain(error);
  }
  setTimeout(poll, POLL_MS);
}

// Curves

const FIRST = ["loss", "reward/mean", "eval/loss", "eval/pass@1", "eval/exact_match", "response/length", "mismatch/kl"];

function metricNames() {
  return [...new Set(state.runs.flatMap((run) => run.metrics))].sort();
}

async function showCurves(query) {
  const names = metricNames();
  const asked = query.getAll("m").filter((name) => names.includes(name));
  const chosen = asked.length || query.has("m") ? asked : FIRST.filter((name) => names.includes(name));
  const wanted = byId("metric-search").value.toLowerCase();
  byId("picker").querySelector("summary").textContent = `Metrics (${chosen.length} of ${names.length})`;
  byId("metrics").replaceChildren(...names.filter((name) => name.toLowerCase().includes(wanted)).map((name) => {
    const box = make("input", { type: "checkbox" });
    box.checked = chosen.includes(name);
    box.addEventListener("change", () => {
      const next = box.checked ? [...chosen, name] : chosen.filter((other) => other !== name);
      location.hash = "curves?" + new URLSearchParams(next.length ? next.map((other) => ["m", other]) : [["m", ""]]);
    });
    return make("label", { class: "check" }, box, name);
  }));
  const answers = await Promise.all(chosen.map((name) => ask("series", new URLSearchParams({ metric: name }))));
  drawCharts = () => byId("charts").replaceChildren(...chosen.map((name, number) => chart(name, answers[number])));
  drawCharts();
  if (!chosen.length) byId("charts").append(make("p", {}, names.length ? "Choose a metric." : "No step has finished yet."));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * base).find((step) => step >= raw);
  const found = [];
  for (let number = Math.ceil(low / size); number * size <= high + size * 1e-9; number++) found.push(number * size);
  return found;
}

let drawCharts = () => {};
addEventListener("resize", () => place().view === "curves" && drawCharts());

// Return the width of a figure in the grid of page.css. At this width, the SVG and its text are not scaled.
function chartWidth() {
  const all = byId("charts").clientWidth, gap = 14, columns = Math.max(1, Math.floor((all + gap) / (480 + gap)));
  return Math.max(240, (all - gap * (columns - 1)) / columns - 26);
}

function chart(name, lines) {
  const width = chartWidth(), height = 220, left = 58, bottom = 24, top = 8, right = 16;
  const steps = lines.flatMap((line) => line.steps), values = lines.flatMap((line) => line.values);
  const readout = make("p", { class: "readout" });
  const figure = make("figure", {}, make("figcaption", {}, name));
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", visible(`${name} over steps: ` + lines.map((line, number) =>
    `${state.runs[number].name} ${line.values.length ? short(line.values[line.values.length - 1]) : "has none"}`).join(", ")));
  figure.append(svg, readout);
  if (!steps.length) return figure;
  const bounds = (all) => all.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  let [first, last] = bounds(steps), [low, high] = bounds(values);
  const end = last;
  if (first === last) [first, last] = [first - 1, last + 1];
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
  [low, high] = [low - room, high + room];
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - bottom - top);
  for (const value of ticks(low, high, 4)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(first, last, 6).filter(Number.isInteger)) {
    svg.append(draw("text", { class: "tick", x: x(step), y: height - 6, "text-anchor": "middle" }, short(step)));
  }
  const smooth = byId("smooth").checked;
  const path = (of, faint, number) => coloured(draw("path", { class: faint ? "line faint" : "line",
    d: of.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("") }), number);
  lines.forEach((line, number) => {
    const points = line.steps.map((step, index) => [step, line.values[index]]);
    if (points.length === 1) svg.append(coloured(draw("circle", { class: "point", cx: x(points[0][0]), cy: y(points[0][1]), r: 3 }), number));
    svg.append(path(points, smooth && points.length > 9, number));
    if (smooth && points.length > 9) svg.append(path(line.steps.map((step, index) => [step, line.means[index]]), false, number));
  });
  const cursor = draw("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  const tell = (step) => {
    readout.replaceChildren(`step ${short(step)}  `);
    lines.forEach((line, number) => {
      if (!line.steps.length) return;
      const nearest = line.steps.reduce((best, other, index) =>
        Math.abs(other - step) < Math.abs(line.steps[best] - step) ? index : best, 0);
      readout.append(swatch(number), visible(`${state.runs[number].name} ${short(line.values[nearest])}${line.steps[nearest] === step ? "" : ` at ${short(line.steps[nearest])}`}  `));
    });
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right);
    const step = Math.round(first + Math.min(1, Math.max(0, share)) * (last - first));
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    tell(step);
  });
  tell(end);
  return figure;
}

// Evaluation

async function showEvaluation() {
  const section = byId("evaluation"), runs = await ask("evaluations");
  section.replaceChildren();
  runs.forEach((run, number) => {
    section.append(make("h2", {}, swatch(number), run.name));
    if (!run.tables.length) section.append(make("p", {}, run.error || "Nothing was evaluated yet."));
    for (const table of run.tables) {
      const head = make("tr", {}, ...["Step", ...table.metrics].map((name) => make("th", { scope: "col" }, name)));
      const rows = table.rows.map((row) => make("tr", {}, ...[row.step, ...row.values].map((value) => make("td", {}, short(value)))));
      section.append(make("h3", {}, table.set || "held-out data"),
        make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    }
  });
}

// Shares of an update

async function showShares() {
  const section = byId("shares"), runs = await ask("shares");
  section.replaceChildren();
  runs.forEach((run, number) => {
    section.append(make("h2", {}, swatch(number), run.name));
    if (!run.steps.length) section.append(make("p", {}, run.error || "Run `spurline blame RUN_DIR --step N` to see which prompts or samples moved the weights in a step."));
    for (const { step, num_groups, groups } of run.steps) {
      const head = make("tr", {}, ...["Share", "Tokens with loss", "Rewards"].map((name) => make("th", { scope: "col" }, name)),
        ...["Prompt or sample", "Text"].map((name) => make("th", { scope: "col", class: "text" }, name)));
      const rows = groups.map((group) => {
        const at = new URLSearchParams({ run: number, min_step: step, max_step: step, prompt: group.uid });
        const name = group.rewards.length ? make("a", { href: "#rollouts?" + at }, group.uid) : group.uid;
        const text = make("details", {}, make("summary", {}, group.text.slice(0, 100)), make("pre", { class: "tokens" }, group.text));
        return make("tr", {}, make("td", {}, short(group.share)), make("td", {}, short(group.loss_tokens)),
          make("td", {}, group.rewards.map(short).join(" ")), make("td", { class: "text" }, name), make("td", { class: "text" }, text));
      });
      section.append(make("h3", {}, `Step ${step}: the largest and the smallest shares in the update, of ${short(num_groups)}`),
        make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    }
  });
}

// Rollouts

const attemptQuery = (run, row) => new URLSearchParams({ run, step: row.step, place: row.place });

async function showRollouts(query) {
  const form = byId("filter");
  // Fill in the form only if the address has changed. Otherwise the user may be typing into the form.
  if (query.toString() !== state.query) {
    form.reset();
    for (const [name, value] of query) if (form.elements[name]) form.elements[name].value = value;
    state.query = query.toString();
    state.offset = 0;
  }
  await list();
}

function asked() {
  const filled = [...new FormData(byId("filter"))].filter(([, value]) => value !== "");
  return new URLSearchParams(filled);
}

async function list() {
  const query = asked(), number = ++state.list;
  const run = query.get("run") || "0";
  query.set("run", run);
  query.set("offset", state.offset);
  query.set("limit", PAGE);
  const answer = await ask("rollouts", query);
  // Drop this answer if a newer request has been sent in the meantime.
  if (number !== state.list) return;
  const limit = state.runs[run].max_age;
  // Do not replace equal rows, so that they keep the keyboard focus.
  const rows = JSON.stringify([run, limit, answer.rows]);
  if (rows !== state.rows) byId("list").tBodies[0].replaceChildren(...answer.rows.map((row) => listRow(run, row, limit)));
  state.rows = rows;
  const end = Math.min(state.offset + PAGE, answer.matching);
  const range = answer.matching ? `${short(state.offset + 1)} to ${short(end)} of ` : "";
  byId("found").textContent = answer.steps
    ? `${range}${short(answer.matching)} attempts that match, of ${short(answer.attempts)}`
    : "This run keeps no rollouts, or has none yet.";
  byId("back").disabled = state.offset === 0;
  byId("forth").disabled = end >= answer.matching;
  listGivenUp(answer.given_up);
  if (answer.error) complain(new Error(answer.error));
}

function listGivenUp({ matching, prompts }) {
  const box = byId("given-up");
  box.hidden = matching === 0;
  const newest = prompts.length < matching ? `, the newest ${short(prompts.length)} of them below` : "";
  box.querySelector("summary").textContent = `${short(matching)} ${matching === 1 ? "prompt was" : "prompts were"} given up${newest}`;
  box.querySelector("tbody").replaceChildren(...prompts.map((prompt) => make("tr", {}, make("td", {}, short(prompt.step)),
    make("td", { class: "text" }, prompt.uid), make("td", { class: "text" }, prompt.reason))));
}

function listRow(run, row, limit) {
  const isOld = limit !== null && limit !== undefined && row.max_age > limit;
  const cell = (value, attributes = {}) => make("td", attributes, value);
  const link = make("a", { href: "#attempt?" + attemptQuery(run, row) }, row.preview.trim() || "(empty)");
  return make("tr", {}, cell(short(row.step)), cell(row.begins.trim() || row.uid, { title: row.uid }), cell(short(row.sample)),
    cell(short(row.reward)), cell(short(row.tokens)),
    cell(short(row.max_age), isOld ? { class: "marked", title: `over the limit of ${limit}` } : {}),
    cell(short(row.max_gap)), cell(link));
}

let typing = 0;
function changed() {
  clearTimeout(typing);
  typing = setTimeout(() => {
    // Do not overwrite the address if the user has opened another view in the meantime.
    if (place().view !== "rollouts") return;
    state.offset = 0;
    state.query = asked().toString();
    history.replaceState(null, "", "#rollouts?" + state.query);
    list().then(() => complain(null), complain);
  }, 120);
}

// One attempt

function facts(attempt) {
  const rows = [["reward", short(attempt.reward)], ...Object.entries(attempt.rewards).map(([name, value]) => [name, short(value)]),
    ["advantage", short(attempt.advantage)], ["status", attempt.status], ["ended by", attempt.finish_reason], ["step", short(attempt.step)],
    ["sample", short(attempt.sample)], ["epoch", short(attempt.epoch)], ["retries", short(attempt.retries)],
    ...(attempt.engines.length ? [["engines", attempt.engines.join(", ")]] : []),
    ...Object.entries({ ...attempt.columns, ...attempt.tags }).map(([name, value]) => [name, String(value)])];
  return make("dl", {}, ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

async function showAttempt(query) {
  const attempt = await ask("attempt", query);
  const run = query.get("run"), self = { run, step: attempt.step, place: query.get("place"), uid: attempt.uid, sample: attempt.sample };
  state.attempt = attempt;
  byId("facts").replaceChildren(make("h2", {}, `${attempt.uid}, sample ${attempt.sample}`), facts(attempt));
  if (Object.keys(attempt.info).length) {
    const info = make("pre", { class: "tokens" }, JSON.stringify(attempt.info, null, 2));
    byId("facts").append(make("details", {}, make("summary", {}, "What the environment tells"), info));
  }
  const limit = state.runs[run] && state.runs[run].max_age;
  byId("age-limit").value = limit === null || limit === undefined ? "" : limit;
  byId("turns").replaceChildren(...attempt.turns.flatMap(turnElements));
  colour();
  await showSiblings(self);
}

// Return the text of a token as it is shown. A line break is marked by ↵, and also breaks the line.
const shown = (piece) => visible(piece).replaceAll("\n", "↵\n");

function tokenSpans(part, make_class) {
  const special = new Set(part.special);
  return part.pieces.map((piece, number) => {
    const classes = [special.has(number) ? "special" : "", make_class(number)].filter(Boolean).join(" ");
    return make("span", classes ? { class: classes } : {}, shown(piece));
  });
}

function turnElements(turn, number) {
  const prompt = make("div", { class: "tokens prompt", tabindex: "0", role: "region", "aria-label": `Prompt of turn ${number + 1}` },
    ...tokenSpans(turn.prompt, () => ""));
  const response = make("div", { class: "tokens response", tabindex: "0", role: "application", "aria-label": `Response of turn ${number + 1}, token by token` },
    ...tokenSpans(turn.response, (token) => (turn.response.trained[token] ? "" : "untrained")));
  response.dataset.turn = number;
  const reward = turn.reward === null ? "" : `, reward ${short(turn.reward)}`;
  return [make("h3", {}, `Turn ${number + 1}: prompt, ${short(turn.prompt.pieces.length)} tokens`), prompt,
    make("h3", {}, `Turn ${number + 1}: response, ${short(turn.response.pieces.length)} tokens, ended by ${turn.finish}${reward}`), response];
}

// The smallest size of each of the four shades. Values of a smaller size have no shade.
const SHADES = { gap: [0.01, 0.05, 0.2, 1], advantages: [0.01, 0.5, 1, 2] };

function shade(kind, value) {
  if (value === null || value === undefined) return "";
  if (kind === "ages") return value > 0 ? "h" + Math.min(4, value) : "";
  const [least, ...ends] = SHADES[kind], size = Math.abs(value);
  if (size < least) return "";
  return (value < 0 ? "l" : "h") + (1 + ends.filter((end) => size >= end).length);
}

function legend(kind) {
  const entries = { "": [], ages: [["", "0 updates"], ["h1", "1"], ["h2", "2"], ["h3", "3"], ["h4", "4 and more"], ["over", "over the limit"]] }[kind]
    || (([a, b, c, d]) => [["l4", `≤ −${d}`], ["l3", `−${c}`], ["l2", `−${b}`], ["l1", `−${a}`], ["", "0"],
      ["h1", `${a}`], ["h2", `${b}`], ["h3", `${c}`], ["h4", `≥ ${d}`]])(SHADES[kind]);
  const unit = { gap: "trained model's logprob less the engine's, nats:", advantages: "advantage:", ages: "age of a token's weights, in updates:", "": "" }[kind];
  const none = kind && state.attempt.turns.every((turn) => !turn.response[kind]) ? [make("em", {}, "not recorded by this run")] : [];
  byId("legend").replaceChildren(unit, ...none, ...entries.map(([name, text]) => make("span", name ? { class: name } : {}, text)),
    make("span", { class: "untrained" }, "not trained on"), make("span", { class: "special" }, "special"));
}

function colour() {
  if (!state.attempt) return;
  const kind = byId("colour").value, given = byId("age-limit").value, limit = given === "" ? Infinity : Number(given);
  let over = 0;
  for (const box of document.querySelectorAll("#turns .response")) {
    const response = state.attempt.turns[box.dataset.turn].response;
    [...box.children].forEach((span, number) => {
      span.classList.remove("l1", "l2", "l3", "l4", "h1", "h2", "h3", "h4", "over");
      const name = kind && response[kind] ? shade(kind, response[kind][number]) : "";
      if (name) span.classList.add(name);
      if (response.ages && response.ages[number] > limit) {
        span.classList.add("over");
        over += 1;
      }
    });
  }
  byId("over").textContent = limit === Infinity ? "" : `${short(over)} ${over === 1 ? "token" : "tokens"} over the limit`;
  byId("next-over").disabled = over === 0;
  legend(kind);
}

function select(span, scrolls) {
  for (const other of document.querySelectorAll("#turns .selected")) other.classList.remove("selected");
  span.classList.add("selected");
  const box = span.parentElement, number = [...box.children].indexOf(span), response = state.attempt.turns[box.dataset.turn].response;
  const of = (name) => (response[name] ? short(response[name][number]) : "–");
  byId("token").textContent = `token ${number + 1} of ${response.pieces.length}: ${visible(JSON.stringify(response.pieces[number]))}, id ${response.ids[number]}, ` +
    `logprob ${of("logprobs")}, gap ${of("gap")}, advantage ${of("advantages")}, age ${of("ages")}${response.trained[number] ? "" : ", not trained on"}`;
  if (scrolls) span.scrollIntoView({ block: "center" });
}

function nextOver() {
  const all = [...document.querySelectorAll("#turns .over")], chosen = document.querySelector("#turns .selected");
  const after = all.find((span) => chosen && chosen.compareDocumentPosition(span) & Node.DOCUMENT_POSITION_FOLLOWING);
  const span = after || all[0];
  if (span) select(span, true);
}

async function showSiblings(self) {
  const box = byId("siblings");
  box.replaceChildren();
  const pin = make("button", { type: "button" }, "Keep to compare");
  pin.addEventListener("click", () => {
    state.pinned = self;
    showSiblings(self).catch(complain);
  });
  box.append(pin);
  const compare = (left, right, text) => make("a", { href: "#diff?" + new URLSearchParams({ run: left.run, step: left.step,
    place: left.place, other_run: right.run, other_step: right.step, other_place: right.place }) }, text);
  const kept = state.pinned;
  if (kept && (kept.run !== self.run || kept.step !== self.step || String(kept.place) !== String(self.place))) {
    box.append(compare(kept, self, `Compare with ${kept.uid} of step ${kept.step}, sample ${kept.sample}`));
  }
  const answer = await ask("rollouts", new URLSearchParams({ run: self.run, min_step: self.step, max_step: self.step, prompt: self.uid, limit: 64, ascending: true }));
  for (const row of answer.rows.filter((other) => other.uid === self.uid && String(other.place) !== String(self.place))) {
    const other = { run: self.run, step: row.step, place: row.place };
    box.append(make("span", {}, make("a", { href: "#attempt?" + attemptQuery(self.run, row) }, `sample ${row.sample} (reward ${short(row.reward)})`),
      " ", compare(self, other, "compare")));
  }
}

// Two attempts

// Split both responses into their common beginning, the different tokens of each, and their common end.
function parts(left, right) {
  const of = (name) => [left, right].map((attempt) => attempt.turns.flatMap((turn) => turn.response[name]));
  const [a, b] = of("ids"), [p, q] = of("pieces"), most = Math.min(a.length, b.length);
  let start = 0, end = 0;
  while (start < most && a[start] === b[start]) start++;
  while (end < most - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  return [["span", p.slice(0, start)], ["del", p.slice(start, p.length - end)], ["ins", q.slice(start, q.length - end)],
    ["span", p.slice(p.length - end)]].filter(([, pieces]) => pieces.length);
}

async function showDiff(query) {
  const other = new URLSearchParams({ run: query.get("other_run"), step: query.get("other_step"), place: query.get("other_place") });
  const own = new URLSearchParams({ run: query.get("run"), step: query.get("step"), place: query.get("place") });
  const [left, right] = await Promise.all([ask("attempt", own), ask("attempt", other)]);
  const side = (attempt, at, mark) => make("div", {}, make("h2", {}, mark, " ",
    make("a", { href: "#attempt?" + at }, `${attempt.uid}, step ${attempt.step}, sample ${attempt.sample}`)), facts(attempt));
  byId("diff").replaceChildren(
    make("div", { class: "sides" }, side(left, own, make("del", {}, "left only")), side(right, other, make("ins", {}, "right only"))),
    make("h3", {}, "Responses, token by token"),
    make("div", { class: "tokens" }, ...parts(left, right).map(([name, pieces]) => make(name, {}, shown(pieces.join(""))))));
}

// Events

byId("metric-search").addEventListener("input", () => showCurves(place().query).catch(complain));
byId("smooth").addEventListener("change", () => showCurves(place().query).catch(complain));
byId("filter").addEventListener("input", changed);
byId("filter").addEventListener("reset", changed);
byId("filter").addEventListener("submit", (event) => event.preventDefault());
for (const [id, by] of [["back", -PAGE], ["forth", PAGE]]) {
  byId(id).addEventListener("click", () => {
    state.offset = Math.max(0, state.offset + by);
    list().then(() => scrollTo(0, 0), complain);
  });
}
byId("colour").addEventListener("change", colour);
byId("age-limit").addEventListener("input", colour);
byId("next-over").addEventListener("click", nextOver);
for (const type of ["pointerover", "click"]) {
  byId("turns").addEventListener(type, (event) => {
    if (event.target.tagName === "SPAN" && event.target.parentElement.classList.contains("response")) select(event.target, false);
  });
}
byId("turns").addEventListener("keydown", (event) => {
  const box = event.target.closest(".response"), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!box || !by) return;
  event.preventDefault();
  const spans = [...box.children], number = spans.findIndex((span) => span.classList.contains("selected"));
  if (spans.length) select(spans[Math.min(spans.length - 1, Math.max(0, number + by))], true);
});
addEventListener("hashchange", show);
refreshRuns().then(show, complain).then(() => setTimeout(poll, POLL_MS));
