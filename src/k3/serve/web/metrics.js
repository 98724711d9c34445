// The Prometheus text format, and what a dashboard asks of it.

/** Map from a metric's name to its samples [{labels, value}]. */
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value.replace(/\\(.)/g, "$1");
    }
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    if (!families.has(match[1])) families.set(match[1], []);
    families.get(match[1]).push({ labels, value });
  }
  return families;
}

/** Sum over all samples of a name whose labels include `wanted`; null when there is none. */
export function total(families, name, wanted = {}) {
  const samples = (families?.get(name) ?? []).filter(({ labels }) =>
    Object.entries(wanted).every(([key, value]) => labels[key] === value));
  return samples.length === 0 ? null : samples.reduce((sum, s) => sum + s.value, 0);
}

/** {label value: number} of one label of a metric. */
export function byLabel(families, name, label) {
  const out = {};
  for (const { labels, value } of families?.get(name) ?? []) {
    const key = labels[label] ?? "";
    out[key] = (out[key] ?? 0) + value;
  }
  return out;
}

/** Quantiles of what a histogram saw between two scrapes, linear inside a bucket. */
export function quantiles(now, before, name, wanted) {
  const counts = new Map();
  for (const [families, sign] of [[now, 1], [before, -1]]) {
    for (const { labels, value } of families?.get(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  }
  const buckets = [...counts].sort((a, b) => a[0] - b[0]);
  const count = buckets.at(-1)?.[1] ?? 0;
  if (count <= 0) return { count: 0, values: wanted.map(() => null) };
  const values = wanted.map((q) => {
    const rank = q * count;
    let below = 0, low = 0;
    for (const [bound, cumulative] of buckets) {
      if (cumulative >= rank) {
        if (bound === Infinity) return low;
        const inside = cumulative - below;
        return inside > 0 ? low + (bound - low) * (rank - below) / inside : bound;
      }
      below = cumulative;
      low = bound;
    }
    return low;
  });
  return { count, values };
}
