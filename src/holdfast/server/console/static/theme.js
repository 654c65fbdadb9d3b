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
