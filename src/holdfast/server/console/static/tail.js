// Messages as they come, newest first: what the server's event stream says, and nothing is taken.
import { visible } from "/ui/static/console.js";

const table = document.getElementById("tail");
const state = document.getElementById("tail-state");
const filter = document.getElementById("filter");
const pause = document.getElementById("pause");
const MOST = 500;
const AGAIN_MS = 3000;

if (table) {
  const body = table.tBodies[0];
  const held = [];
  let paused = false;
  let seen = 0;
  let missed = false; // whether the connection was lost since the page was opened

  const textOf = (base64) => {
    const bytes = Uint8Array.from(atob(base64 ?? ""), (letter) => letter.charCodeAt(0));
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
      if (!/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/.test(text)) return text;
    } catch {
      // No text: shown as bytes.
    }
    return [...bytes.slice(0, 40)].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  };

  const cell = (row, label, text, classes, kind = "td") => {
    const made = document.createElement(kind);
    made.className = classes;
    if (label) made.dataset.label = label;
    made.textContent = visible(text);
    row.append(made);
    return made;
  };

  const rowOf = (message) => {
    const row = document.createElement("tr");
    row.className = "fresh";
    const text = textOf(message.body);
    const key = message.key ?? (message.key_data ? textOf(message.key_data) : "");
    const headers = (message.headers ?? []).map((each) => `${each.name}: ${each.value ?? ""}`).join("\n");
    const time = new Date(Math.floor(message.timestamp_ns / 1e6));
    cell(row, "", `${time.toISOString().slice(11, 23)}Z`, "dim");
    const link = document.createElement("a");
    link.className = "row mono";
    const group = table.dataset.group ? `?group=${encodeURIComponent(table.dataset.group)}` : "";
    link.href = `${table.dataset.page}${encodeURIComponent(`${message.topic}-${message.partition ?? 0}-${message.offset}`)}${group}`;
    link.textContent = message.id;
    cell(row, "", "", "", "th").append(link);
    row.lastChild.scope = "row";
    cell(row, "key", key || "–", "mono cut");
    cell(row, "body", text.replace(/\s+/g, " ").slice(0, 300), "mono cut preview");
    cell(row, "size", `${(message.size ?? 0).toLocaleString("en-US")} B`, "n");
    row.dataset.text = `${message.id}\n${key}\n${headers}\n${text}`.toLowerCase();
    return row;
  };

  const choose = (row) => { row.hidden = !row.dataset.text.includes(filter.value.trim().toLowerCase()); };

  const show = (row) => {
    choose(row);
    body.prepend(row);
    while (body.rows.length > MOST) body.lastChild.remove();
  };

  const say = () => {
    const count = seen === 1 ? "1 message" : `${seen.toLocaleString("en-US")} messages`;
    const waiting = held.length ? `, ${held.length} not shown yet` : "";
    const gap = missed ? ". The connection was lost for a while: messages sent in that time are not listed" : "";
    state.textContent = `${paused ? "Paused" : "Listening"}: ${count} so far${waiting}${gap}.`;
  };

  const take = (event) => {
    seen += 1;
    const row = rowOf(JSON.parse(event.data));
    if (paused) {
      held.push(row);
      if (held.length > MOST) held.shift();
    } else {
      show(row);
    }
    say();
  };

  // A browser gives up on a stream that is refused; then we try again, and the top of the page says what is wrong.
  const listen = () => {
    const source = new EventSource(table.dataset.url);
    source.addEventListener("open", say);
    source.addEventListener("stats", say);
    source.addEventListener("message", take);
    source.addEventListener("error", () => {
      missed = true;
      state.textContent = "The connection was lost. Trying again…";
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN_MS);
    });
  };
  listen();

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
    if (!paused) held.splice(0).forEach(show);
    say();
  });
  document.getElementById("clear").addEventListener("click", () => body.replaceChildren());
  document.getElementById("tail-form").addEventListener("submit", (event) => event.preventDefault());
  filter.addEventListener("input", () => [...body.rows].forEach(choose));
}
