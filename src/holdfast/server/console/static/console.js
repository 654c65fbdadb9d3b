// What all pages share: the theme, the keyboard, parts that renew themselves, and acts that ask first.

const find = (selector) => document.querySelector(selector);

export function toast(text, bad = false) {
  const made = document.createElement("div");
  made.className = bad ? "toast bad" : "toast";
  made.textContent = text;
  find("#toasts").append(made);
  setTimeout(() => made.remove(), bad ? 12000 : 5000);
}

// Characters that nobody sees, and those that turn the direction of text around, are written as the server writes them.
// eslint-disable-next-line no-control-regex, no-misleading-character-class
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
export const visible = (words) => words.replace(UNSEEN, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);

// With this header the server does not make the browser ask for a password on top of the page.
const OURS = { "x-requested-with": "holdfast-console" };
const SIGNED_OUT = "Your token is no longer accepted: it was revoked or has expired.";

// A call of the API; what went wrong is an Error with the server's own sentence.
export async function call(method, url, body, { accept = "application/json", signal } = {}) {
  const options = { method, signal, headers: { accept, ...OURS } };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(url, options);
  } catch {
    const doubt = method === "GET" ? "" : " The change may or may not have been made: check before you try again.";
    throw new Error(`The server does not answer.${doubt}`);
  }
  if (answer.status === 401) throw new Error(`${SIGNED_OUT} Reload the page to sign in again.`);
  if (!answer.ok) {
    const answered = await answer.json().catch(() => null);
    throw new Error(sentence(answered?.error?.message ?? `The server answered with status ${answer.status}`));
  }
  return answer;
}

// An error of the server as a sentence.
const sentence = (words) => words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");

export const number = (value) => value.toLocaleString("en-US");

// Theme: the system's, until somebody chooses.
find("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("holdfast-theme", root.dataset.theme);
  } catch {
    // It holds for this page only.
  }
});

// Where a row of links is wider than a phone, the one for this page is shown.
for (const link of document.querySelectorAll("nav a[aria-current]")) {
  const row = link.parentElement;
  row.scrollLeft = link.offsetLeft - row.offsetLeft - (row.clientWidth - link.offsetWidth) / 2;
}

// Live parts: the page is fetched again, and each part that has changed takes the place of the old one.
const live = [...document.querySelectorAll("[data-live]")].filter((part) => part.id);
const every = Math.min(...live.map((part) => Number(part.dataset.live) || Infinity));
const updates = find("#updates");
const kept = { // what was chosen in this tab; where the browser keeps nothing, it holds for this page
  get: () => { try { return sessionStorage.getItem("holdfast-paused") === "yes"; } catch { return false; } },
  set: (value) => { try { sessionStorage.setItem("holdfast-paused", value ? "yes" : "no"); } catch { /* as said */ } },
};
let paused = kept.get();

function showPaused() {
  updates.hidden = !live.length;
  updates.setAttribute("aria-pressed", String(paused));
  updates.title = paused ? "Live updates are paused; resume (p)" : "Pause live updates (p)";
}

function pauseOrResume() {
  paused = !paused;
  kept.set(paused);
  showPaused();
  toast(paused ? "Live updates are paused; press p to resume" : "Live updates resumed");
  if (!paused) renew().catch(() => {});
}
updates.addEventListener("click", pauseOrResume);
showPaused();

// The server answers 304 to a page on which nothing has changed but how long ago things were; those we know ourselves.
let etag = "";
let ahead = 0; // how far the server's clock is ahead of ours, in milliseconds
readClock(document);

function readClock(page) {
  const at = Number(page.getElementById("live-note")?.dataset.at);
  if (at) ahead = at - Date.now();
}

class Outdated extends Error {
  constructor(status, words) {
    super(words);
    this.status = status; // 0: no answer
  }
}

async function fetchPage() {
  const headers = { accept: "text/html", ...OURS };
  if (etag) headers["if-none-match"] = etag;
  try {
    return await fetch(location.href, { headers });
  } catch {
    throw new Outdated(0, "");
  }
}

export async function renew() {
  const answer = await fetchPage();
  if (answer.status === 304) return tick();
  const fresh = new DOMParser().parseFromString(await answer.text().catch(() => ""), "text/html");
  if (!answer.ok) throw new Outdated(answer.status, fresh.querySelector("#error-text")?.textContent ?? "");
  etag = answer.headers.get("etag") ?? "";
  readClock(fresh);
  for (const old of document.querySelectorAll("[data-live]")) {
    const found = fresh.getElementById(old.id);
    if (!found || found.isEqualNode(old)) continue;
    const focused = old.contains(document.activeElement) ? focusName(document.activeElement) : null;
    const lefts = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
    const opened = [...old.querySelectorAll("details")].map((part) => part.open);
    const taken = document.importNode(found, true);
    old.replaceWith(taken);
    taken.querySelectorAll(".scroll").forEach((part, i) => { part.scrollLeft = lefts[i] ?? 0; });
    taken.querySelectorAll("details").forEach((part, i) => { part.open = opened[i] ?? false; });
    if (focused) taken.querySelector(focused)?.focus({ preventScroll: true });
  }
  const note = fresh.getElementById("live-note");
  if (note) find("#live-note").textContent = note.textContent;
  return undefined;
}

