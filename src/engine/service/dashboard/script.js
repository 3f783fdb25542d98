
// What comes from the service is only ever set as text: hosts and exceptions choose it.

const most_steps = 2000;     // Of the curves. A service has the last 256.
const most_entries = 200;    // Of the events.
const poll_ms = 1000;
const answer_ms = 20000;     // For an answer that waits for nothing.
const silent_s = 5;          // A runner that gives no sign of life for longer is marked.
const first_pause_s = 1, longest_pause_s = 15;
const smoothing = 0.8;
const parts_of_a_step = ["compute", "reduce", "wait"];

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

function make(tag, name = "", ...parts) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...parts);
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// ---- Numbers as text ----

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const short = (number) => (number < 1e5 ? whole.format(number) : compact.format(number));

function figures(number, digits = 4) {
  if (number === null || number === undefined) return "not finite";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-4) return number.toExponential(digits - 2);
  return number.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
}

function duration(ms) {
  if (ms >= 60000) return [figures(ms / 60000, 3), "min"];
  if (ms >= 1000) return [figures(ms / 1000, 3), "s"];
  return ms >= 1 ? [figures(ms, 3), "ms"] : [figures(ms * 1000, 3), "µs"];
}

function uptime(s) {
  const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min ${Math.floor(s) % 60} s` : `${Math.floor(s)} s`;
}

const with_unit = (node, [number, unit]) => node.replaceChildren(number, make("span", "unit", unit));
const counted = (number, what) => `${short(number)} ${what}${number === 1 ? "" : "s"}`;

function quantile(numbers, part) {
  const sorted = numbers.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] : 0;
}

// ---- Curves ----

const gap = { left: 46, right: 8, top: 8, bottom: 20 };

function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Round numbers from `low` to `high`, about `count` of them.
function ticks(low, high, count, least = 0) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.75));
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; ++i) found.push(i * step || 0);
  return found;
}

// A curve for each of `series`, {name, of: step -> number, thin, from_zero}; or, stacked, bars on each other.
class Chart {
  static all = [];
  static hovered = null;  // The number of the step that the pointer is at: in all charts the same.

  constructor(id, { series, stacked = false, from_zero = true, label, readout }) {
    Object.assign(this, { series, stacked, from_zero, label, readout });
    this.svg = $(id).querySelector("svg");
    this.text = $(id).querySelector(".readout");
    Chart.all.push(this);
    new ResizeObserver(draw_soon).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.hover(null));
  }

  hover(event) {
    Chart.hovered = null;
    if (event && steps.length) {
      const at = this.step_at(event.clientX - this.svg.getBoundingClientRect().left);
      Chart.hovered = steps.reduce((a, b) => (Math.abs(b.step - at) < Math.abs(a.step - at) ? b : a)).step;
    }
    draw_soon();
  }

  bounds() {
    const sums = steps.map((step) => this.series.reduce((sum, { of }) => sum + of(step), 0));
    const values = this.stacked ? sums : steps.flatMap((step) => this.series.map(({ of }) => of(step)));
    const finite = values.filter(Number.isFinite);
    if (!finite.length) return [0, 1];
    // A few steps that took very long, as those with a lost runner, do not flatten the others.
    const high = this.from_zero && finite.length > 20
      ? Math.min(Math.max(...finite), 1.6 * quantile(finite, 0.95)) : Math.max(...finite);
    const low = this.from_zero ? 0 : Math.min(...finite);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [this.from_zero ? 0 : low - room, high + room];
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    const right = width - gap.right, bottom = height - gap.bottom;
    const first = steps.at(0)?.step ?? 0, last = steps.at(-1)?.step ?? 1;
    // Bars need half a step's room on both sides. Few steps do not fill the width.
    const low = first - 0.5, high = Math.max(last, first + 9) + 0.5;
    const [floor, ceiling] = this.bounds();
    const x = (step) => gap.left + ((step - low) / (high - low)) * (right - gap.left);
    const y = (value) =>
      Math.max(gap.top, bottom - ((value - floor) / (ceiling - floor)) * (bottom - gap.top)).toFixed(1);
    this.step_at = (place) => low + ((place - gap.left) / (right - gap.left)) * (high - low);
    const parts = [];
    for (const value of ticks(floor, ceiling, 4)) {
      parts.push(shape("line", { class: "rule", x1: gap.left, x2: right, y1: y(value), y2: y(value) }));
      parts.push(shape("text", { x: gap.left - 8, y: +y(value) + 4, "text-anchor": "end" }, this.label(value)));
    }
    for (const step of ticks(first, Math.max(last, first + 9), width / 90, 1))
      parts.push(shape("text", { x: x(step), y: height - 3, "text-anchor": "middle" }, short(step)));
    if (steps.length) parts.push(...(this.stacked ? this.bars(x, y) : this.lines(x, y, bottom)));
    for (const step of lost_at)
      if (step >= first && step <= last)
        parts.push(shape("line", { class: "mark-lost", x1: x(step), x2: x(step), y1: gap.top, y2: bottom }));
    const hovered = steps.find(({ step }) => step === Chart.hovered);
    if (hovered)
      parts.push(shape("line", { class: "cursor", x1: x(hovered.step), x2: x(hovered.step), y1: gap.top, y2: bottom }));
    this.svg.replaceChildren(...parts);
    say(this.text, hovered ? `step ${whole.format(hovered.step)}: ${this.readout(hovered)}` : "");
  }

  lines(x, y, bottom) {
    const parts = [];
    for (const { name, of, thin } of this.series) {
      const points = steps.filter((step) => Number.isFinite(of(step)))
        .map((step) => `${x(step.step).toFixed(1)},${y(of(step))}`);
      if (!points.length) continue;
      const [from, to] = [points.at(0).split(",")[0], points.at(-1).split(",")];
      if (!thin) {
        const area = `M${from},${bottom}L${points.join("L")}V${bottom}Z`;
        parts.push(shape("path", { class: `under ${name}`, d: area }));
      }
      parts.push(shape("path", { class: `line ${thin ? "thin " : ""}${name}`, d: `M${points.join("L")}` }));
      if (!thin) parts.push(shape("circle", { class: `dot ${name}`, cx: to[0], cy: to[1], r: 3 }));
    }
    return parts;
  }

  bars(x, y) {
    const base = steps.map(() => 0);
    const half = steps.length < 60 ? 0.38 : 0.5;
    return this.series.map(({ name, of }) => {
      const path = steps.map((step, i) => {
        const from = y(base[i]);
        base[i] += of(step);
        return `M${x(step.step - half).toFixed(1)},${from}V${y(base[i])}H${x(step.step + half).toFixed(1)}V${from}Z`;
      });
      return shape("path", { class: `bars ${name}`, d: path.join("") });
    });
  }
}

// ---- What is known ----

let token = sessionStorage.getItem("token") ?? "";
let status = null;
let steps = [];                // Those that counted, by their number, oldest first.
let lost_at = new Set();       // The steps in which a runner was lost.
let position = "0.0";          // The id of the last event.
let host_seen;                 // Undefined until the service has said it.
let entries = [];              // Of the events, oldest first.

function add_step(step) {
  if (!step.counted) {
    add_entry({ time_s: step.time_s, kind: "failed", tag: ["warn", "step"],
                text: `Step ${whole.format(step.step)} does not count: ${step.status}` });
    return;
  }
  // A run that was resumed from an earlier step makes some steps again.
  while (steps.length && steps.at(-1).step >= step.step) steps.pop();
  step.throughput = (step.samples / step.step_ms) * 1000;
  for (const name of ["loss", "throughput"]) {
    const before = steps.at(-1)?.[`smooth_${name}`];
    step[`smooth_${name}`] = Number.isFinite(before) && Number.isFinite(step[name])
      ? smoothing * before + (1 - smoothing) * step[name] : step[name];
  }
  steps.push(step);
  if (steps.length > most_steps) steps.shift();
  const last = entries.findLast(({ time_s }) => time_s <= step.time_s);
  if (last?.kind === "steps" && last.to < step.step) {
    Object.assign(last, { time_s: step.time_s, to: step.step });
    last.text = `Steps ${whole.format(last.from)} to ${whole.format(step.step)}, loss ${figures(step.loss)}`;
    show_entry(last);
  } else {
    add_entry({ time_s: step.time_s, kind: "steps", tag: ["", "steps"], from: step.step, to: step.step,
                text: `Step ${whole.format(step.step)}, loss ${figures(step.loss)}` });
  }
}

function add_incident(incident) {
  const who = incident.rank < 0 ? "The fork server" : `Runner ${incident.rank}`;
  const where = incident.phase ? ` in phase ${incident.phase} of attempt ${incident.attempt}` : "";
  lost_at.add(incident.step);
  add_entry({ time_s: incident.time_s, kind: "lost", tag: ["bad", "lost"],
              text: `${who} (pid ${incident.pid}) was lost${where}: ${incident.exit}`,
              what: incident.what, log: incident.log });
}

function see_host({ host }) {
  if (host_seen !== undefined && host?.lease !== host_seen?.lease)
    add_own("host", host ? `${host.name} (pid ${host.pid}) drives the session` : `${host_seen.name} has left`);
  host_seen = host;
}

// ---- The list of events ----

const add_own = (kind, text, style = "own") =>
  add_entry({ time_s: Date.now() / 1000, kind, tag: [style, kind], text });

function add_entry(entry) {
  const place = entries.findLastIndex(({ time_s }) => time_s <= entry.time_s) + 1;
  entry.node = make("li");
  // The newest is first in the list.
  if (place === entries.length) $("events").prepend(entry.node);
  else entries[place].node.after(entry.node);
  entries.splice(place, 0, entry);
  show_entry(entry);
  if (entries.length > most_entries) entries.shift().node.remove();
}

function show_entry(entry) {
  const date = new Date(entry.time_s * 1000);
  const time = make("time", "", date.toLocaleTimeString("en-GB"));
  time.dateTime = date.toISOString();
  time.title = date.toLocaleString();
  const [style, word] = entry.tag;
  entry.node.replaceChildren(time, make("span", `tag ${style}`, word), make("p", "", entry.text));
  const more = [entry.what, entry.log].filter(Boolean);
  if (more.length)
    entry.node.append(make("details", "", make("summary", "", entry.what ? "What it said" : "Its last log lines"),
                           ...more.map((text) => make("pre", "", text.trimEnd()))));
}

// ---- The service's answers ----

class Gone extends Error {}
const gone = () => {
  throw new Gone("the service does not answer");
};

class Refused extends Error {
  constructor(status, { message, hint }) {
    super(hint ? `${message} (${hint})` : message);
    this.status = status;
  }
}

async function ask(method, target, { body, header, signal } = {}) {
  const answer = await fetch(target, {
    method, signal, cache: "no-store",
    headers: { ...(token && { Authorization: `Bearer ${token}` }), ...header },
    body: body === undefined ? undefined : JSON.stringify(body),
  }).catch(gone);
  if (answer.ok) return answer;
  const text = await answer.text().catch(gone);
  let error = { message: `the answer was ${answer.status}` };
  try {
    error = JSON.parse(text).error;
  } catch {
    // A proxy's answer is no JSON.
  }
  throw new Refused(answer.status, error);
}

async function look(signal) {
  const limit = AbortSignal.any([signal, AbortSignal.timeout(answer_ms)]);
  const answer = await ask("GET", "/v1/status", { signal: limit });
  take_status(await answer.json().catch(gone));
}

function take_status(now) {
  const is_other = status && (now.run_id !== status.run_id || now.pid !== status.pid || now.uptime_s < status.uptime_s);
  if (is_other) {
    add_own("service", `Another service answers: process ${now.pid}, run ${now.run_id}, after step ${now.steps}`);
    position = "0.0";
    host_seen = undefined;
    if (now.run_id !== status.run_id) [steps, lost_at] = [[], new Set()];
    steps = steps.filter(({ step }) => step <= now.steps);  // The others are lost.
  } else if (status) {
    for (const runner of now.runners) {
      const before = status.runners.find(({ rank }) => rank === runner.rank);
      if (runner.state === "ready" && (before?.pid !== runner.pid || before.state !== "ready"))
        add_own("runner", `Runner ${runner.rank} is ready: process ${runner.pid}`, "good");
    }
  }
  status = now;
  draw_soon();
}

// https://html.spec.whatwg.org/multipage/server-sent-events.html, as this service writes them.
async function* events_of(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read().catch(gone);
    if (done) gone();
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const lines of events)
      yield Object.fromEntries(lines.split("\n").map((line) => {
        const colon = line.indexOf(": ");
        return [line.slice(0, colon), line.slice(colon + 2)];
      }));
  }
}

async function follow(signal) {
  const answer = await ask("GET", "/v1/events", { header: { "Last-Event-ID": position }, signal });
  const take = { step: add_step, incident: add_incident, host: see_host,
                 closing: ({ why }) => add_own("service", `The service ends: ${why}`, "warn") };
  for await (const { event, id, data } of events_of(answer)) {
    take[event]?.(JSON.parse(data));
    position = id;
    draw_soon();
  }
}

async function poll(signal) {
  for (;;) {
    await sleep(poll_ms);
    if (signal.aborted) return;
    if (!document.hidden) await look(signal);
  }
}

// Shows the service until something fails, and throws that.
async function watch(connected) {
  const leave = new AbortController();
  try {
    await look(leave.signal);
    connected();
    await Promise.all([follow(leave.signal), poll(leave.signal)]);
  } finally {
    leave.abort();
  }
}

async function main() {
  let pause_s = first_pause_s;
  for (;;) {
    try {
      await watch(() => {
        pause_s = first_pause_s;
        show_view();
      });
    } catch (error) {
      if (error.status === 401) {
        await ask_for_token();
      } else {
        if (!(error instanceof Gone || error instanceof Refused)) reportError(error);  // A defect of this script.
        await wait_for_service(error, pause_s);
        pause_s = Math.min(2 * pause_s, longest_pause_s);
      }
    }
  }
}

function show_view() {
  $("gone").hidden = $("login").hidden = true;
  $("view").hidden = $("state").hidden = false;
  $("forget").hidden = !token;
  $("view").classList.remove("stale");
  draw_soon();
}

function ask_for_token() {
  say($("login-error"), token ? "The service does not take this token." : "");
  token = "";
  sessionStorage.removeItem("token");
  $("gone").hidden = $("view").hidden = $("state").hidden = $("forget").hidden = true;
  $("login").hidden = false;
  $("token").focus();
  return new Promise((done) => {
    $("login").onsubmit = (event) => {
      event.preventDefault();
      token = $("token").value.trim();
      $("token").value = "";
      sessionStorage.setItem("token", token);
      done();
    };
  });
}

// Returns after the pause, or when the reader wants it.
async function wait_for_service(error, pause_s) {
  const why = error instanceof Refused ? `The service refuses: ${error.message}.` : "The service is gone.";
  say($("gone-why"), why);
  $("gone").hidden = false;
  $("view").classList.add("stale");
  draw_soon();
  let is_asked = false;
  const asked = new Promise((done) => ($("gone-now").onclick = () => done((is_asked = true))));
  for (let left = pause_s; left > 0 && !is_asked; --left) {
    say($("gone-wait"), `Trying again in ${left} s.`);
    await Promise.race([sleep(1000), asked]);
  }
  say($("gone-wait"), "Trying again …");
}

// ---- Actions ----

const busy = new Set();  // The requests that are under way.

async function act(name, what, target, body) {
  busy.add(name);
  draw_soon();
  report(`${what} …`);
  try {
    const answer = await ask("POST", target, { body });
    const { path } = await answer.json().catch(gone);
    report(`${what}: done.`);
    add_own("you", path ? `${what}: ${path}` : what);
  } catch (error) {
    report(`${what}: ${error.message}`, true);
    add_own("you", `${what}: ${error.message}`, "warn");
  }
  busy.delete(name);
  draw_soon();
}

function report(text, failed = false) {
  say($("result"), text);
  $("result").classList.toggle("error", failed);
}

function on_submit(id, action) {
  $(id).addEventListener("submit", (event) => {
    event.preventDefault();
    action(new FormData(event.target));
  });
}
on_submit("step", (form) => {
  const count = Number(form.get("count"));
  act("step", `Making ${counted(count, "step")}`, "/v1/step", { count });
});
on_submit("resize", (form) => {
  const runners = Number(form.get("runners"));
  act("resize", `Running ${counted(runners, "runner")}`, "/v1/resize", { runners });
});
$("checkpoint").addEventListener("click", () => act("checkpoint", "Writing a checkpoint", "/v1/checkpoint", {}));
$("stop").addEventListener("click", () => {
  const { host, checkpoint_directory } = status;
  const hosted = host && !is_own(host);
  say($("stop-notes"), hosted ? `${host.name} (pid ${host.pid}) is told to leave.`
    : checkpoint_directory ? "A checkpoint is written if the last step has none." : "No checkpoint is written.");
  $("stop-dialog").showModal();
});
$("stop-no").addEventListener("click", () => $("stop-dialog").close());
$("stop-yes").addEventListener("click", () => {
  $("stop-dialog").close();
  act("stop", "Stopping the service", "/v1/stop", {});
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem("token");
  location.reload();
});

// The theme is that of the system until somebody chooses another one.
const system_is_dark = matchMedia("(prefers-color-scheme: dark)");
function show_theme() {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  const is_dark = theme ? theme === "dark" : system_is_dark.matches;
  say($("theme"), is_dark ? "Light" : "Dark");
  $("theme").title = `Show the ${is_dark ? "light" : "dark"} theme`;
  $("theme").onclick = () => {
    localStorage.setItem("theme", is_dark ? "light" : "dark");
    show_theme();
  };
}
system_is_dark.addEventListener("change", show_theme);
show_theme();

// ---- The page ----

const is_own = (host) => host.pid === status.pid;

function draw_state() {
  const is_gone = !$("gone").hidden;
  const [word, style] = is_gone ? ["gone", "bad"] : !status.ready ? ["not ready", "warn"]
    : status.stepping ? ["stepping", "good"] : ["ready", "good"];
  say($("state"), word);
  $("state").className = `pill ${style}`;
  $("state").title = status.why_not_ready ?? "";
  say($("subject"), `${status.model} on ${status.data}, run ${status.run_id}`);
  document.title = `${is_gone ? "gone" : `step ${whole.format(status.steps)}`} · ${status.model} · accelmgr`;
}

function draw_tiles() {
  const last = steps.at(-1);
  const recent = steps.slice(-50);
  // Events come sooner than the next status.
  say($("steps"), whole.format(Math.max(status.steps, last?.step ?? 0)));
  say($("attempts"), `of ${counted(Math.max(status.attempts, last?.attempt ?? 0), "attempt")}`);
  say($("loss"), last ? figures(last.loss) : "–");
  const [first] = steps;
  say($("loss-change"), steps.length > 1 ? `from ${figures(first.loss)} at step ${whole.format(first.step)}` : "");
  say($("throughput"), last ? figures(quantile(recent.map((step) => step.throughput), 0.5), 3) : "–");
  if (last) with_unit($("step-time"), duration(quantile(recent.map((step) => step.step_ms), 0.5)));
  else say($("step-time"), "–");
  say($("samples"), short(status.samples));
  say($("samples-step"), last ? `${short(last.samples)} in the last step` : "");
  const team = status.runners.filter((runner) => runner.in_team);
  $("ready").replaceChildren(`${team.filter(({ state }) => state === "ready").length}`,
                             make("span", "unit", `of ${team.length} ready`));
  say($("losses"), status.losses ? `${short(status.losses)} lost so far` : "none lost");
}

// The shares of the last steps; the times of the step that the pointer is at.
function draw_shares() {
  const hovered = steps.find(({ step }) => step === Chart.hovered);
  const recent = steps.slice(-50);
  const all = recent.reduce((sum, step) => sum + step.step_ms, 0);
  for (const part of parts_of_a_step) {
    const share = recent.reduce((sum, step) => sum + step[`${part}_ms`], 0) / all;
    say($(`${part}-share`), hovered ? duration(hovered[`${part}_ms`]).join(" ")
      : recent.length ? `${figures(100 * share, share >= 0.1 ? 2 : 1)}%` : "");
  }
}

function health_of(runner) {
  if (!runner.in_team) return [runner.state, ""];
  if (runner.state === "ready" && runner.silent_s > silent_s) return [`silent for ${uptime(runner.silent_s)}`, "warn"];
  return [runner.state, { ready: "good", lost: "bad" }[runner.state] ?? "warn"];
}

function queue_of({ queued_batches: full, queue_slots: slots }) {
  const queue = make("span", "queue");
  if (slots <= 12) {
    queue.append(make("span", "slots", ...Array.from({ length: slots }, (_, i) => make("i", i < full ? "full" : ""))));
  } else {
    const meter = make("meter");
    [meter.max, meter.value] = [slots, full];
    queue.append(meter);
  }
  queue.append(make("span", "soft", `${full} of ${slots}`));
  return queue;
}

// The buttons of the runners stay what they are, so that one keeps the focus while the rest is drawn anew.
const restart_buttons = new Map();
function restart_button(rank) {
  if (!restart_buttons.has(rank)) {
    const button = make("button", "small", "Restart");
    button.type = "button";
    button.setAttribute("aria-label", `Restart runner ${rank}`);
    button.addEventListener("click", () =>
      act(`restart ${rank}`, `Restarting runner ${rank}`, `/v1/restart?rank=${rank}`));
    restart_buttons.set(rank, button);
  }
  return restart_buttons.get(rank);
}

function draw_runners() {
  const body = $("runners").tBodies[0];
  while (body.rows.length > status.runners.length) body.deleteRow(-1);
  status.runners.forEach((runner, i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      for (let cell = 0; cell < 7; ++cell) row.insertCell();
    }
    const [word, style] = health_of(runner);
    const parts = [
      `Runner ${runner.rank}`, make("span", `pill ${style}`, word), runner.phase, queue_of(runner),
      short(runner.samples), make("span", "soft", `pid ${runner.pid}`), restart_button(runner.rank),
    ];
    parts.forEach((part, cell) => {
      const old = row.cells[cell];
      if (typeof part === "string") say(old, part);
      else if (!old.firstChild?.isEqualNode(part)) old.replaceChildren(part);
    });
    restart_button(runner.rank).disabled = !can_ask() || !runner.in_team || busy.has(`restart ${runner.rank}`);
  });
}

const can_ask = () => $("gone").hidden && status.ready;

function draw_actions() {
  const host = status.host;
  const why_no_step = !can_ask() ? status.why_not_ready ?? "The service is gone."
    : host && !is_own(host) ? `Steps are made by ${host.name} (pid ${host.pid}), which drives the session.`
    : status.unfinished ? `No step can be made: ${status.unfinished}.` : "";
  const why_no_checkpoint = status.checkpoint_directory ? ""
    : "There is no folder for checkpoints (checkpoint.directory).";
  const is_stepping = busy.has("step");
  const disable = (button, is_disabled, why = "") => Object.assign(button, { disabled: is_disabled, title: why });
  disable($("step").querySelector("button"), why_no_step !== "" || is_stepping, why_no_step);
  disable($("resize").querySelector("button"), !can_ask() || busy.has("resize") || status.max_runners === 1);
  const is_writing = is_stepping || busy.has("checkpoint");
  disable($("checkpoint"), !can_ask() || is_writing || why_no_checkpoint !== "", why_no_checkpoint);
  disable($("stop"), !$("gone").hidden || busy.has("stop"));
  const input = $("resize").elements.runners;
  if (input.max !== `${status.max_runners}`) {
    input.max = status.max_runners;
    input.value = status.runners.filter((runner) => runner.in_team).length;
  }
  say($("max-runners"), `${status.max_runners}`);
  say($("why-not"), [why_no_step, why_no_checkpoint].filter(Boolean).join(" "));
}

function draw_facts(list, facts, note = "") {
  const parts = facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", `${value}`)]);
  if (note) parts.push(make("p", "", note));
  if (parts.map((part) => part.textContent).join("\n") !== list.dataset.shown) list.replaceChildren(...parts);
  list.dataset.shown = parts.map((part) => part.textContent).join("\n");
}

function draw_host_and_service() {
  const { host } = status;
  const hosted = host && !is_own(host);
  draw_facts($("host"), hosted
    ? [["Name", host.name], ["Process", host.pid], ["Lease", host.lease],
       ["State", host.leaving ? "is ending" : "drives the session"]]
    : [["Leases so far", status.leases]],
    status.unfinished ? status.unfinished : hosted ? "" : host ? "The service makes steps by itself."
      : "No program drives the session. The next one may attach.");
  draw_facts($("service"), [
    ["Run", status.run_id], ["Up", uptime(status.uptime_s)], ["Process", status.pid], ["Version", status.version],
    ["Shared memory", `${figures(status.session_bytes / 2 ** 20, 3)} MiB`],
    ["Parameter version", whole.format(status.parameter_version)], ["Elements", short(status.elements)],
    ["Skipped attempts", status.skips], ["Lost processes", status.losses], ["Replaced runners", status.replacements],
    ["Checkpoints", status.checkpoint_directory ?? "none"],
  ]);
}

const raw_and_smooth = (name) => [
  { name, of: (step) => step[name], thin: true }, { name, of: (step) => step[`smooth_${name}`] },
];
const charts = [
  new Chart("loss-chart", {
    series: raw_and_smooth("loss"), from_zero: false,
    label: (value) => figures(value, 3), readout: (step) => figures(step.loss),
  }),
  new Chart("throughput-chart", {
    series: raw_and_smooth("throughput"),
    label: short, readout: (step) => `${figures(step.throughput, 3)} samples/s`,
  }),
  new Chart("time-chart", {
    series: parts_of_a_step.map((name) => ({ name, of: (step) => step[`${name}_ms`] })),
    stacked: true, label: (ms) => { const [number, unit] = duration(ms); return ms ? `${+number} ${unit}` : "0"; },
    readout: (step) => duration(step.step_ms).join(" "),
  }),
];

let is_drawing = false;
function draw_soon() {
  if (is_drawing || !status) return;
  is_drawing = true;
  requestAnimationFrame(() => {
    is_drawing = false;
    if ($("view").hidden) return;
    draw_state();
    draw_tiles();
    draw_shares();
    for (const chart of charts) chart.draw();
    draw_runners();
    draw_actions();
    draw_host_and_service();
  });
}

main();
