// Calls to the server, with the API key when there is one.

export const $ = (id) => document.getElementById(id);

const key = $("key");
key.value = sessionStorage.getItem("k3-key") ?? "";

/** Runs `changed` when another key was typed. */
export function onKey(changed) {
  key.addEventListener("change", () => {
    sessionStorage.setItem("k3-key", key.value);
    changed();
  });
}

/** fetch with the key; asks for one when the server wants it. Paths are relative: a proxy may put
 *  the server below a prefix. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) $("key-box").hidden = false;
  return response;
}
