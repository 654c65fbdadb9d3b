// Jump to a queue or a page by its name: Ctrl+K, or Cmd+K (theme.js opens it).
import { call } from "/ui/static/console.js";

const palette = document.getElementById("palette");
const typed = document.getElementById("palette-text");
const list = document.getElementById("palette-list");
const MOST = 12;
let queues = null;
let chosen = 0;

const pages = () => [...document.querySelectorAll(".top nav a")].map((link) => ({
  name: link.textContent.trim(), href: link.getAttribute("href"), kind: "page",
}));

async function known() {
  if (!queues) {
    try {
      const told = await (await call("GET", "/v1/topics?limit=1000")).json();
      queues = told.topics.map(({ name }) => ({ name, href: `/ui/queues/${encodeURIComponent(name)}`, kind: "queue" }));
    } catch {
      queues = []; // the pages are still there
    }
  }
  return [...pages(), ...queues];
}

// The pages of each queue, for those who type its name and more: "orders dead".
const PARTS = { "dead letters": "/dead", log: "/log", charts: "/charts", "live tail": "/tail", settings: "/settings" };
const parts = (all) => all.filter((each) => each.kind === "queue").flatMap((each) => Object.entries(PARTS).map(([name, path]) => ({
  name: `${each.name} ${name}`, href: each.href + path, kind: "page",
})));

// Names that begin with the text come first, then those that contain it, then those with its letters in order.
function rank(name, text) {
  const [one, other] = [name.toLowerCase(), text.toLowerCase()];
  if (one.startsWith(other)) return 0;
  if (one.includes(other)) return 1;
  let at = -1;
  return [...other].every((letter) => (at = one.indexOf(letter, at + 1)) >= 0) ? 2 : -1;
}

async function show() {
  const text = typed.value.trim();
  const all = await known();
  const found = [...all, ...(/\S\s+\S/.test(text) ? parts(all) : [])]
    .map((each) => ({ ...each, rank: rank(each.name, text) }))
    .filter((each) => each.rank >= 0)
    .sort((one, other) => one.rank - other.rank)
    .slice(0, MOST);
  if (text !== typed.value.trim()) return;
  if (text) found.push({ name: `Search all queues for “${text}”`, href: `/ui/search?${new URLSearchParams({ q: text })}`, kind: "search" });
  list.replaceChildren(...found.map((each, i) => {
    const item = document.createElement("li");
    item.id = `palette-${i}`;
    item.setAttribute("role", "option");
    item.dataset.href = each.href;
    const kind = document.createElement("span");
    kind.className = "dim";
    kind.textContent = ` ${each.kind}`;
    item.append(each.name, kind);
    return item;
  }));
  choose(0);
}

function choose(at) {
  const items = [...list.children];
  chosen = Math.min(Math.max(at, 0), Math.max(items.length - 1, 0));
  items.forEach((item, i) => item.setAttribute("aria-selected", String(i === chosen)));
  typed.setAttribute("aria-activedescendant", items[chosen]?.id ?? "");
  items[chosen]?.scrollIntoView({ block: "nearest" });
}

const go = (item) => item && location.assign(item.dataset.href);

typed.addEventListener("input", show);
if (palette.open) show(); // opened by theme.js before this script came
typed.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    choose(chosen + (event.key === "ArrowDown" ? 1 : -1));
  } else if (event.key === "Enter") {
    event.preventDefault();
    go(list.children[chosen]);
  }
});
list.addEventListener("click", (event) => go(event.target.closest("li")));