// Why this page is out of date, at its top, until it is not.
const problem = find("#live-problem");
const again = find("#live-reload");
let since = null;
again.addEventListener("click", () => location.reload());

function sayOutdated({ status, message }) {
  since ??= new Date(Date.now() + ahead).toISOString().slice(11, 19);
  const why = {
    0: `The server has not answered since ${since} UTC. This page is out of date; it updates itself as soon as the server is back.`,
    401: `${SIGNED_OUT} This page is out of date.`,
  }[status] ?? `This page is out of date. ${message || `The server answered with status ${status}.`}`;
  const words = find("#live-problem-text");
  if (words.textContent !== why) words.textContent = why; // said once to those who listen
  again.hidden = status !== 401;
  problem.hidden = false;
  document.body.classList.add("stale");
}

function sayFresh() {
  if (!since) return;
  since = null;
  problem.hidden = true;
  document.body.classList.remove("stale");
  toast("This page is up to date again");
}

// Ages as the server writes them, for times that say their moment.
function age(seconds) {
  if (seconds < 1) return "0 s";
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${number(Math.round(seconds / length))} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

function tick() {
  const now = Date.now() + ahead;
  for (const time of document.querySelectorAll("time[datetime]")) {
    const away = (now - Date.parse(time.dateTime.replace(" ", "T"))) / 1000;
    if ("lasts" in time.dataset) time.textContent = age(away);
    else time.textContent = away >= 0 ? `${age(away)} ago` : `in ${age(-away)}`;
  }
  find("#live-note").textContent = `as of ${new Date(now).toISOString().slice(11, 19)} UTC`;
}

// Times are written in UTC; whoever points at one sees it on their own clock as well.
document.addEventListener("pointerover", (event) => {
  const time = event.target.closest?.("time[datetime]");
  if (!time) return;
  const own = new Date(time.dateTime.replace(" ", "T")).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
  time.title = `${time.dateTime}\n${own} (${Intl.DateTimeFormat().resolvedOptions().timeZone})`;
});

function focusName(element) {
  if (element.id) return `#${CSS.escape(element.id)}`;
  const href = element.getAttribute("href");
  if (href) return `a[href="${CSS.escape(href)}"]`;
  const url = element.dataset.url;
  return url ? `[data-url="${CSS.escape(url)}"][data-body="${CSS.escape(element.dataset.body ?? "")}"]` : null;
}

function busy() {
  const chosen = getSelection();
  return paused || document.hidden || document.querySelector("input[data-choose]:checked") || document.querySelector("dialog[open]") || (chosen && !chosen.isCollapsed);
}

// A page that takes the server long is asked for less often: at most a twentieth of the time.
async function keepFresh() {
  const began = performance.now();
  if (!busy()) {
    try {
      await renew();
      sayFresh();
    } catch (error) {
      sayOutdated(error instanceof Outdated ? error : new Outdated(-1, error.message));
      if (error.status === 401) return; // only signing in again helps
    }
  }
  setTimeout(keepFresh, Math.max(every * 1000, 20 * (performance.now() - began)));
}
if (Number.isFinite(every)) setTimeout(keepFresh, every * 1000);

// Acts: a dialog that says what will happen, to how many, and then how far it is.
const ask = find("#ask");
const yes = find("#ask-yes");
const no = find("#ask-no");
const text = find("#ask-text");
const list = find("#ask-list");
const progress = find("#ask-progress");
const elsewhere = find("#ask-to");
const elsewhereName = find("#ask-to-name");
const limited = find("#ask-rate");
const limitedTo = find("#ask-rate-number");
const why = find("#ask-why");
const reason = find("#ask-reason");
const typed = find("#ask-value");
const typedText = find("#ask-value-text");
let onYes = null;
let running = false;
let stopping = null; // an AbortController while what runs can be stopped

function open(title, verb, danger) {
  find("#ask-title").textContent = title;
  yes.textContent = verb;
  yes.hidden = false;
  yes.className = danger ? "primary danger" : "primary";
  no.textContent = "Cancel";
  list.replaceChildren();
  progress.hidden = true;
  elsewhere.hidden = limited.hidden = why.hidden = typed.hidden = true;
  elsewhereName.value = limitedTo.value = reason.value = "";
  text.className = "";
  ask.showModal();
}

function tell(words, bad = false) {
  text.textContent = words;
  text.className = bad ? "bad" : "";
}

function finish(words, bad = false) {
  running = false;
  stopping = null;
  tell(words, bad);
  yes.hidden = true;
  no.disabled = false;
  no.textContent = "Close";
  no.focus();
}

no.addEventListener("click", () => (running ? stopping?.abort() : ask.close()));
ask.addEventListener("cancel", (event) => running && event.preventDefault());
yes.addEventListener("click", async () => {
  if (running || !onYes) return;
  running = true;
  yes.disabled = no.disabled = true;
  try {
    await onYes();
  } catch (error) {
    finish(error.message, true);
  }
});
ask.addEventListener("close", () => {
  for (const box of document.querySelectorAll("input[data-choose]:checked, #choose-all:checked")) box.checked = false;
  countChosen();
  onYes = null;
  no.disabled = false;
  if (live.length) renew().catch(() => {});
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (event.target.id === "choose-all") {
    for (const box of document.querySelectorAll("input[data-choose]")) box.checked = event.target.checked;
  }
  if (event.target.closest("#choose-all, input[data-choose]")) countChosen();
  if (button) begin(button.dataset).catch((error) => finish(error.message, true));
  const copied = event.target.closest("[data-copy]");
  if (copied) copy(copied);
});

// Rows that were chosen: their ids are what the buttons for them act on.
function countChosen() {
  const ids = [...document.querySelectorAll("input[data-choose]:checked")].map((box) => box.value);
  for (const button of document.querySelectorAll("[data-chosen]")) {
    button.disabled = !ids.length;
    button.dataset.body = JSON.stringify({ ...JSON.parse(button.dataset.chosen), ids });
  }
  const said = find("#chosen-count");
  if (said) said.textContent = ids.length ? `${number(ids.length)} selected` : "";
}

async function begin(act) {
  if (act.act === "redrive" || act.act === "purge") return many(act);
  if (act.act === "each") return each(act);
  open(act.title, act.verb, act.method === "DELETE" || "danger" in act);
  tell(act.text);
  why.hidden = act.asks !== "reason";
  typed.hidden = act.asks !== "value" && act.asks !== "name";
  find("#ask-value-name").textContent = act.asks === "name" ? `Type ${act.name} to confirm` : act.name;
  typedText.value = act.value ?? "";
  yes.disabled = act.asks === "name";
  typedText.oninput = () => { yes.disabled = act.asks === "name" && typedText.value !== act.name; };
  (typed.hidden ? no : typedText).focus();
  onYes = async () => {
    const body = act.body ? JSON.parse(act.body) : undefined;
    if (body && !why.hidden) body.reason = reason.value.trim();
    if (body && act.asks === "value") body.settings = { [act.name]: value(typedText.value.trim()) };
    const answer = await call(act.method, act.url, body);
    const answered = answer.status === 204 ? {} : await answer.json();
    if (act.then) return location.assign(act.then); // with the dialog open: what it was about may be gone
    ask.close();
    running = false;
    return toast(isLate(answered) ? act.late : act.done, isLate(answered));
  };
}

const isLate = (answered) => [answered.cancelled, answered.changed, answered.released].includes(false);

// A setting as it is written: JSON, or a plain text.
function value(written) {
  try {
    return JSON.parse(written);
  } catch {
    return written;
  }
}

async function many(act) {
  const body = JSON.parse(act.body);
  const drops = act.act === "purge";
  open(act.title, act.verb, drops);
  yes.disabled = true;
  tell("Counting…");
  const dry = await (await call("POST", act.url, { ...body, dry_run: true })).json();
  const letters = dry.matched === 1 ? "1 dead letter" : `${number(dry.matched)} dead letters`;
  if (!dry.matched) return finish("No dead letters match now: they were redriven or purged.");
  tell(drops
    ? `${letters} will be deleted. This cannot be undone.`
    : `${letters} will be redriven, each once, in the order in which they were sent.`);
  name(dry.ids ?? [], dry.matched);
  elsewhere.hidden = limited.hidden = drops;
  yes.textContent = `${act.verb} ${number(dry.matched)}`;
  yes.disabled = false;
  no.focus();
  onYes = async () => {
    const to = elsewhereName.value.trim();
    if (!drops && to) body.to = to;
    if (!drops && Number(limitedTo.value) > 0) body.rate = Number(limitedTo.value);
    elsewhere.hidden = limited.hidden = true;
    const done = drops ? (await (await call("POST", act.url, body)).json()).done : await redrive(act.url, body);
    finish(`${number(done)} ${drops ? "purged" : to ? `redriven to ${to}` : "redriven"}.`);
    if (act.follow && !to) location.assign(`${act.follow}&${new URLSearchParams({ ids: dry.ids.join(",") })}`);
    else if (act.then) location.assign(act.then);
  };
}

// One call for each of the rows that were chosen: those that come too late are counted apart.
function each(act) {
  const { ids } = JSON.parse(act.body);
  const messages = ids.length === 1 ? "1 message" : `${number(ids.length)} messages`;
  open(act.title, `${act.verb} ${messages}`, act.method === "DELETE");
  tell(`${messages}: ${act.text}`);
  name(ids, ids.length);
  yes.disabled = false;
  no.focus();
  onYes = async () => {
    let [done, late] = [0, 0];
    progress.hidden = false;
    progress.max = ids.length;
    for (const id of ids) {
      const answered = await (await call(act.method, act.url.replace("{id}", encodeURIComponent(id)))).json();
      if (isLate(answered)) late += 1;
      else done += 1;
      progress.value = done + late;
      tell(`${number(done + late)} of ${messages}`);
    }
    finish(`${number(done)} ${act.done}.${late ? ` ${number(late)} too late: ${act.late ?? "a worker has them, or they are done"}.` : ""}`);
  };
}

// The first few of those that an act is about.
function name(ids, count) {
  const lines = ids.slice(0, 10);
  if (count > 10) lines.push(`and ${number(count - 10)} more`);
  list.replaceChildren(...lines.map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
}

// Redrives letters, and says how far it is; whoever stops it keeps the rest as dead letters.
async function redrive(url, body) {
  stopping = new AbortController();
  no.disabled = false;
  no.textContent = "Stop";
  let done = 0;
  try {
    const answer = await call("POST", url, body, { accept: "application/x-ndjson", signal: stopping.signal });
    progress.hidden = false;
    for await (const answered of linesOf(answer)) {
      if (answered.error) throw new Error(`${number(done)} redriven, then: ${answered.error.message}`);
      done = answered.done;
      progress.max = Math.max(answered.matched, 1);
      progress.value = done;
      const left = body.rate && done < answered.matched ? `; about ${age((answered.matched - done) / body.rate)} left` : "";
      tell(`${number(done)} of ${number(answered.matched)} redriven${left}`);
    }
  } catch (error) {
    if (stopping.signal.aborted) throw new Error(`Stopped: ${number(done)} redriven. The rest are still dead letters.`);
    throw error;
  }
  return done;
}

async function* linesOf(answer) {
  const parts = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value: part, done: ended } = await parts.read().catch(() => {
      throw new Error("The connection was lost before the end. What was not redriven is still a dead letter.");
    });
    if (ended) return;
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) yield JSON.parse(line);
  }
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    toast("Copied");
  } catch {
    getSelection().selectAllChildren(source);
    toast("The text is selected: press Ctrl+C to copy it");
  }
}

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submits]")) event.target.form.submit();
});

