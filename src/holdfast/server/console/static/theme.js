// Before anything is drawn: the chosen theme, if one was chosen.
try {
  const chosen = localStorage.getItem("holdfast-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch (error) {
  // No storage: the system's choice stays.
}

// Whoever sees the page may use it. Keys that are pressed before its own script listens are kept for that.
const keptKeys = [];

function keepKey(event) {
  const typing = event.target.closest?.("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  if (event.key === "Enter" && event.target !== document.body) return undefined; // what has the focus does that by itself
  if (event.key === "/") {
    event.preventDefault();
    const filter = document.getElementById("filter") ?? document.getElementById("find");
    if (filter) {
      filter.focus(); // now: what is typed next is for the filter
      return filter.select();
    }
  }
  return keptKeys.push({ key: event.key, at: event.timeStamp });
}

document.addEventListener("keydown", keepKey);

// The palette opens here rather than in its own script, so that what is typed next goes into it in any case.
document.addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "k") return;
  const palette = document.getElementById("palette");
  if (!palette || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  const typed = document.getElementById("palette-text");
  typed.value = "";
  palette.showModal();
  typed.dispatchEvent(new Event("input"));
});
window.takeKeptKeys = () => {
  document.removeEventListener("keydown", keepKey);
  return keptKeys;
};

// Clicks on what only a script answers are kept as well. Without this, one that came early did nothing, and a form that a
// script sends was sent by the browser, to a page that is not there.
const keptActs = [];

function keepAct(event) {
  const at = event.target;
  const part = event.type === "click" ? at.closest?.('button[type="button"]:not(:disabled)') : at;
  const ours = { click: part, submit: at.method !== "dialog" && !at.hasAttribute?.("action"), change: at.matches?.("[data-submits]") }[event.type];
  if (!ours) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  keptActs.push({
    click: () => part.click(),
    submit: () => part.requestSubmit(),
    change: () => part.dispatchEvent(new Event("change", { bubbles: true })),
  }[event.type]);
}

for (const type of ["click", "submit", "change"]) document.addEventListener(type, keepAct, true);
window.takeKeptActs = () => {
  for (const type of ["click", "submit", "change"]) document.removeEventListener(type, keepAct, true);
  return keptActs;
};
