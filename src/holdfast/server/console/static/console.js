// What all pages share: the theme, the keyboard, parts that renew themselves, and acts that ask first.

const find = (selector) => document.querySelector(selector);

export function toast(text, bad = false) {
  const made = document.createElement("div");
  made.className = bad ? "toast bad" : "toast";
  made.textContent = text;
  find("#toasts").append(made);
  setTimeout(() => made.remove(), bad ? 12000 : 5000);
}

// A call of the API; what went wrong is an Error with the server's own sentence.
export async function call(method, url, body, accept = "application/json") {
  const options = { method, headers: { accept } };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(url, options);
  } catch {
    throw new Error("The server does not answer. Is it running?");
  }
  if (!answer.ok) {
    const answered = await answer.json().catch(() => null);
    throw new Error(answered?.error?.message ?? `The server answered with ${answer.status}`);
  }
  return answer;
}

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

export async function renew() {
  const headers = { accept: "text/html" };
  if (etag) headers["if-none-match"] = etag;
  const answer = await fetch(location.href, { headers });
  if (answer.status === 304) return tick();
  if (!answer.ok) throw new Error(String(answer.status));
  etag = answer.headers.get("etag") ?? "";
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of document.querySelectorAll("[data-live]")) {
    const found = fresh.getElementById(old.id);
    if (!found || found.isEqualNode(old)) continue;
    const focused = old.contains(document.activeElement) ? focusName(document.activeElement) : null;
    const lefts = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
    const taken = document.importNode(found, true);
    old.replaceWith(taken);
    taken.querySelectorAll(".scroll").forEach((part, i) => { part.scrollLeft = lefts[i] ?? 0; });
    if (focused) taken.querySelector(focused)?.focus({ preventScroll: true });
  }
  const note = fresh.getElementById("live-note");
  if (note) find("#live-note").textContent = note.textContent;
  return undefined;
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
  const now = Date.now();
  for (const time of document.querySelectorAll("time[datetime]")) {
    const away = (now - Date.parse(time.dateTime.replace(" ", "T"))) / 1000;
    time.textContent = away >= 0 ? `${age(away)} ago` : `in ${age(-away)}`;
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
      document.body.classList.remove("stale");
    } catch {
      find("#live-note").textContent = "the server does not answer; this page is out of date";
      document.body.classList.add("stale");
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
  tell(words, bad);
  yes.hidden = true;
  no.disabled = false;
  no.textContent = "Close";
  no.focus();
}

no.addEventListener("click", () => ask.close());
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
  if (document.querySelector("[data-live]")) renew().catch(() => {});
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
    : `${letters} will be put back into the queue, each once, in the order in which they were sent.`);
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
    finish(`${number(done)} ${drops ? "purged" : to ? `put into ${to}` : "put back"}.`);
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

async function redrive(url, body) {
  const answer = await call("POST", url, body, "application/x-ndjson");
  const lines = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let done = 0;
  progress.hidden = false;
  for (;;) {
    const { value, done: ended } = await lines.read();
    if (ended) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const line of parts.filter(Boolean)) {
      const answered = JSON.parse(line);
      if (answered.error) throw new Error(`${number(done)} put back, then: ${answered.error.message}`);
      done = answered.done;
      progress.max = Math.max(answered.matched, 1);
      progress.value = done;
      tell(`${number(done)} of ${number(answered.matched)} put back`);
    }
  }
  return done;
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    toast("Copied");
  } catch {
    getSelection().selectAllChildren(source);
    toast("Selected; copy it with the keyboard");
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
const PLACES = { o: "/ui", g: "/ui/groups", w: "/ui/workers", h: "/ui/health", l: "/ui/locks", a: "/ui/audit" };
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

// When the scripts of the page are all there: first the keys that came before them.
document.addEventListener("DOMContentLoaded", () => {
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