find("#new-queue")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = encodeURIComponent(find("#new-name").value.trim());
  try {
    await call("PUT", `/v1/queues/${name}`, {});
    location.assign(`/ui/queues/${name}`);
  } catch (error) {
    find("#new-problem").textContent = error.message;
  }
});

// Keyboard.
const PLACES = Object.fromEntries([...document.querySelectorAll(".top nav a")].map((link) => [link.dataset.key, link.getAttribute("href")]));
const keys = find("#keys");
find("#help").addEventListener("click", () => keys.showModal());
let going = -Infinity;

function move(step) {
  const rows = [...document.querySelectorAll("a.row")].filter((row) => row.offsetParent);
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + step, 0), rows.length - 1);
  rows[next].focus();
}

// What a key means that nobody types; answers whether it was one of ours.
function press(key, at) {
  if (document.querySelector("dialog[open]")) return false;
  if (at - going < 1500 && PLACES[key]) {
    location.assign(PLACES[key]);
    return true;
  }
  going = -Infinity;
  switch (key) {
    case "g": going = at; break;
    case "j": move(1); break;
    case "k": move(-1); break;
    case "?": keys.showModal(); break;
    case "/": {
      const filter = find("#filter") ?? find("#find");
      if (!filter) return false;
      filter.focus();
      filter.select();
      return true;
    }
    case "p": {
      const button = find("#pause");
      if (button) button.click();
      else if (live.length) pauseOrResume();
      break;
    }
  }
  return false;
}

// When the scripts of the page are all there: first the clicks and keys that came before them.
document.addEventListener("DOMContentLoaded", () => {
  countChosen(); // boxes that were checked before, or that the browser remembers
  for (const act of window.takeKeptActs()) act();
  for (const { key, at } of window.takeKeptKeys()) {
    if (key === "Enter" && document.activeElement.matches("a.row")) document.activeElement.click();
    else press(key, at);
  }
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (typing && event.key === "Escape") return typing.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return undefined;
    if (press(event.key, event.timeStamp)) event.preventDefault();
    return undefined;
  });
});
