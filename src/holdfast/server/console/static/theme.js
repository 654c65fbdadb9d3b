// Before anything is drawn: the chosen theme, if one was chosen.
try {
  const chosen = localStorage.getItem("holdfast-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch (error) {
  // No storage: the system's choice stays.
}
