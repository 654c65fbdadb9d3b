// Let a group go on elsewhere: first a look at how many messages would come again, then the act.
import { call, number, renew, toast } from "/ui/static/console.js";

const dialog = document.getElementById("seek");
const form = document.getElementById("seek-form");
const text = document.getElementById("seek-text");
const list = document.getElementById("seek-list");
const yes = document.getElementById("seek-yes");
let at = null;

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-seek]");
  if (!button) return;
  at = button.dataset;
  document.getElementById("seek-title").textContent = `Seek ${at.group} on ${at.topic}`;
  forget();
  dialog.showModal();
});

function forget() {
  text.textContent = "";
  text.className = "";
  list.replaceChildren();
  yes.disabled = true;
  yes.textContent = "Seek";
}

function wanted() {
  const given = Object.fromEntries(new FormData(form));
  const body = { topic: at.topic };
  if (given.to === "offset") {
    if (!given.offset) throw new Error("Enter an offset.");
    body.offset = Number(given.offset);
  } else if (given.to === "time") {
    if (!given.time) throw new Error("Enter a time.");
    body.time = `${given.time.length === 16 ? `${given.time}:00` : given.time}Z`;
  } else {
    body.to = given.to;
  }
  if (given.partition) body.partition = Number(given.partition);
  return body;
}

async function reset(dryRun) {
  const url = `/v1/groups/${encodeURIComponent(at.group)}/reset`;
  return (await call("POST", url, { ...wanted(), dry_run: dryRun })).json();
}

function summed(partitions) {
  const again = partitions.reduce((sum, each) => sum + Math.max(each.messages ?? 0, 0), 0);
  const over = partitions.reduce((sum, each) => sum + Math.max(-(each.messages ?? 0), 0), 0);
  return { again, over };
}

async function attempt(doing) {
  try {
    await doing();
  } catch (error) {
    forget();
    text.className = "bad";
    text.textContent = error.message;
  }
}

document.getElementById("seek-look").addEventListener("click", () => attempt(async () => {
  forget();
  const answered = await reset(true);
  const { again, over } = summed(answered.partitions);
  text.textContent = `${number(again)} messages would be delivered again, ${number(over)} would be skipped.`;
  for (const each of answered.partitions.slice(0, 20)) {
    const item = document.createElement("li");
    item.textContent = `partition ${each.partition ?? 0}: from ${each.before ?? "no position"} to ${each.after}`;
    list.append(item);
  }
  yes.textContent = again ? `Seek: ${number(again)} again` : over ? `Seek: skip ${number(over)}` : "Seek";
  yes.disabled = false;
}));
yes.addEventListener("click", () => attempt(async () => {
  const { again, over } = summed((await reset(false)).partitions);
  dialog.close();
  toast(`${at.group} moved: ${number(again)} are delivered again, ${number(over)} are skipped`);
  renew().catch(() => {});
}));
form.addEventListener("input", forget);
form.addEventListener("submit", (event) => event.preventDefault());
form.querySelectorAll("input[name=offset], input[name=time]").forEach((field) => field.addEventListener("focus", () => {
  form.querySelector(`input[name=to][value=${field.name}]`).checked = true;
}));
document.getElementById("seek-no").addEventListener("click", () => dialog.close());
