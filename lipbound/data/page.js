const detail = document.getElementById("detail"), listed = document.querySelector("#layers tbody");
function select(row) {
  listed.querySelectorAll("tr").forEach(r => r.setAttribute("aria-selected", r === row));
  detail.replaceChildren(document.getElementById("layer-" + row.dataset.index).content.cloneNode(true));
}
if (detail) {
  listed.addEventListener("click", e => { const row = e.target.closest("tr"); if (row) select(row); });
  listed.addEventListener("keydown", e => {
    const row = e.target.closest("tr");
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); select(row); }
    const next = {ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling}[e.key];
    if (next) { e.preventDefault(); next.focus(); select(next); }
  });
  const first = [...listed.children].sort((a, b) => b.children[4].dataset.value - a.children[4].dataset.value)
    .find(r => document.getElementById("layer-" + r.dataset.index).content.querySelector("img")) || listed.children[0];
  if (first) select(first);
}
document.querySelectorAll("table.sortable th button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, column = [...head.parentElement.children].indexOf(head);
  const body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === (button.dataset.kind === "number" ? "descending" : "ascending");
  const order = (button.dataset.kind === "number") !== down ? "descending" : "ascending";
  head.parentElement.querySelectorAll("th[aria-sort]").forEach(th => th.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", order);
  const key = row => { const cell = row.children[column];
    return button.dataset.kind === "text" ? cell.textContent : parseFloat(cell.dataset.value); };
  const sign = order === "ascending" ? 1 : -1;
  body.append(...[...body.children].sort((a, b) => { const x = key(a), y = key(b);
    return sign * (typeof x === "string" ? x.localeCompare(y, undefined, {numeric: true}) : x - y); }));
}));
