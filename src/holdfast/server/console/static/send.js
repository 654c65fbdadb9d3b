// A new message from the form, through the API.
import { call, renew } from "/ui/static/console.js";

const form = document.getElementById("send");
const said = document.getElementById("sent");

const headersOf = (text) => text.split("\n").filter((line) => line.trim()).map((line) => {
  const at = line.indexOf(":");
  if (at < 1) throw new Error(`A header is a name, a colon and a value. This is not one: ${line}`);
  return { name: line.slice(0, at).trim(), value: line.slice(at + 1).trim() };
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = Object.fromEntries(new FormData(form));
  said.className = "";
  try {
    const message = { text: given.body };
    for (const name of ["key", "dedup_id", "correlation_id"]) if (given[name]) message[name] = given[name];
    for (const name of ["priority", "delay", "ttl"]) if (given[name]) message[name] = Number(given[name]);
    const headers = headersOf(given.headers);
    if (headers.length) message.headers = headers;
    const { stored: [stored] } = await (await call("POST", form.dataset.url, { messages: [message] })).json();
    const link = document.createElement("a");
    const group = form.dataset.group ? `?group=${encodeURIComponent(form.dataset.group)}` : "";
    link.href = form.dataset.page + encodeURIComponent(stored.id) + group;
    link.textContent = stored.id;
    said.replaceChildren(stored.duplicate ? "A duplicate, not stored again: " : "Sent: ", link, ` (${stored.durability})`);
    form.elements.body.focus();
    renew().catch(() => {});
  } catch (error) {
    said.className = "bad";
    said.textContent = error.message;
  }
});
form.elements.body.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
