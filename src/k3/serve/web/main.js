// The two views.
import { startChat } from "./chat.js";
import { $, call, onKey } from "./common.js";
import { startDashboard } from "./dashboard.js";

const dashboard = startDashboard();

function show(name) {
  for (const view of ["chat", "dashboard"]) {
    const chosen = view === name;
    $(view).hidden = !chosen;
    $(`tab-${view}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${view}`).tabIndex = chosen ? 0 : -1;
  }
  dashboard.active(name === "dashboard");
  history.replaceState(null, "", name === "dashboard" ? "#dashboard" : "#");
}

async function showModel() {
  try {
    const response = await call("v1/models");
    if (!response.ok) return;
    $("model").textContent = (await response.json()).data[0].id;
  } catch {
    $("model").textContent = "the server does not answer";
  }
}

startChat();
onKey(showModel);
for (const view of ["chat", "dashboard"]) {
  const tab = $(`tab-${view}`);
  tab.addEventListener("click", () => show(view));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = view === "chat" ? "dashboard" : "chat";
    show(other);
    $(`tab-${other}`).focus();
  });
}
show(location.hash === "#dashboard" ? "dashboard" : "chat");
showModel();
